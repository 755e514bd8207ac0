"""Large models as ``transformers`` has them, at their published sizes, on the meta device: planned on a laptop.

    .venv/bin/pip install -c constraints.txt --no-build-isolation --editable '.[zoo]'
    autoshard plan examples/published.py:deepseek_v3 --mesh dp=32,tp=8 --hardware dgx-h100 --memory 80GB -o plan.yaml

Nothing is downloaded: sizes are those of the models' ``config.json``. Parameters are in bfloat16, and the step is of 16
sequences of 4,096 tokens with the loss of the next word.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


class NextWord(nn.Module):
    """A causal language model and its loss."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the next words."""
        logits = self.model(input_ids=words, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


Example = tuple[NextWord, tuple[Tensor, Tensor]]


def qwen2_72b() -> Example:
    """Qwen2-72B: 80 layers, grouped heads. Source: https://huggingface.co/Qwen/Qwen2-72B."""
    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    return _on_meta(Qwen2ForCausalLM, config)


def mixtral_8x22b() -> Example:
    """Mixtral 8x22B: 56 layers of 8 experts. Source: https://huggingface.co/mistralai/Mixtral-8x22B-v0.1."""
    config = MixtralConfig(
        vocab_size=32000,
        hidden_size=6144,
        intermediate_size=16384,
        num_hidden_layers=56,
        num_attention_heads=48,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    return _on_meta(MixtralForCausalLM, config)


def qwen3_235b() -> Example:
    """Qwen3-235B-A22B: 94 layers of 128 experts. Source: https://huggingface.co/Qwen/Qwen3-235B-A22B."""
    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        norm_topk_prob=True,
    )
    return _on_meta(Qwen3MoeForCausalLM, config)


def deepseek_v3() -> Example:
    """DeepSeek-V3, 671 billion parameters: 61 layers, 58 of them of 256 experts, latent attention. Its sizes are the
    defaults of its configuration.
    """
    return _on_meta(DeepseekV3ForCausalLM, DeepseekV3Config())


def _on_meta(kind: type[PreTrainedModel], config: PretrainedConfig) -> Example:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            words = torch.empty((16, 4096), dtype=torch.int64)
            return NextWord(kind(config)), (words, torch.empty_like(words))
    finally:
        torch.set_default_dtype(before)
