"""What stood in the way of a batch that is cut, or of heads: each against one process, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import autoshard
from autoshard.capture import capture
from autoshard.layout import S
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan

from ..fuzz.random_plans import random_plan, random_plans
from ..thorough import some_thorough
from .as_before import check_as_before


class Decorrelated(nn.Module):
    """Features are divided by their deviations over the batch, as by Barlow twins; all of them are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        variance, mean = torch.var_mean(h, 0, correction=0)
        h = (h - h.mean(0)) / h.std(0)
        return (h.t() @ h / len(h)).triu(1).square().sum() + (variance * mean).sum() + x.std() * h.var((0, 1), True)


class Policy(nn.Module):
    """Proximal policy optimisation: distributions, and advantages that are normed over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.policy, self.value = nn.Linear(8, 12), nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).tanh()
        actions, advantages = x[:, :4].argmax(-1), (x[:, 0] - x[:, 0].mean()) / (x[:, 0].std() + 1e-8)
        chosen = torch.distributions.Categorical(logits=self.policy(h))
        ratio = (chosen.log_prob(actions) + x[:, 1].abs()).exp()
        gained = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        spread = torch.distributions.Normal(self.value(h).squeeze(-1), h.std(-1)).entropy().mean()
        return (self.value(h).squeeze(-1) - x[:, 2]).square().mean() - gained - 0.01 * chosen.entropy().mean() - spread


class Waves(nn.Module):
    """A weight in the frequency domain, and a long convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kernel = nn.Parameter(torch.randn(4, 4, 3, 2)), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x)
        made = torch.zeros_like(waves)
        made[:, :, :3] = torch.einsum("bix,iox->box", waves[:, :, :3], torch.view_as_complex(self.weight))
        h = torch.fft.irfft(made, n=8) + torch.fft.irfft(waves * torch.fft.rfft(self.kernel), n=8)
        return h.relu().square().mean()


class Turned(nn.Module):
    """A spatial transformer: each picture is turned as is learned of it."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.angles(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False).square().mean()


class Grouped(nn.Module):
    """Attention whose keys and values have fewer heads than its queries, without a copy for each of those."""

    def __init__(self, heads: int, of_keys: int, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 4 * n) for n in (heads, of_keys, of_keys, 2))
        self.back = nn.Linear(4 * heads, 8)
        self.heads, self.of_keys = heads, of_keys
        self.register_buffer("bias", torch.randn(1, heads, 5, 5) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        given = (self.q, self.heads), (self.k, self.of_keys), (self.v, self.of_keys)
        q, k, v = (layer(x).unflatten(-1, (heads, 4)).transpose(1, 2) for layer, heads in given)
        h = F.scaled_dot_product_attention(q, k, v, self.bias, is_causal=self.bias is None, enable_gqa=True)
        return self.o(self.back(h.transpose(1, 2).flatten(2))).square().mean()


class Preferences(nn.Module):
    """What was chosen and what was rejected, as one batch through the layers: direct preference optimisation; beside
    that two views of each row, and several guesses for one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.qkv, self.o = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.guess = nn.Linear(8, 8)

    def layers(self, x: Tensor) -> Tensor:
        h = self.norm(self.enter(x))
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        return h + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, x.flip(1)], 0)
        logits = self.layers(both)
        targets = torch.cat([x[..., 0], x[..., 1]]).abs().long().clamp(max=7)
        said = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1).sum(-1)
        chosen, rejected = said[: len(x)], said[len(x) :]
        one, other = self.layers(torch.cat([x, x.tanh()])).chunk(2, 0)
        guesses = self.guess(x.mean(1).repeat(3, 1)).view(3, len(x), 8)
        best = (guesses - x[None, :, 0]).square().mean(-1).amin(0).mean()
        return (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            - F.logsigmoid(chosen - rejected).mean()
            + (F.mse_loss(one, other) + best)
        )


class HeadsBehindEachOther(nn.Module):
    """Attention whose heads are put behind each other along the batch: the set transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.cat(each(x).split(4, 2), 0) for each in (self.q, self.k, self.v))
        h = torch.cat((q + (q.bmm(k.transpose(1, 2)) / 8**0.5).softmax(2).bmm(v)).split(len(x), 0), 2)
        return (h + self.o(h).relu()).square().mean()


class FiltersOfRows(nn.Module):
    """Each picture has filters of its own, so that rows are groups of one convolution (StyleGAN 2); a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.filters = nn.Linear(36, 4), nn.Parameter(torch.randn(6, 4, 3, 3))
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)

    def forward(self, x: Tensor) -> Tensor:
        rows, channels, *size = x.shape
        filters = self.filters * (1 + self.scales(x.mean(1).flatten(1)))[:, None, :, None, None]
        apart = x.reshape(1, rows * channels, *size), filters.flatten(0, 1)
        y = F.conv2d(*apart, padding=1, groups=rows).view(rows, 6, *size)
        return self.depthwise(y.relu()).square().mean()


class Margins(nn.Module):
    """The logit of each row's label is written over, as in ArcFace; distances to few codes and to many; waves by an
    imaginary number; a weight with a penalty that no rank can do a part of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.codes = nn.Linear(8, 8), nn.Parameter(torch.randn(6, 8))
        self.many = nn.Parameter(torch.randn(30, 8))

    def forward(self, x: Tensor) -> Tensor:
        labels, rows = x[:, :6].argmax(-1), torch.arange(len(x))
        h = self.enter(x)
        cosines = F.normalize(h) @ F.normalize(self.codes).t()
        logits = cosines.clone()
        logits[rows, labels] = (cosines[rows, labels].clamp(-0.9, 0.9).acos() + 0.5).cos()
        waves = (torch.exp(1j * h) * torch.fft.fft(h)).abs().square().mean()
        apart = torch.cdist(h, self.codes).min(-1)[0].mean() + torch.cdist(h, self.codes, p=1.0).mean()
        apart = apart + torch.cdist(h, self.many).amin(-1).mean()
        return F.cross_entropy(logits, labels) + apart + waves - torch.linalg.slogdet(self.enter.weight)[1]


class MatricesOfRows(nn.Module):
    """Each row's own matrix is decomposed and solved with; a product of three tensors; losses of few words."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.pairs, self.spread = nn.Linear(8, 9), nn.Bilinear(8, 9, 4), nn.Linear(4, 4)
        self.loss = nn.GaussianNLLLoss(full=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        matrices = h.view(-1, 3, 3) + 2.0 * torch.eye(3, dtype=x.dtype)
        vectors = torch.linalg.svd(matrices)[0].abs() + torch.linalg.eigh(matrices)[1].abs()
        solved = torch.linalg.solve_ex(matrices, vectors)[0]
        low, high = _bounds(solved)
        y = self.pairs(x, F.rrelu(h))
        margin = F.soft_margin_loss(y, x[:, :4].sign()) + (high - low).square().mean()
        return margin + self.loss(y, x[:, :4], F.softplus(self.spread(y))) + torch.linalg.slogdet(matrices.mT)[1].mean()


def _bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    if torch.__version__ < "2.12":  # whose aminmax has no gradient
        return x.amin(-1), x.amax(-1)
    low, high = torch.aminmax(x, dim=-1)
    return low, high


class Pictures(nn.Module):
    """Features of pictures, kept in a list, in the places of their tokens: two for each row, wherever these are."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.read, self.answer = nn.Linear(8, 8), nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = list(self.see(x).view(-1, 2, 4))
        places = (x.argsort(1) < 2).unsqueeze(-1)
        torch._check_tensor_all(x < 100.0)
        mixed = self.read(x.argsort(1)).masked_scatter(places, torch.cat(features))
        pieces = mixed.masked_scatter(places.expand(mixed.shape), torch.stack(features) * 2.0).chunk(2)
        return (self.answer(mixed) * torch.cat(pieces)).square().mean() + torch.stack(self.see(x).unbind()).mean()


class EveryExpert(nn.Module):
    """Every expert gets all words, with zeros for those that others are chosen for, as in Llama 4."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.enter = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 12))
        self.leave = nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        words = x.reshape(-1, 8)
        scores = self.router(words)
        scores = torch.full_like(scores, -torch.inf).scatter(1, *reversed(scores.topk(1, dim=1))).sigmoid()
        given = words.repeat(3, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(given.view(3, -1, 8), self.enter).chunk(2, dim=-1)
        made = torch.bmm(up * F.silu(gate), self.leave).view(-1, 8)
        return (words + made.reshape(3, -1, 8).sum(dim=0)).square().mean()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped": lambda w: w.clamp(max=0.3),
    "shares": lambda w: w.softmax(0),
    "gates": lambda w: w.log_softmax(-1) + w.sigmoid(),
    "positive": lambda w: F.softplus(w) * F.relu(w),
    "norms": lambda w: F.normalize(w, dim=-1),
    "standard": lambda w: (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-3),
    "sparse": lambda w: torch.where(w >= w.topk(3, 1)[0][:, -1:], w, 0.0),
    "sorted": lambda w: w.sort(1)[0],
    "turning": lambda w: torch.matrix_exp(w - w.t()),
}


class Functions(nn.Module):
    """Weights that are computed of parameters, each in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.randn(8, 8)) for name in FUNCTIONS})

    def forward(self, x: Tensor) -> Tensor:
        for name, function in FUNCTIONS.items():
            x = x + (x @ function(self.weights[name])).tanh()
        return x.square().mean()


class Stacked(nn.Module):
    """Two views of each row, stacked and folded into one batch; several guesses for one; steps in front."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layer, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.randn(3, 1, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        views = self.layer(torch.stack([x, self.enter(x)]).flatten(0, 1)).view(2, *x.shape)
        guesses = self.layer((self.enter(x).expand(3, *x.shape) * self.scale).flatten(0, 1)).tanh().view(3, *x.shape)
        repeated = self.layer(x[None].repeat(3, 1, 1, 1).flatten(0, 1)).sigmoid().unflatten(0, (3, len(x)))
        steps = self.layer((self.enter(x).transpose(0, 1) * 2).reshape(-1, 8)).tanh().view(-1, len(x), 8).mean(0)
        words = torch.stack([x, self.enter(x)], 2).transpose(1, 2).transpose(0, 1).reshape(-1, 8)
        return (
            (views[0] * views[1]).mean()
            + steps.square().mean()
            + self.layer(words).log_softmax(-1)[:, 0].mean()
            + guesses.amin(0).mean()
            + repeated.std(0).mean()
        )


class ChannelsLast(nn.Module):
    """Patches of images whose channels are last, and of which no axis cuts the channels evenly; patches merged."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.merged = nn.Conv2d(3, 12, 2, 2), nn.LayerNorm(12), nn.Conv2d(12, 5, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.patches(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return self.merged(h.permute(0, 3, 1, 2)).square().mean()


def _plan(model: nn.Module, args: tuple[Tensor, ...], mesh: str, *constraints: str) -> ShardingPlan:
    return autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=constraints, cache=False)


class Blocks(nn.Module):
    """A projection of each group of features by rows of one matrix that are its own, as DeepSeek V4 has it; and
    features all of which are turned, so that nothing is left to go past that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(8, 16), nn.Linear(8, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        groups = self.enter(x).view(-1, 2, 8)
        turned, passing = groups.split([8, 0], -1)
        ahead, behind = groups[..., :8], groups[..., 8:]
        groups = torch.cat([passing, turned.cos() * ahead, behind], -1).transpose(0, 1)
        made = torch.bmm(groups, self.blocks.weight.view(2, 6, 8).transpose(1, 2)).transpose(0, 1)
        return made.reshape(*x.shape[:2], 12).square().mean() + behind.sum()


class SeeEachOther(nn.Module):
    """Attention among words that follow each other, or are of one kind: a mask that ``vmap`` makes, as in Gemma 3."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kinds, words = (x[..., 0] > 0).long(), torch.arange(x.shape[1])
        sees = partial(lambda kinds, b, q, k: (kinds[b, q] == kinds[b, k]) | (k <= q), kinds)
        for dim in ((None, None, 0), (None, 0, None), (0, None, None)):
            sees = torch.vmap(sees, dim)
        with nullcontext() if torch.compiler.is_compiling() else TransformGetItemToIndex():
            mask = sees(torch.arange(len(x)), words, words)
        h = self.enter(x).unsqueeze(1)
        return F.scaled_dot_product_attention(h, h, h, mask.unsqueeze(1)).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "decorrelated": (Decorrelated, (8, 8)),
    "policy": (Policy, (8, 8)),
    "waves": (Waves, (8, 4, 8)),
    "turned": (Turned, (8, 3, 4, 4)),
    "grouped": (lambda: Grouped(4, 2), (4, 5, 8)),
    "functions of parameters": (Functions, (8, 8)),
    "preferences": (Preferences, (4, 5, 8)),
    "heads behind each other": (HeadsBehindEachOther, (4, 5, 8)),
    "filters of rows": (FiltersOfRows, (4, 4, 6, 6)),
    "margins": (Margins, (8, 8)),
    "matrices of rows": (MatricesOfRows, (8, 8)),
    "pictures": (Pictures, (8, 8)),
    "every expert": (EveryExpert, (4, 5, 8)),
    "channels last": (ChannelsLast, (4, 8, 8, 3)),
    "stacked": (Stacked, (4, 5, 8)),
    "blocks": (Blocks, (4, 5, 8)),
    "see each other": (SeeEachOther, (4, 5, 8)),
}


WHOLE = [
    f"ignore:aten.{name}:autoshard.errors.StrategyWarning"
    for name in ("linalg_matrix_exp", "_linalg_det", "_linalg_slogdet", "linalg_lu_solve")
]
"""What is said of decompositions of one matrix, of which there is no part."""


def _example(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    if name in ("turned", "matrices of rows") and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no rule for solutions of matrices, nor for the gradient of grid_sample")
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make().double(), (torch.randn(shape, dtype=torch.float64),)


UNLIKE = {
    *("blocks", "channels last", "every expert", "grouped", "margins", "see each other"),
}
"""Models whose random plans are looked at in `make test`, and not their baselines: others are much like one of them."""


@pytest.mark.filterwarnings(*WHOLE)
@pytest.mark.parametrize("baseline", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", some_thorough(MODELS, UNLIKE))
def test_the_batch_is_cut(name: str, baseline: str) -> None:
    model, args = _example(name)
    check_as_before(model, args, _plan(model, args, "a=2", f"baseline {baseline}"), rtol=1e-7, atol=1e-10)


@pytest.mark.filterwarnings(*WHOLE)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", some_thorough(MODELS, set(MODELS) - UNLIKE))
def test_whatever_is_cut(name: str, seed: int) -> None:
    model, args = _example(name)
    plan = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), seed, model, args, {})
    check_as_before(model, args, plan, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    ("heads", "of_keys", "mesh", "bias"),
    [(4, 2, "a=2", False), (8, 4, "a=2,b=2", False), (6, 3, "a=3", False), (8, 4, "a=4", True)],
)
def test_fewer_heads_of_keys_are_cut_with_those_of_the_queries_that_read_them(
    heads: int, of_keys: int, mesh: str, bias: bool
) -> None:
    torch.manual_seed(0)
    model, args = Grouped(heads, of_keys, bias).double(), (torch.randn(4, 5, 8, dtype=torch.float64),)
    axes = [part.partition("=")[0] for part in mesh.split(",")]
    layout = " ".join(f"{axis}:S(1)" for axis in axes)
    plan = _plan(model, args, mesh, f"/attention={layout}", f"/bwd.attention_backward={layout}")
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


def test_heads_of_keys_that_ranks_cannot_share_are_not_cut() -> None:
    model, args = Grouped(6, 3).double(), (torch.randn(4, 5, 8, dtype=torch.float64),)
    with pytest.raises(autoshard.AutoshardError, match="attention can have"):
        _plan(model, args, "a=2", "/attention=a:S(1)")


SPREADS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((0,), {}),
    ((0, False), {}),
    (([0, -1], True, True), {}),
    ((False,), {}),
    ((), {"dim": 0, "keepdim": True}),
    ((), {"dim": (0, 1), "correction": 0}),
    ((), {"dim": [], "correction": 0}),
    ((0,), {"correction": 2}),
    ((0,), {"unbiased": False}),
    ((1,), {}),
    ((), {"axis": 0, "keepdims": True}),
    ((), {"dim": 0, "correction": 4}),
]
OF_SPREADS = some_thorough(
    [torch.var, torch.std, torch.var_mean, torch.std_mean, Tensor.var, Tensor.std], thorough=[torch.std, Tensor.var]
)


@pytest.mark.parametrize("function", OF_SPREADS)
def test_spreads_are_torchs_with_their_gradients(function: Callable[..., Any]) -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> list[Tensor]:
            h = x * self.weight
            found = [function(h, *args, **options) for args, options in SPREADS[:-1]]
            found += [function(torch.ones_like(h) * h[:1], 0)]  # of equal numbers
            return [part.sum() for each in found for part in (each if isinstance(each, tuple) else (each,))]

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Spread()

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(self.inner(x)).square().sum()

    torch.manual_seed(0)
    model, args = Summed().double(), (torch.randn(4, 6, dtype=torch.float64),)
    check_as_before(model, args, _plan(model, args, "a=2", "x=a:S(0)"), rtol=1e-8, atol=1e-10)


LENGTHS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "all": (torch.norm, True),
    "of rows": (lambda x: x.norm(dim=0), True),
    "of some": (lambda x: torch.linalg.norm(x, 2, 0, True), True),
    "frobenius": (lambda x: torch.norm(x, "fro", dim=(0, 1), keepdim=True), True),
    "of a matrix": (torch.linalg.norm, True),
    "of vectors": (lambda x: torch.linalg.vector_norm(x, dim=(0, -1)), True),
    "of columns": (lambda x: x.norm(2, -1), False),
    "of another order": (lambda x: x.norm(1, 0), False),
    "spectral": (lambda x: torch.linalg.norm(x, 2), False),
    "in another dtype": (lambda x: torch.linalg.vector_norm(x, dim=0, dtype=torch.float64), False),
}
"""Norms, and whether they are taken for lengths over the batch."""


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_over_the_batch_are_torchs_with_their_gradients(name: str) -> None:
    class Length(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            h = x * self.weight
            return LENGTHS[name][0](h).sum() + LENGTHS[name][0](h * 0.0).square().sum()

    torch.manual_seed(0)
    model, args = Length().double(), (torch.randn(4, 6, dtype=torch.float64),)
    made = [str(node.op) for node in capture(model, args).nodes]
    assert ("aten.sqrt.default" in made) == LENGTHS[name][1]
    check_as_before(model, args, _plan(model, args, "a=2", "x=a:S(0)"), rtol=1e-8, atol=1e-10)


def test_lengths_of_weights_are_torchs_with_their_gradients() -> None:
    class OfWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.vector = nn.Parameter(torch.randn(4, 5, 6)), nn.Parameter(torch.randn(6))
            self.lengths = nn.ParameterList(torch.rand(shape) for shape in ((4, 1, 1), (1, 5, 1), (1, 1, 6), ()))
            with torch.no_grad():
                self.vector[:2] = 0

        def forward(self, x: Tensor) -> Tensor:
            dims = (0, 1, 2, -1)
            found = [torch._weight_norm(self.weight, g, dim) for g, dim in zip(self.lengths, dims)]
            found += [F.normalize(self.weight, dim=dim) for dim in (0, 1, -1, (0, 2))]
            found += [F.normalize(self.weight, p=1.0), F.normalize(self.weight * self.vector, eps=2.0)]
            found += [torch._weight_norm(self.vector + 1, self.vector, 0), F.normalize(self.vector * 0, dim=0)]
            return (x * sum(each.square() * each for each in found)).sum()

    torch.manual_seed(0)
    model, args = OfWeights().double(), (torch.randn(4, 5, 6, dtype=torch.float64),)
    made = [str(node.op) for node in capture(model, args).nodes if node.phase == "forward"]
    assert made.count("aten._weight_norm_interface.default") == 1  # of a vector
    assert made.count("aten.sqrt.default") == 10
    check_as_before(model, args, _plan(model, args, "a=2", "x=a:S(0)"), rtol=1e-8, atol=1e-10)


def test_a_length_under_autocast_has_the_dtype_that_it_has_there() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(x).norm()

    model, x = Short(), torch.randn(4, 6)
    graph = capture(model, (x,))
    assert graph.outputs[0] is not None and graph.meta(graph.outputs[0]).dtype == model(x).dtype


@pytest.mark.parametrize("mesh", ["a=2", "a=3"])
def test_of_an_extreme_over_the_batch_numbers_travel_and_ties_of_ranks_share_its_gradient(mesh: str) -> None:
    class Extremes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            beside = h - h.max() + h.amin() - h.amax((0, 1), True).detach()
            return (beside * h.amax(0) * h.amin([-1, 0], keepdim=True)).square().mean() + x.min() - (x * h).min().abs()

    torch.manual_seed(0)
    model, rows = Extremes().double(), torch.randn(2, 4, dtype=torch.float64)
    args = (rows.repeat(4, 1),)
    plan = _plan(model, args, mesh, "baseline ddp")
    assert {c.kind for r in plan.redistributions for c in r.collectives} == {"all_reduce"}
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dims", [None, (0,), (0, 1)])
def test_means_of_a_batch_that_is_cut_unevenly(dims: tuple[int, ...] | None) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().mean(dims).sum() + F.mse_loss(self.linear(x), x)

    torch.manual_seed(0)
    model, args = Mean().double(), (torch.randn(8, 6, dtype=torch.float64),)
    for baseline in ("ddp", "fsdp"):
        check_as_before(model, args, _plan(model, args, "a=3", f"baseline {baseline}"), rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings(*WHOLE)
@pytest.mark.parametrize(
    "function",
    [
        torch.logdet,
        lambda a: torch.slogdet(a)[1],
        lambda a: a.det(),
        *some_thorough([torch.det, torch.linalg.det], [torch.det, torch.linalg.det]),
    ],
)
def test_determinants_of_matrices_that_lie_otherwise_in_memory(function: Callable[[Tensor], Tensor]) -> None:
    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.turn = nn.Linear(8, 9), nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            matrices = (self.enter(x).view(-1, 3, 3) + 9 * torch.eye(3, dtype=x.dtype)).mT
            return function(matrices).mean() + function((self.turn.t() @ self.turn).t() + torch.eye(3, dtype=x.dtype))

    torch.manual_seed(0)
    model, args = Volume().double(), (torch.randn(4, 8, dtype=torch.float64),)
    for plan in islice(random_plans(capture(model, args), Mesh.parse("a=2"), 0, model, args, {}), 4):
        check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


def test_a_mask_that_takes_more_of_one_row_than_of_another_is_said_in_the_step() -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.see = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x.masked_scatter(x > 0, self.see(x)).square().sum()

    model, rows = Filled().double(), torch.tensor([[1.0, 1, -1, -1]] * 4, dtype=torch.float64)
    plan = _plan(model, (rows,), "a=2", "baseline ddp")
    check_as_before(model, (rows,), plan, rtol=1e-8, atol=1e-10)
    for other in (rows * torch.tensor([[1.0], [-1], [1], [-1]]), rows.flip(1)):  # as many for each rank
        check_as_before(model, (other,), plan, rtol=1e-8, atol=1e-10)
    rows[0], rows[2] = -1.0, 1.0
    with pytest.raises(RuntimeError, match="forbid OPERATOR"):
        check_as_before(model, (rows,), plan, rtol=1e-8, atol=1e-10)
    whole = _plan(model, (rows,), "a=2", "x=a:S(0)", "forbid /masked_scatter a:S(0)")
    check_as_before(model, (rows,), whole, rtol=1e-8, atol=1e-10)


class OverChannels(nn.Module):
    """Two convolutions, and in between every pixel divided by its length, as in the U-Nets of diffusion."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.how(self.first(x))).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "how",
    [
        lambda x: F.normalize(x, dim=1),
        lambda x: x / (1 + x.norm(dim=1, keepdim=True)),
        lambda x: x / (1 + x.std(1, keepdim=True)),
        lambda x: x * torch.sub(*torch.var_mean(x, (1, 2), correction=0))[:, None, None],
    ],
    ids=["divided", "norm", "deviation", "variance and mean"],
)
def test_channels_are_cut_where_lengths_and_deviations_are_taken_over_them(how: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, args = OverChannels(how).double(), (torch.randn(2, 3, 8, 8, dtype=torch.float64),)
    asked = ["family tp=tp", "first.weight=tp:S(0)"]
    plan = autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", constraints=asked)
    cuts = {entry.name: entry.layout.placements[0] for entry in plan.parameters}
    assert (cuts["first.weight"], cuts["second.weight"]) == (S(0), S(1))
    assert {c.kind for r in plan.redistributions for c in r.collectives} == {"all_reduce"}
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-9)
