"""A Llama-style decoder in plain torch: nothing in it knows that it will be sharded.

    autoshard plan examples/llama.py:demo --mesh dp=2,tp=2 --hardware cpu-gloo -o plan.yaml
    autoshard plan examples/llama.py:llama3_8b --mesh dp=8,tp=8 --hardware dgx-h100 -o plan.yaml

Shapes: B batch, T sequence, V vocabulary, C ``d_model``, H heads, K key-value heads, D ``head_dim``, F ``d_ffn``.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model.

    Raises:
        ValueError: the heads do not divide ``d_model``, or the key-value heads do not divide the heads.
    """

    vocab_size: int = 256
    n_layers: int = 4
    d_model: int = 256
    n_heads: int = 8
    n_kv_heads: int = 4
    d_ffn: int = 768
    max_sequence: int = 128
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide d_model={self.d_model}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}")

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.d_model // self.n_heads


def rope_tables(config: LlamaConfig, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each (``max_sequence``, ``head_dim // 2``), in the model's dtype.

    Channel pair i of position t turns by ``t * theta ** (-2 i / D)``.

    Source: RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2.
    """
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float32, device=device)
    frequencies = config.rope_theta ** (-2.0 * pairs / config.head_dim)
    angles = torch.outer(torch.arange(config.max_sequence, dtype=torch.float32, device=device), frequencies)
    return angles.cos().to(config.dtype), angles.sin().to(config.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns channel pairs (i, i + D // 2) of ``x`` (B, T, heads, D) by the angles in ``cos``, ``sin`` (T, 1, D // 2),
    in the wider dtype of both.

    With odd D the last channel stays as it is.
    """
    a, b, *odd = x.split(x.shape[-1] // 2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, *odd), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """Scales to a root mean square of one, in float32, then by a learned weight (C,)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model, dtype=config.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal attention in which H / K heads share one key-value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        kv_width = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.d_model, config.d_model, bias=False, dtype=config.dtype)
        self.wk = nn.Linear(config.d_model, kv_width, bias=False, dtype=config.dtype)
        self.wv = nn.Linear(config.d_model, kv_width, bias=False, dtype=config.dtype)
        self.wo = nn.Linear(config.d_model, config.d_model, bias=False, dtype=config.dtype)

    def _repeat(self, x: Tensor) -> Tensor:
        """(B, T, K, D) to (B, T, H, D): each key-value head stands beside its copies."""
        batch, sequence, kv_heads, head_dim = x.shape
        copies = self.n_heads // kv_heads
        if copies == 1:
            return x
        x = x[:, :, :, None, :].expand(batch, sequence, kv_heads, copies, head_dim)
        return x.reshape(batch, sequence, self.n_heads, head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        batch, sequence, width = x.shape
        q = self.wq(x).view(batch, sequence, self.n_heads, self.head_dim)
        k = self.wk(x).view(batch, sequence, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(batch, sequence, self.n_kv_heads, self.head_dim)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        q, k, v = q.transpose(1, 2), self._repeat(k).transpose(1, 2), self._repeat(v).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, sequence, width))


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``. Source: https://arxiv.org/abs/2002.05202, equation 6."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.d_model, config.d_ffn, bias=False, dtype=config.dtype)
        self.w2 = nn.Linear(config.d_ffn, config.d_model, bias=False, dtype=config.dtype)
        self.w3 = nn.Linear(config.d_model, config.d_ffn, bias=False, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to what came in."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The decoder with its loss.

    Weights are random from the start (torch's own defaults); :meth:`init_weights` makes them reproducible, and is what
    fills a model that was built on the meta device and moved with ``to_empty``.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.d_model, dtype=config.dtype)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False, dtype=config.dtype)
        cos, sin = rope_tables(config, self.norm.weight.device)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills every parameter and buffer; equal seeds give equal weights, whatever ran before.

        Weights are normal with deviation 0.02, those that write to the residual stream smaller by
        ``sqrt(2 n_layers)`` (GPT-2's scheme); norms start at one.
        """
        cos, sin = rope_tables(self.config, self.rope_cos.device)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)
        generator = torch.Generator(self.norm.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                writes_residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
                std = 0.02 / math.sqrt(2 * self.config.n_layers) if writes_residual else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy (scalar, float32) of ``targets`` (B, T) after ``tokens`` (B, T)."""
        sequence = tokens.shape[1]
        cos, sin = self.rope_cos[:sequence, None], self.rope_sin[:sequence, None]  # the same for every head
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


DEMO = LlamaConfig()
DEMO_BATCH = 8

LLAMA3_8B = LlamaConfig(
    vocab_size=128_256,
    n_layers=32,
    d_model=4096,
    n_heads=32,
    n_kv_heads=8,
    d_ffn=14_336,
    max_sequence=8192,
    rope_theta=500_000.0,
    dtype=torch.bfloat16,
)
"""Llama 3 8B. Source: https://arxiv.org/abs/2407.21783, table 3."""

LLAMA3_70B = LlamaConfig(
    vocab_size=128_256,
    n_layers=80,
    d_model=8192,
    n_heads=64,
    n_kv_heads=8,
    d_ffn=28_672,
    max_sequence=8192,
    rope_theta=500_000.0,
    dtype=torch.bfloat16,
)
"""Llama 3 70B. Source: https://arxiv.org/abs/2407.21783, table 3."""


def demo() -> tuple[Llama, tuple[Tensor, Tensor]]:
    """The model of ``make demo``: four layers over bytes, small enough to train on two cores in seconds."""
    model = Llama(DEMO)
    model.init_weights(seed=0)
    shape = (DEMO_BATCH, DEMO.max_sequence)
    return model, (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))


def llama3_8b(batch: int = 16, sequence: int = 8192) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Llama 3 8B with 16 sequences of 8,192 tokens, in bfloat16, all of it on the meta device: it takes no memory."""
    return _on_meta(LLAMA3_8B, batch, sequence)


def llama3_70b(batch: int = 16, sequence: int = 8192) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Llama 3 70B with 16 sequences of 8,192 tokens, in bfloat16, all of it on the meta device: it takes no memory."""
    return _on_meta(LLAMA3_70B, batch, sequence)


def _on_meta(config: LlamaConfig, batch: int, sequence: int) -> tuple[Llama, tuple[Tensor, Tensor]]:
    config = replace(config, max_sequence=max(sequence, config.max_sequence))
    with torch.device("meta"):
        shape = (batch, sequence)
        return Llama(config), (torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64))
