"""Transformers whose projections are fused: queries, keys and values of one product, taken apart in three ways, and a
gate beside what it gates. Keys and values may have fewer heads than queries.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Apart = Literal["split", "view", "ranges"]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, apart: Apart) -> None:
        super().__init__()
        self.size, self.heads, self.groups, self.apart = width // heads, heads, groups, apart
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        made = self.qkv(x)
        if self.apart == "view":
            q, k, v = made.view(batch, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            ends = (width, width + self.groups * self.size)
            columns = (
                (made[..., : ends[0]], made[..., ends[0] : ends[1]], made[..., ends[1] :])
                if self.apart == "ranges"
                else made.split((ends[0], ends[1] - ends[0], ends[1] - ends[0]), dim=2)
            )
            q, k, v = (each.view(batch, length, -1, self.size).transpose(1, 2) for each in columns)
            k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, apart: Apart) -> None:
        super().__init__()
        self.attention = Attention(width, heads, groups, apart)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Fused(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, groups: int, layers: int, apart: Apart) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, groups, apart) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def fused(
    apart: Apart = "view", groups: int = 8, batch: int = 8, length: int = 8, layers: int = 2
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of layers of 8 heads, and the batch of a step."""
    torch.manual_seed(0)
    model = Fused(64, 32, 8, groups, layers, apart)
    tokens = torch.randint(0, 64, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class Crossing(nn.Module):
    """Attention to another text: ``nn.MultiheadAttention`` takes its weight and its bias apart before the products."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), other, other, need_weights=False)[0]
        return x + self.down(F.relu(self.up(self.between(x))))


class Crossed(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Crossing(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, others: Tensor, targets: Tensor) -> Tensor:
        x, other = self.embedding(tokens), self.embedding(others)
        for layer in self.layers:
            x = layer(x, other)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def crossed(batch: int = 8, length: int = 8, layers: int = 2) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of layers of 4 heads that attend to another text, and the batch of a step."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (3, batch, length), generator=torch.Generator().manual_seed(1))
    return Crossed(64, 32, 4, layers), tuple(tokens)
