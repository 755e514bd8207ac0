"""Models of many layers, some of which are the same again and again; their graphs, and programs with drawn prices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.capture import CapturedGraph, capture
from solver import Problem

from .. import models
from ..models import Example

DEEP = 13


class Wide(nn.Module):
    """A layer that is normed, and adds to what it reads; as wide as it is told, with what it drops."""

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(self.norm(x)))
        return x + F.dropout(self.down(inner), self.dropout)


class Chain(nn.Module):
    """Layers one after the other, and a loss; ``shows`` says that the result has what each of them gives, too."""

    def __init__(self, layers: Sequence[nn.Module], shows: bool = False) -> None:
        super().__init__()
        self.layers, self.shows = nn.ModuleList(layers), shows

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        every = [x := layer(x) for layer in self.layers]
        return x.square().mean(), *(every if self.shows else ())


class TwoStacks(nn.Module):
    """Layers of one kind, and behind them layers of another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Wide(16) for _ in range(DEEP))
        self.decoder = nn.ModuleList(Wide(12) for _ in range(DEEP + 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.encoder, *self.decoder):
            x = layer(x)
        return x.square().mean()


class Reading(Wide):
    """A layer that reads what an encoder gives."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.key = nn.Linear(8, 8)

    def forward(self, x: Tensor, read: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + self.key(read))


class Translator(nn.Module):
    """An encoder, and a decoder each layer of which reads what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Wide(16) for _ in range(DEEP))
        self.decoder = nn.ModuleList(Reading(12) for _ in range(DEEP + 1))

    def forward(self, x: Tensor) -> Tensor:
        read = x
        for layer in self.encoder:
            read = layer(read)
        for layer in self.decoder:
            x = layer(x, read)
        return x.square().mean()


class Normed(nn.Module):
    """A layer whose statistics it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.up(self.norm(x)))


class Tied(nn.Module):
    """One layer, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Wide(16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(DEEP):
            x = self.layer(x)
        return x.square().mean()


class Far(Wide):
    """A layer that reads what the two before it give, and what all others read."""

    def forward(self, x: Tensor, before: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + table) + before


class Dense(nn.Module):
    """Such layers, and a buffer for all of them."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Far(16) for _ in range(DEEP + 4))
        self.register_buffer("table", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for layer in self.layers:
            before, x = x, layer(x, before, self.table)
        return x.square().mean()


class Bridged(nn.Module):
    """Layers of which the last reads what the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide(16) for _ in range(DEEP + 3))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:-1]:
            x = layer(x)
        return self.layers[-1](x + first).square().mean()


class Mixed(nn.Module):
    """A layer that adds what some experts give, one after the other."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(8), nn.ModuleList(Wide(4) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        for expert in self.experts:
            x = x + expert(normed)
        return x


class Inside(nn.Module):
    """Layers of one list inside a layer of another."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Chain([Wide(16) for _ in range(DEEP)]) for _ in range(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages[0](x)[0]


class OddlyNamed(nn.Module):
    """Layers, and a module among them whose name begins with a number, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({**{str(k): Wide(16) for k in range(DEEP)}, "3x": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()


def _rooted() -> Example:
    torch.manual_seed(0)
    return nn.Sequential(*(Wide(16) for _ in range(DEEP)), nn.Flatten(0), nn.Linear(64, 1)), (torch.randn(8, 8),)


def _chain(*hidden: int, times: int = DEEP, shows: bool = False, dropout: float = 0.0) -> Callable[[], Example]:
    def make() -> Example:
        torch.manual_seed(0)
        layers = [Wide(width, dropout) for _ in range(times) for width in hidden]
        return Chain(layers, shows), (torch.randn(8, 8),)

    return make


def _of(model: Callable[[], nn.Module]) -> Callable[[], Example]:
    def make() -> Example:
        torch.manual_seed(0)
        return model(), (torch.randn(8, 8),)

    return make


DEEP_MODELS: dict[str, Callable[[], Example]] = {
    "llama": lambda: models.llama(n_layers=DEEP),
    "llama bf16": lambda: models.llama(n_layers=DEEP, dtype=torch.bfloat16),
    "llama odd": lambda: models.llama(
        batch=5, n_layers=DEEP, vocab_size=13, d_model=15, n_heads=3, n_kv_heads=3, d_ffn=7, max_sequence=7
    ),
    "gpt2": lambda: models.gpt2(n_layers=DEEP),
    "chain": _chain(16),
    "every second": _chain(16, 12, times=9),
    "one in three": _chain(16, 12, 12, times=7),
    "drops": _chain(16, dropout=0.5),
    "dense": _of(Dense),
    "two stacks": _of(TwoStacks),
    "translator": _of(Translator),
    "bridged": _of(Bridged),
    "experts": _of(lambda: Chain([Mixed(3) for _ in range(DEEP)])),
    "many experts": _of(lambda: Chain([Mixed(DEEP) for _ in range(2)])),
    "inside": _of(Inside),
    "root": _rooted,
    "oddly named": _of(OddlyNamed),
    "shown": _chain(16, shows=True),
    "statistics": _of(lambda: Chain([Normed() for _ in range(DEEP)])),
    "tied": _of(Tied),
    "unlike": _of(lambda: Chain([Wide(8 + k) for k in range(DEEP)])),
}
WHOLE = {"experts", "many experts", "oddly named", "shown", "statistics", "tied", "unlike"}
"""Whose layers are not the same, do not run one behind the other, or are not told by their names."""


@cache
def graph_of(name: str) -> CapturedGraph:
    return capture(*DEEP_MODELS[name]())


def drawn(problem: Problem, seed: int) -> Problem:
    """The problem with the prices of strategies drawn."""
    draw = np.random.default_rng(seed)
    nodes = [
        replace(node, costs=np.where(node.costs < 1 << 50, draw.integers(0, 10**9, len(node.costs)), node.costs))
        for node in problem.nodes
    ]
    return replace(problem, nodes=tuple(nodes))
