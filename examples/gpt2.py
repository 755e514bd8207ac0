"""A GPT-2-like decoder in plain torch: layer norms, learned positions, one fused qkv with bias, tied embeddings.

    autoshard plan examples/gpt2.py:gpt2 --mesh dp=4,tp=2 --hardware dgx-a100 -o plan.yaml

Shapes: B batch, T sequence, V vocabulary, C ``d_model``, H heads, D = C / H. Without a ``dropout`` there is none.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a model, and the rate at which it drops embeddings, attention weights and what a layer adds: GPT-2
    was trained with a ``dropout`` of 0.1.

    Raises:
        ValueError: the heads do not divide ``d_model``.
    """

    vocab_size: int = 256
    n_layers: int = 2
    d_model: int = 64
    n_heads: int = 4
    max_sequence: int = 32
    norm_eps: float = 1e-5
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide d_model={self.d_model}")


class Attention(nn.Module):
    """Causal attention; queries, keys and values come from one matrix, in this order."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.n_heads, self.dropout = config.n_heads, config.dropout
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model, dtype=config.dtype)
        self.c_proj = nn.Linear(config.d_model, config.d_model, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        batch, sequence, width = x.shape
        heads = (batch, sequence, self.n_heads, width // self.n_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(width, dim=-1))
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, sequence, width))


class MLP(nn.Module):
    """Two linear layers with GELU (the tanh form) between."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.d_model, 4 * config.d_model, dtype=config.dtype)
        self.c_proj = nn.Linear(4 * config.d_model, config.d_model, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


def _dropout(config: GPT2Config) -> nn.Module:
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


class Block(nn.Module):
    """Attention and MLP, each after a layer norm, and added to what came in, less what is dropped."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model, eps=config.norm_eps, dtype=config.dtype)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.d_model, eps=config.norm_eps, dtype=config.dtype)
        self.mlp = MLP(config)
        self.drop = _dropout(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT2(nn.Module):
    """The decoder with its loss; ``lm_head`` and ``wte`` are one parameter.

    :meth:`init_weights` makes the weights reproducible, and is what fills a model that was built on the meta device and
    moved with ``to_empty``.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.d_model, dtype=config.dtype)
        self.wpe = nn.Embedding(config.max_sequence, config.d_model, dtype=config.dtype)
        self.drop = _dropout(config)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.d_model, eps=config.norm_eps, dtype=config.dtype)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False, dtype=config.dtype)
        self.lm_head.weight = self.wte.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills every parameter; equal seeds give equal weights, whatever ran before.

        Weights are normal with deviation 0.02, those that write to the residual stream smaller by
        ``sqrt(2 n_layers)``; norms start at one, biases at zero.

        Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.3.
        """
        generator = torch.Generator(self.wte.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                std = 0.02 / math.sqrt(2 * self.config.n_layers) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy (scalar, float32) of ``targets`` (B, T) after ``tokens`` (B, T)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


TINY = GPT2Config()

GPT2_SMALL = GPT2Config(vocab_size=50_257, n_layers=12, d_model=768, n_heads=12, max_sequence=1024)
"""GPT-2, 124 million parameters. Source: Radford et al. (2019), table 2."""

GPT2_XL = GPT2Config(vocab_size=50_257, n_layers=48, d_model=1600, n_heads=25, max_sequence=1024, dtype=torch.bfloat16)
"""GPT-2 XL, 1.5 billion parameters. Source: Radford et al. (2019), table 2."""


def tiny() -> tuple[GPT2, tuple[Tensor, Tensor]]:
    """Two layers over bytes, for tests: 4 sequences of 32 tokens."""
    model = GPT2(TINY)
    model.init_weights(seed=0)
    shape = (4, TINY.max_sequence)
    return model, (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))


def gpt2() -> tuple[GPT2, tuple[Tensor, Tensor]]:
    """GPT-2 (124 million parameters) with 8 sequences of 1,024 tokens, all of it on the meta device."""
    with torch.device("meta"):
        shape = (8, GPT2_SMALL.max_sequence)
        return GPT2(GPT2_SMALL), (torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64))


def gpt2_xl(batch: int = 64) -> tuple[GPT2, tuple[Tensor, Tensor]]:
    """GPT-2 XL in bfloat16 with 64 sequences of 1,024 tokens, all of it on the meta device."""
    with torch.device("meta"):
        shape = (batch, GPT2_XL.max_sequence)
        return GPT2(GPT2_XL), (torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64))
