"""The models of published runs, from the sizes that their rows state, on the meta device."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import gpt2, llama
from published_rows import CannotBuild, Row

GATED = re.compile(r"llama|mistral|qwen|yi\b|olmo|gemma|phi-?3|deepseek-?(llm|coder|7|67)|baichuan|internlm", re.I)
"""Names of models with Llama's layout: an MLP of three matrices, one of them a gate."""

OLDER = re.compile(r"mpt|gpt|megatron|opt-|bloom|turing", re.I)
"""Names of models with GPT-2's layout: an MLP of two matrices, learned positions, tied embeddings."""

ELSEWHERE = re.compile(r"moe|mixtral|8x\d|experts|mamba|vit\b|bert|\bt5|diffusion|flux|deepseek-?v", re.I)

ALIKE = 0.03
"""How far the parameters that a row states may be from those of a layout by which it is told."""


@dataclass(frozen=True)
class Sizes:
    """What a row says of its model; C is ``d_model``."""

    name: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    params: float | None

    @classmethod
    def of(cls, row: Row) -> Sizes:
        """Those of a row.

        Raises:
            CannotBuild: a size is missing, no number, or does not fit the others.
        """
        heads = row.whole("heads")
        sizes = cls(
            row.text("model"),
            row.whole("layers"),
            row.whole("d_model"),
            heads,
            row.whole("kv_heads", heads),
            row.whole("ffn"),
            row.whole("vocab"),
            row.whole("seq"),
            row.number("params"),
        )
        if sizes.d_model % heads or heads % sizes.kv_heads:
            raise CannotBuild(f"{sizes.kv_heads}, {heads} and {sizes.d_model} (kv_heads, heads, d_model) do not divide")
        return sizes

    @cached_property
    def layout(self) -> Literal["llama", "gpt", "plain"]:
        """Which model it is: ``llama``; ``gpt``; or ``plain``, a Llama with an MLP of two matrices.

        Raises:
            CannotBuild: neither the name nor the parameters tell.
        """
        if ELSEWHERE.search(self.name):
            raise CannotBuild(f"no layout of {self.name}")
        if GATED.search(self.name):
            return "llama"
        if OLDER.search(self.name):
            return "gpt" if self.ffn == 4 * self.d_model and self.kv_heads == self.heads else "plain"
        for matrices in (3, 2):
            for embeddings in (1, 2):
                stated, found = self.params or 0.0, self.parameters(matrices, embeddings)
                if abs(stated - found) <= ALIKE * found:
                    return "llama" if matrices == 3 else "plain"
        raise CannotBuild(f"no layout of {self.name or 'a model without a name'}, and its parameters tell none")

    def parameters(self, matrices: int, embeddings: int) -> int:
        """Without norms and biases: of an MLP of so many matrices, and of so many embeddings."""
        width = self.d_model
        attention = 2 * width * width + 2 * width * (width // self.heads * self.kv_heads)
        return self.layers * (attention + matrices * width * self.ffn) + embeddings * self.vocab * width

    @property
    def products(self) -> tuple[str, ...]:
        """The products of a block in the order in which they run; none for ``gpt``, for which nobody asks."""
        mlp = {"llama": ("w1", "w3", "w2"), "plain": ("w1", "w2"), "gpt": ()}[self.layout]
        return ("wq", "wk", "wv", "wo", *mlp) if mlp else ()

    @property
    def blocks(self) -> str:
        """The module that holds the blocks."""
        return "h" if self.layout == "gpt" else "layers"

    def having(self, layers: int) -> Sizes:
        """The same with so many layers."""
        return replace(self, layers=layers)


def build(sizes: Sizes, dtype: torch.dtype, written_out: bool, biases: bool) -> nn.Module:
    """The model, where torch makes tensors by default.

    Args:
        dtype: of its parameters.
        written_out: as Megatron before flash attention: attention as products and a softmax, and dropout.
        biases: whether ``gpt`` has any, and a matrix each for queries, keys and values, as Megatron does.

    Raises:
        CannotBuild: the layout is not known.
    """
    if sizes.layout != "gpt":
        return _llama(sizes, dtype)
    dropout = 0.1 if written_out else 0.0
    config = gpt2.GPT2Config(
        sizes.vocab, sizes.layers, sizes.d_model, sizes.heads, sizes.sequence, dropout=dropout, dtype=dtype
    )
    model = gpt2.GPT2(config)
    if biases:
        for block in model.h:
            block.attn = SeparateAttention(config, written_out)
        return model
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.bias = None  # MPT has none (no_bias: true)
    return model


def _llama(sizes: Sizes, dtype: torch.dtype) -> nn.Module:
    config = llama.LlamaConfig(
        vocab_size=sizes.vocab,
        n_layers=sizes.layers,
        d_model=sizes.d_model,
        n_heads=sizes.heads,
        n_kv_heads=sizes.kv_heads,
        d_ffn=sizes.ffn,
        max_sequence=sizes.sequence,
        dtype=dtype,
    )
    model = llama.Llama(config)
    if sizes.layout == "plain":
        for block in model.layers:
            block.feed_forward = TwoMatrices(config)
    return model


class TwoMatrices(nn.Module):
    """An MLP without a gate."""

    def __init__(self, config: llama.LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.d_model, config.d_ffn, bias=False, dtype=config.dtype)
        self.w2 = nn.Linear(config.d_ffn, config.d_model, bias=False, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        output: Tensor = self.w2(nn.functional.gelu(self.w1(x), approximate="tanh"))
        return output


class SeparateAttention(gpt2.Attention):
    """Attention whose queries, keys and values have a matrix each, so that heads can be cut.

    ``written_out`` it is that of Megatron before flash attention: two products, and a softmax and dropout between.
    Megatron scales and masks in the kernel of its softmax, so that neither stands here: this is a model of what is
    computed, whose numbers mean nothing.
    """

    def __init__(self, config: gpt2.GPT2Config, written_out: bool) -> None:
        super().__init__(config)
        del self.c_attn
        self.written_out = written_out
        self.q, self.k, self.v = (nn.Linear(config.d_model, config.d_model, dtype=config.dtype) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        batch, sequence, width = x.shape
        heads = (batch, sequence, self.n_heads, width // self.n_heads)
        q, k, v = (linear(x).view(heads).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if self.written_out:
            weights = torch.softmax(q @ k.transpose(-1, -2), dim=-1)  # (B, H, T, T)
            mixed = nn.functional.dropout(weights, self.dropout, self.training) @ v
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.c_proj(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return output
