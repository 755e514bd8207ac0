"""Models in plain torch: what people write themselves."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .member import UNEVEN, Example, Member

BATCH, LENGTH, VOCABULARY = 8, 16, 96


def _tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


class Residual(nn.Module):
    """A bottleneck of ResNet-50."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *(nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or given != 4 * width:
            self.shortcut = nn.Sequential(nn.Conv2d(given, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W)."""
        return F.relu(self.convs(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50 with its 3, 4, 6 and 3 blocks, each with ``width`` channels for 64."""

    def __init__(self, width: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages, given = [], width
        for k, count in enumerate((3, 4, 6, 3)):
            for block in range(count):
                stages.append(Residual(given, width << k, 2 if k and not block else 1))
                given = 4 * (width << k)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(given, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """The loss; the image is (N, 3, H, W)."""
        x = F.adaptive_avg_pool2d(self.stages(self.stem(image)), 1).flatten(1)
        return F.cross_entropy(self.head(x), label)


def resnet50() -> Example:
    """ResNet-50 with 4 channels where it has 64, on pictures of 32 by 32."""
    return ResNet(), {"image": torch.randn(BATCH, 3, 32, 32), "label": torch.randint(0, 10, (BATCH,))}


class Translator(nn.Module):
    """``nn.Transformer`` between embeddings and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The loss; both are (N, T)."""
        given, wanted = target[:, :-1], target[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1], dtype=self.head.weight.dtype)
        x = self.transformer(self.embedding(source), self.embedding(given), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


def transformer() -> Example:
    """Translation."""
    return Translator(), {"source": _tokens(), "target": torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))}


class StepsFirst(nn.Module):
    """A language model of torch's layers without ``batch_first``: recurrent ones, and attention with a mask."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(VOCABULARY, width), nn.GRU(width, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of (T, N)."""
        given, wanted = tokens[:-1], tokens[1:]
        mask = nn.Transformer.generate_square_subsequent_mask(len(given), dtype=self.head.weight.dtype)
        x = self.layers(self.gru(self.embedding(given))[0], mask)
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), wanted.reshape(-1))


def steps_first() -> Example:
    """Six steps of every row."""
    return StepsFirst(), {"tokens": torch.randint(0, VOCABULARY, (7, BATCH))}


class Recommender(nn.Module):
    """DLRM: bags of categories, dense features, and their products in pairs. https://arxiv.org/abs/1906.00091"""

    def __init__(self, tables: tuple[int, ...] = (40, 50, 64, 30), width: int = 16, dense: int = 12) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in tables)
        self.bottom = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        """The loss; ``sparse`` is (N, table, bag)."""
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(sparse[:, k]) for k, table in enumerate(self.tables))], dim=1)
        products = rows @ rows.transpose(1, 2)
        i, j = torch.tril_indices(rows.shape[1], rows.shape[1], offset=-1)
        logits = self.top(torch.cat([x, products[:, i, j]], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


def dlrm() -> Example:
    """Clicks."""
    sparse = torch.randint(0, 30, (2 * BATCH, 4, 3))
    clicked = torch.randint(0, 2, (2 * BATCH,)).float()
    return Recommender(), {"dense": torch.randn(2 * BATCH, 12), "sparse": sparse, "clicked": clicked}


class GraphNetwork(nn.Module):
    """Messages along edges, added up where they arrive, and divided by the degree."""

    def __init__(self, width: int = 16, hidden: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.messages = nn.ModuleList((nn.Linear(width, hidden), nn.Linear(hidden, hidden)))
        self.own = nn.ModuleList((nn.Linear(width, hidden), nn.Linear(hidden, hidden)))
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, label: Tensor) -> Tensor:
        """The loss; x is (node, feature), source and target are (edge,)."""
        degree = x.new_zeros(len(x)).index_add(0, target, x.new_ones(len(target))).clamp(min=1).unsqueeze(1)
        for message, own in zip(self.messages, self.own):
            sent = message(x)[source]
            x = F.relu(own(x) + sent.new_zeros(len(x), sent.shape[1]).index_add(0, target, sent) / degree)
        return F.cross_entropy(self.head(x), label)


def graph() -> Example:
    """A random graph of 24 nodes and 64 edges."""
    edges = torch.randint(0, 24, (2, 64))
    given = {"x": torch.randn(24, 16), "source": edges[0].clone(), "target": edges[1].clone()}
    return GraphNetwork(), given | {"label": torch.randint(0, 4, (24,))}


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss; both are (N, T)."""
        x, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def lstm() -> Example:
    """Eight steps."""
    return Recurrent(), {"tokens": _tokens()[:, :8].contiguous(), "targets": _tokens()[:, :8].contiguous()}


class StateSpace(nn.Module):
    """A block of Mamba-2: a state space with one number for each head, computed in chunks as products of matrices.

    Section 6 of https://arxiv.org/abs/2405.21060.
    """

    def __init__(self, width: int = 32, heads: int = 4, state: int = 8, chunk: int = 4) -> None:
        super().__init__()
        self.heads, self.state, self.chunk, inner = heads, state, chunk, 2 * width
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, 2 * inner + 2 * state + heads, bias=False)
        self.conv = nn.Conv1d(inner + 2 * state, inner + 2 * state, 4, groups=inner + 2 * state, padding=3)
        self.log_decay = nn.Parameter(torch.zeros(heads))
        self.time = nn.Parameter(torch.zeros(heads))
        self.skip = nn.Parameter(torch.ones(heads))
        self.gated = nn.RMSNorm(inner)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C)."""
        inner = self.gated.normalized_shape[0]
        gate, mixed, time = self.into(self.norm(x)).split([inner, inner + 2 * self.state, self.heads], dim=-1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        given, b, c = mixed.split([inner, self.state, self.state], dim=-1)
        time = F.softplus(time + self.time)  # (N, T, H)
        given = given.unflatten(-1, (self.heads, -1))  # (N, T, H, P)
        y = self._scan(given * time.unsqueeze(-1), -torch.exp(self.log_decay) * time, b, c)
        y = (y + given * self.skip.unsqueeze(-1)).flatten(-2)
        return x + self.out(self.gated(y * F.silu(gate)))

    def _scan(self, x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Within chunks as an attention without softmax, and between them as a recurrence."""
        x, decay, b, c = (t.unflatten(1, (-1, self.chunk)) for t in (x, decay, b, c))
        decay = decay.permute(0, 3, 1, 2)  # (N, H, chunk, T)
        total = decay.cumsum(-1)
        within = torch.exp(_sums_between(decay))
        y = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, within, x)
        kept = torch.exp(total[..., -1:] - total)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", b, kept, x)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        between = torch.exp(_sums_between(F.pad(total[..., -1], (1, 0))))
        states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
        y = y + torch.einsum("bcln,bchpn,bhcl->bclhp", c, states, torch.exp(total))
        return y.flatten(1, 2)


def _sums_between(x: Tensor) -> Tensor:
    """For (..., T) the sums of x over (s, t], shape (..., T, T); minus infinity where s > t."""
    length = x.shape[-1]
    summed = x.cumsum(-1)
    below = torch.ones(length, length, dtype=torch.bool).tril()
    return (summed.unsqueeze(-1) - summed.unsqueeze(-2)).masked_fill(~below, -math.inf)


class Mamba(nn.Module):
    """A language model of two blocks of Mamba-2."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(StateSpace(width) for _ in range(2))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss; both are (N, T)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mamba2() -> Example:
    """With the embedding as the head."""
    return Mamba(), {"tokens": _tokens(), "targets": _tokens()}


class Perceptron(nn.Module):
    """Two layers between which no axis divides anything."""

    def __init__(self, width: int = 10, hidden: int = 14, classes: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        """The loss; x is (N, C)."""
        return F.cross_entropy(self.down(F.gelu(self.up(x))), label)


def perceptron() -> Example:
    """Eleven rows."""
    return Perceptron(), {"x": torch.randn(11, 10), "label": torch.randint(0, 7, (11,))}


class Mixture(nn.Module):
    """Experts in a loop, each of which picks its tokens."""

    def __init__(self, width: int, experts: int = 4, choices: int = 2) -> None:
        super().__init__()
        self.router, self.choices = nn.Linear(width, experts, bias=False), choices
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, S, D)."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.choices)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            made[token] += expert(tokens[token]) * weights[token, choice, None]
        return made.view(x.shape)


class Mixtures(nn.Module):
    """A language model of two layers of attention and experts."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(2))
        self.experts = nn.ModuleList(Mixture(width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of every next word; tokens are (N, S)."""
        x = self.embed(tokens)
        for attention, experts, before, between in zip(self.attention, self.experts, self.norms[:2], self.norms[2:]):
            normed = before(x)
            x = x + attention(normed, normed, normed, need_weights=False)[0]
            x = x + experts(between(x))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def experts() -> Example:
    """Experts in a loop."""
    return Mixtures(), {"tokens": _tokens()}


PLAIN = (
    *(Member(make.__name__, make) for make in (resnet50, transformer, steps_first, dlrm, graph, lstm, mamba2, experts)),
    Member("perceptron", perceptron, ("a=8", "a=2,b=4", "a=2,b=2,c=2", *UNEVEN)),
)
