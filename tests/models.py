"""The models of the tests: small, and together with every kind of operator that autoshard promises to shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.capture import CapturedGraph, capture
from examples import moe as routed_experts
from examples import vit
from examples.gpt2 import GPT2, GPT2Config
from examples.llama import Llama, LlamaConfig

from .fused_models import fused

Example = tuple[nn.Module, tuple[Any, ...]]

LLAMA = LlamaConfig(vocab_size=12, n_layers=1, d_model=24, n_heads=4, n_kv_heads=2, d_ffn=20, max_sequence=6)
GPT = GPT2Config(vocab_size=11, n_layers=1, d_model=12, n_heads=3, max_sequence=5)


class MLP(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), target)


class Block(nn.Module):
    """A layer that makes much of little."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(x))
        return x + self.down(inner * torch.tanh(inner))


class Blocks(nn.Module):
    """Layers that are not alike, with a loss."""

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Block, hidden))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def blocks(batch: int = 64) -> Example:
    torch.manual_seed(0)
    return Blocks((32, 48)), (torch.randn(batch, 8),)


class AlikeLayers(nn.Module):
    """Two layers of one kind, what they make added to what they read, and a loss."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(image))), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


class MoE(nn.Module):
    """Every token goes through every expert, weighted by a softmax: static shapes, batched products."""

    def __init__(self, experts: int = 4, width: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen, index = weights.topk(2, dim=-1)
        kept = torch.zeros_like(weights).scatter(-1, index, chosen)
        wide = F.gelu(torch.einsum("td,edh->eth", x, self.up))
        return (torch.einsum("eth,ehd->etd", wide, self.down) * kept.t().unsqueeze(-1)).sum(0).square().mean()


class Assorted(nn.Module):
    """Operators with arguments that bear on lengths, masks, truths, complex numbers, kernels without a rule.

    Windowed attention written out, with a rotary embedding in complex numbers, on rows that weight norm and group norm
    made.
    """

    def __init__(self, width: int = 8, window: int = 3) -> None:
        super().__init__()
        self.rows = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.norm = nn.GroupNorm(2, width)
        self.window = window

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        length = x.shape[1]
        rows = self.norm(self.rows(x).transpose(1, 2)).transpose(1, 2).contiguous()
        turns = torch.polar(x.new_ones(length, 1), 0.3 * torch.arange(length, dtype=x.dtype).unsqueeze(-1))
        turned = torch.view_as_real(torch.view_as_complex(rows.unflatten(-1, (-1, 2))) * turns).flatten(-2)
        near = torch.ones(length, length, dtype=torch.bool).tril(0).triu(1 - self.window)
        scores = (turned @ turned.transpose(-1, -2)).masked_fill(~near, float("-inf"))
        mixed = scores.softmax(-1) @ rows.roll(1, 1)
        kept = (mixed > 0.5).any(-1, keepdim=True) & ~(tokens > 9).all(0).unsqueeze(-1)
        largest = tokens.amax(1).unsqueeze(-1).unsqueeze(-1)
        return (mixed * kept).triu(-1).square().mean() + (mixed.var(1) * largest.squeeze(1)).mean()


def assorted(batch: int = 4, length: int = 6) -> Example:
    torch.manual_seed(0)
    return Assorted(), (torch.randn(batch, length, 8), torch.randint(0, 12, (batch, length)))


def llama(batch: int = 4, **sizes: Any) -> Example:
    config = dataclasses.replace(LLAMA, **sizes)
    model = Llama(config)
    model.init_weights(0)
    return model, _tokens(batch, config.max_sequence, config.vocab_size)


def gpt2(batch: int = 4, **sizes: Any) -> Example:
    config = dataclasses.replace(GPT, **sizes)
    model = GPT2(config)
    model.init_weights(0)
    return model, _tokens(batch, config.max_sequence, config.vocab_size)


def mlp(batch: int = 6, **sizes: Any) -> Example:
    torch.manual_seed(0)
    model = MLP(**sizes)
    return model, (torch.randn(batch, model.up.in_features),)


def mlp_loss(batch: int = 6, **sizes: Any) -> Example:
    model, (x,) = mlp(batch, **sizes)
    return WithLoss(model), (x, torch.randn(x.shape))


def conv() -> Example:
    torch.manual_seed(0)
    return ConvNet(), (torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,)))


def moe() -> Example:
    torch.manual_seed(0)
    return MoE(), (torch.randn(10, 6),)


def _tokens(batch: int, sequence: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (batch, sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


EXAMPLES: dict[str, Callable[[], Example]] = {
    "mlp": mlp,
    "mlp with loss": mlp_loss,
    "llama": llama,
    "llama bf16": lambda: llama(dtype=torch.bfloat16),
    "llama odd": lambda: llama(batch=5, vocab_size=13, d_model=15, n_heads=3, n_kv_heads=3, d_ffn=7, max_sequence=7),
    "gpt2": gpt2,
    "conv": conv,
    "moe": moe,
    "assorted": assorted,
    "vit": vit.tiny,
    "routed": routed_experts.tiny,
    "fused": fused,
    "fused 2:1:1": lambda: fused("split", groups=4),
    "fused 4:1:1": lambda: fused("ranges", groups=2),
}


@cache
def graph_of(name: str) -> CapturedGraph:
    """The captured graph of an example, captured once per test run."""
    return capture(*EXAMPLES[name]())
