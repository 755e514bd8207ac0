"""Decoders of transformers, with two layers and random weights, in train mode without dropout."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers

from .member import MESHES, UNEVEN, Example, Member

BATCH, LENGTH = 8, 16

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "head_dim": 8,
    "pad_token_id": 0,
    "use_cache": False,
    "tie_word_embeddings": False,
}


def decoder(name: str, **changes: Any) -> Example:
    """A causal language model with its loss: ``NAMEConfig`` and ``NAMEForCausalLM``; a size of None is left out."""
    sizes = {key: value for key, value in (SIZES | changes).items() if value is not None}
    config = getattr(transformers, f"{name}Config")(**sizes)
    config.use_cache = False
    architecture = name.removesuffix("Text")
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    tokens = torch.randint(1, config.vocab_size, (BATCH, LENGTH))
    return model.train(), {"input_ids": tokens, "labels": tokens}


def gpt2(**changes: Any) -> Example:
    """GPT-2, whose sizes have other names."""
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**(sizes | changes), **dropout, use_cache=False)
    tokens = torch.randint(1, config.vocab_size, (BATCH, LENGTH))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **{"head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24},
}
NO_HEAD_DIM = {"head_dim": None, "num_key_value_heads": None}
BLOOM = {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None, "max_position_embeddings": None}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

DECODERS = (
    Member("llama", partial(decoder, "Llama")),
    Member(
        "llama4", partial(decoder, "Llama4Text", num_local_experts=4, intermediate_size_mlp=64, attention_chunk_size=6)
    ),
    Member("mistral", partial(decoder, "Mistral", sliding_window=5)),
    Member("qwen3", partial(decoder, "Qwen3")),
    Member("qwen3-moe", partial(decoder, "Qwen3Moe", **ROUTED), dtype=torch.float32),
    Member("gemma3", partial(decoder, "Gemma3Text", sliding_window=5, tie_word_embeddings=True)),
    Member("gpt2", gpt2),
    Member("gpt-neox", partial(decoder, "GPTNeoX", **NO_HEAD_DIM, **NO_DROPOUT)),
    Member("bloom", partial(decoder, "Bloom", **BLOOM, **NO_DROPOUT)),
    Member(
        "opt",
        partial(decoder, "OPT", **NO_HEAD_DIM, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0),
    ),
    Member("falcon", partial(decoder, "Falcon", **NO_HEAD_DIM, **NO_DROPOUT, num_kv_heads=1, bias=False)),
    Member("mixtral", partial(decoder, "Mixtral", num_local_experts=4, num_experts_per_tok=2), dtype=torch.float32),
    Member("deepseek-v3", partial(decoder, "DeepseekV3", **LATENT), dtype=torch.float32),
    # sizes that no axis divides: vocabulary, heads, and the axes of UNEVEN
    Member("gpt2-50257", partial(gpt2, vocab_size=50257, n_embd=24, n_head=3)),
    Member(
        "llama-odd",
        partial(
            decoder, "Llama", hidden_size=42, num_attention_heads=6, num_key_value_heads=3, head_dim=6, vocab_size=101
        ),
        (*MESHES, *UNEVEN),
    ),
)
