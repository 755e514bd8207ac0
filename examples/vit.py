"""A vision transformer in plain torch: patches, pre-norm blocks, mean of the tokens, one linear head.

    autoshard plan examples/vit.py:vit_l --mesh dp=8 --hardware dgx-h100 -o plan.yaml

Shapes: B images, N tokens (patches), C ``d_model``, H heads, D = C / H, K classes. There is no dropout and no class
token: the head reads the mean of the tokens (A. Dosovitskiy et al., arXiv:2010.11929, appendix D.3, finds both equal).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ViTConfig:
    """The sizes of a model.

    Raises:
        ValueError: the heads do not divide ``d_model``, or the patches do not fill the image.
    """

    image: int = 32
    patch: int = 8
    n_layers: int = 2
    d_model: int = 64
    n_heads: int = 4
    d_mlp: int = 128
    classes: int = 10
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide d_model={self.d_model}")
        if self.image % self.patch:
            raise ValueError(f"patch={self.patch} does not divide image={self.image}")

    @property
    def tokens(self) -> int:
        """The number of patches of an image."""
        return (self.image // self.patch) ** 2


class Attention(nn.Module):
    """Every token attends to every token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.n_heads, self.head_dim = config.n_heads, config.d_model // config.n_heads
        self.query, self.key, self.value, self.project = (
            nn.Linear(config.d_model, config.d_model, bias=bias, dtype=config.dtype)
            for bias in (True, False, True, True)  # a bias of the keys adds the same to all scores of a query
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        heads = (*x.shape[:2], self.n_heads, self.head_dim)
        q, k, v = (part(x).view(heads).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.project(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_mlp, dtype=config.dtype)
        self.down = nn.Linear(config.d_mlp, config.d_model, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and added to what came in."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model, dtype=config.dtype)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.d_model, dtype=config.dtype)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nn.Module):
    """The classifier with its loss."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(3, config.d_model, config.patch, stride=config.patch, dtype=config.dtype)
        self.positions = nn.Parameter(torch.zeros(config.tokens, config.d_model, dtype=config.dtype))
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model, dtype=config.dtype)
        self.head = nn.Linear(config.d_model, config.classes, dtype=config.dtype)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills every parameter; equal seeds give equal weights, whatever ran before.

        Weights and positions are normal with deviation 0.02; norms start at one, biases at zero.
        """
        generator = torch.Generator(self.head.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02, generator=generator)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy (scalar, float32) of ``labels`` (B,) for ``images`` (B, 3, image, image)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x).mean(dim=1)).float(), labels)


TINY = ViTConfig()

VIT_L = ViTConfig(
    image=224,
    patch=16,
    n_layers=24,
    d_model=1024,
    n_heads=16,
    d_mlp=4096,
    classes=1000,
    dtype=torch.bfloat16,
)
"""ViT-L/16, 303 million parameters. Source: https://arxiv.org/abs/2010.11929, table 1."""


def tiny() -> tuple[ViT, tuple[Tensor, Tensor]]:
    """Two layers on images of 32 x 32, for tests: 8 images."""
    model = ViT(TINY)
    model.init_weights(seed=0)
    return model, (torch.zeros(8, 3, TINY.image, TINY.image), torch.zeros(8, dtype=torch.int64))


def vit_l(batch: int = 1024) -> tuple[ViT, tuple[Tensor, Tensor]]:
    """ViT-L/16 in bfloat16 with a batch of 1,024 images of 224 x 224, all of it on the meta device."""
    with torch.device("meta"):
        images = torch.empty(batch, 3, VIT_L.image, VIT_L.image, dtype=VIT_L.dtype)
        return ViT(VIT_L), (images, torch.empty(batch, dtype=torch.int64))
