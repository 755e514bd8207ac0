"""Blocks of image generators in plain torch: the UNet of Stable Diffusion, and the diffusion transformer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .member import Example, Member

BATCH = 8


def embedded(time: Tensor, width: int) -> Tensor:
    """Sines and cosines of times (N,), shape (N, width)."""
    rates = torch.exp(torch.arange(width // 2, dtype=time.dtype) * (-math.log(10000.0) / (width // 2)))
    angles = time[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Residual(nn.Module):
    """Two convolutions, the time added between them."""

    def __init__(self, given: int, width: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, given), nn.Conv2d(given, width, 3, padding=1)
        self.time = nn.Linear(time, width)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Conv2d(given, width, 1) if given != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x is (N, C, H, W), time (N, T)."""
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Heads over what is asked and what is looked at, which is the same by default."""

    def __init__(self, width: int, context: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(context, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """(N, T, C)."""
        looked_at = x if context is None else context
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, t in ((self.q, x), (self.k, looked_at), (self.v, looked_at))
        )
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class Spatial(nn.Module):
    """A transformer block over the pixels, with attention to the text, and a gated GELU."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm, self.into = nn.GroupNorm(4, width), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, width), Attention(width, context)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x is (N, C, H, W), context (N, T, C')."""
        h = self.into(self.norm(x)).flatten(2).transpose(1, 2)
        h = h + self.own(self.norms[0](h))
        h = h + self.cross(self.norms[1](h), context)
        value, gate = self.up(self.norms[2](h)).chunk(2, dim=-1)
        h = h + self.down(value * F.gelu(gate))
        return x + self.out(h.transpose(1, 2).unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    """Down once, up once, with attention at both sizes."""

    def __init__(self, width: int = 16, context: int = 12, time: int = 32) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down, self.down_seen = Residual(width, width, time), Spatial(width, context)
        self.smaller = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle, self.middle_seen = Residual(width, 2 * width, time), Spatial(2 * width, context)
        self.larger = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up, self.up_seen = Residual(2 * width, width, time), Spatial(width, context)
        self.norm, self.last = nn.GroupNorm(4, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        """The loss; pictures are (N, 4, H, W)."""
        t = self.time(embedded(time, self.width))
        kept = self.down_seen(self.down(self.first(noisy), t), text)
        x = self.middle_seen(self.middle(self.smaller(kept), t), text)
        x = self.larger(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.up_seen(self.up(torch.cat([x, kept], dim=1), t), text)
        return F.mse_loss(self.last(F.silu(self.norm(x))), noise)


def unet() -> Example:
    """Pictures of 8 by 8."""
    pictures = {name: torch.randn(BATCH, 4, 8, 8) for name in ("noisy", "noise")}
    return UNet(), pictures | {"time": torch.rand(BATCH), "text": torch.randn(BATCH, 6, 12)}


class DiTBlock(nn.Module):
    """Attention and feed-forward, whose norms are shifted and scaled by time and class.

    https://arxiv.org/abs/2212.09748
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        """x is (N, T, C), given (N, C)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(given).unsqueeze(1).chunk(6, dim=-1)
        h = self.norms[0](x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(h, h, h, need_weights=False)[0]
        h = self.norms[1](x) * (1 + scale2) + shift2
        return x + gate2 * self.mlp(h)


class DiT(nn.Module):
    """Two blocks over patches of 2 by 2."""

    def __init__(self, width: int = 32, patches: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches, width))
        self.classes = nn.Embedding(classes, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiTBlock(width) for _ in range(2))
        self.last = nn.Linear(width, 16)

    def forward(self, noisy: Tensor, time: Tensor, label: Tensor, noise: Tensor) -> Tensor:
        """The loss; pictures are (N, 4, H, W)."""
        given = self.time(embedded(time, self.width)) + self.classes(label)
        x = self.patches(noisy).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, given)
        n, rows = len(noisy), noisy.shape[2] // 2
        x = self.last(x).reshape(n, rows, rows, 2, 2, 4)
        return F.mse_loss(torch.einsum("nhwpqc->nchpwq", x).reshape(noisy.shape), noise)


def dit() -> Example:
    """Pictures of 8 by 8."""
    pictures = {name: torch.randn(BATCH, 4, 8, 8) for name in ("noisy", "noise")}
    return DiT(), pictures | {"time": torch.rand(BATCH), "label": torch.randint(0, 10, (BATCH,))}


DIFFUSION = (Member("unet", unet), Member("dit", dit))
