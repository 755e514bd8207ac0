"""A decoder with a mixture of experts of static capacity in plain torch: every shape is known before it runs.

    autoshard plan examples/moe.py:moe_8x7b --mesh dp=8,ep=8 --hardware dgx-h100 -o plan.yaml

A token goes to the two experts that its router likes best. An expert takes so many tokens of each sequence and no more
(its capacity); tokens beyond it skip the layer. Who goes where is written as one-hot tensors, so that tokens are sent
and fetched by matrix products. Source: D. Lepikhin et al., GShard, https://arxiv.org/abs/2006.16668, section 2.2; the
groups of its algorithm 1 are the sequences.

Shapes: B batch, T sequence, V vocabulary, C ``d_model``, H heads, E experts, F ``d_ffn``, K experts of a token,
S slots of an expert for a sequence (its capacity).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class MoEConfig:
    """The sizes of a model.

    Raises:
        ValueError: the heads do not divide ``d_model``, or a token is to go to more experts than there are.
    """

    vocab_size: int = 256
    n_layers: int = 2
    d_model: int = 64
    n_heads: int = 4
    d_ffn: int = 96
    experts: int = 4
    experts_per_token: int = 2
    capacity_factor: float = 1.25
    max_sequence: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide d_model={self.d_model}")
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"a token goes to {self.experts_per_token} of {self.experts} experts")

    @property
    def capacity(self) -> int:
        """Slots of an expert for one sequence: its even share of the tokens, times the capacity factor."""
        share = self.max_sequence * self.experts_per_token / self.experts
        return math.ceil(share * self.capacity_factor)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.n_heads, self.head_dim = config.n_heads, config.d_model // config.n_heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(config.d_model, config.d_model, bias=False, dtype=config.dtype) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        heads = (*x.shape[:2], self.n_heads, self.head_dim)
        q, k, v = (part(x).view(heads).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Router(nn.Module):
    """Which slot of which expert each token gets, and how much the token counts on it."""

    numbers: Tensor
    slots: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.choices = config.experts_per_token
        self.gate = nn.Linear(config.d_model, config.experts, bias=False, dtype=config.dtype)
        self.register_buffer("numbers", torch.arange(config.experts), persistent=False)
        self.register_buffer("slots", torch.arange(config.capacity), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to weights (B, T, E, S): zero but for the slots that a token has."""
        likes, choice = self.gate(x).float().softmax(dim=-1).topk(self.choices, dim=-1)
        likes = likes / likes.sum(dim=-1, keepdim=True)
        weights = x.new_zeros((*x.shape[:2], len(self.numbers), len(self.slots)))
        taken = torch.zeros_like(self.numbers)
        for k in range(self.choices):  # first choices first
            chosen = (choice[:, :, k, None] == self.numbers).to(torch.int64)
            place = chosen.cumsum(dim=1) - 1 + taken
            taken = taken + chosen.sum(dim=1, keepdim=True)
            has_slot = (place[..., None] == self.slots) & (chosen[..., None] == 1)
            weights = weights + (likes[:, :, k, None, None] * has_slot).to(x.dtype)
        return weights


class Experts(nn.Module):
    """E feed-forward layers, each on the tokens in its slots, one batched product for all."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        wide, narrow = (config.experts, config.d_model, config.d_ffn), (config.experts, config.d_ffn, config.d_model)
        self.w1 = nn.Parameter(torch.empty(wide, dtype=config.dtype))
        self.w2 = nn.Parameter(torch.empty(narrow, dtype=config.dtype))
        self.w3 = nn.Parameter(torch.empty(wide, dtype=config.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(E, B * S, C) to (E, B * S, C)."""
        return torch.bmm(F.silu(torch.bmm(x, self.w1)) * torch.bmm(x, self.w3), self.w2)


class MoE(nn.Module):
    """Router and experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        batch, _, width = x.shape
        weights = self.router(x)
        experts, slots = weights.shape[2:]
        weights = weights.flatten(2)  # (B, T, E * S)
        sent = torch.bmm((weights > 0).to(x.dtype).transpose(1, 2), x)
        sent = sent.view(batch, experts, slots, width).transpose(0, 1).reshape(experts, batch * slots, width)
        done = self.experts(sent).view(experts, batch, slots, width).transpose(0, 1)
        return torch.bmm(weights, done.reshape(batch, experts * slots, width))


class Block(nn.Module):
    """Attention and experts, each after a layer norm and added to what came in."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model, dtype=config.dtype)
        self.attention = Attention(config)
        self.moe_norm = nn.LayerNorm(config.d_model, dtype=config.dtype)
        self.moe = MoE(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class MoEDecoder(nn.Module):
    """The decoder with its loss. There is no loss that balances the experts: it changes nothing in a plan."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.d_model, dtype=config.dtype)
        self.positions = nn.Parameter(torch.empty(config.max_sequence, config.d_model, dtype=config.dtype))
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model, dtype=config.dtype)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False, dtype=config.dtype)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills every parameter and buffer; equal seeds give equal weights, whatever ran before.

        Weights are normal with deviation 0.02; norms start at one and zero.
        """
        generator = torch.Generator(self.norm.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                (nn.init.zeros_ if name.endswith("bias") else nn.init.ones_)(parameter)
            else:
                nn.init.normal_(parameter, std=0.02, generator=generator)
        for module in self.modules():
            if isinstance(module, Router):
                for buffer in (module.numbers, module.slots):
                    buffer.copy_(torch.arange(len(buffer)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy (scalar, float32) of ``targets`` (B, T) after ``tokens`` (B, T)."""
        x = self.tok_embeddings(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


TINY = MoEConfig()

MOE_8X7B = MoEConfig(
    vocab_size=32_000,
    n_layers=32,
    d_model=4096,
    n_heads=32,
    d_ffn=14_336,
    experts=8,
    max_sequence=2048,
    dtype=torch.bfloat16,
)
"""The sizes of Mixtral 8x7B, with as many key-value heads as heads. Source: https://arxiv.org/abs/2401.04088, table 1.
The capacity factor is GShard's."""


def tiny() -> tuple[MoEDecoder, tuple[Tensor, Tensor]]:
    """Two layers of four experts over bytes, for tests: 8 sequences of 16 tokens."""
    model = MoEDecoder(TINY)
    model.init_weights(seed=0)
    shape = (8, TINY.max_sequence)
    return model, (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))


def moe_8x7b(batch: int = 64) -> tuple[MoEDecoder, tuple[Tensor, Tensor]]:
    """Eight experts of 7 billion with 64 sequences of 2,048 tokens, in bfloat16, all of it on the meta device."""
    with torch.device("meta"):
        shape = (batch, MOE_8X7B.max_sequence)
        return MoEDecoder(MOE_8X7B), (torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64))
