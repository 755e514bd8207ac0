"""Encoders, and decoders beside them, of transformers: text, speech and pictures, with two layers or blocks."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from .member import Example, Member

BATCH, LENGTH = 8, 16
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _tokens(vocabulary: int = 96, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, vocabulary, (BATCH, length))


def bert() -> Example:
    """Masked words, with padding at the ends."""
    config = transformers.BertConfig(**SIZES, vocab_size=96, max_position_embeddings=LENGTH)
    mask = (torch.arange(LENGTH) < torch.arange(LENGTH - BATCH + 1, LENGTH + 1)[:, None]).long()
    tokens = _tokens()
    return transformers.BertForMaskedLM(config), {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def t5() -> Example:
    """Text to text."""
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": _tokens(), "labels": _tokens(length=12)}


def whisper() -> Example:
    """Speech to text."""
    sizes = {"vocab_size": 96, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    special = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.WhisperConfig(**sizes, **layers, **heads, **special, dropout=0.0, use_cache=False)
    features = torch.randn(BATCH, 8, 32)
    return transformers.WhisperForConditionalGeneration(config), {"input_features": features, "labels": _tokens()}


def wav2vec2() -> Example:
    """A class for a piece of sound."""
    layers = {"conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 3), "num_feat_extract_layers": 2}
    embedded = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16}
    none = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "activation_dropout": 0.0}
    sizes = {key: value for key, value in SIZES.items() if "prob" not in key}
    config = transformers.Wav2Vec2Config(
        **sizes, **layers, **embedded, **none, layerdrop=0.0, apply_spec_augment=False, num_labels=5
    )
    return transformers.Wav2Vec2ForSequenceClassification(config), {
        "input_values": torch.randn(BATCH, 132),
        "labels": torch.randint(0, 5, (BATCH,)),
    }


def _picture(size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 5, (BATCH,))}


def vit() -> Example:
    """Patches of 8 by 8."""
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config), _picture()


def swin() -> Example:
    """Windows of 4 by 4 that shift."""
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    config = transformers.SwinConfig(**sizes, window_size=4, drop_path_rate=0.0, num_labels=5)
    return transformers.SwinForImageClassification(config), _picture()


def dinov2() -> Example:
    """Vision transformer with layer scale."""
    sizes = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    config = transformers.Dinov2Config(**sizes, image_size=32, patch_size=8, num_labels=5)
    return transformers.Dinov2ForImageClassification(config), _picture()


def llava() -> Example:
    """Pictures among words: features of a picture in the places of four of its text's tokens."""
    picture = 95
    sizes = {key: value for key, value in SIZES.items() if "prob" not in key}
    words = transformers.LlamaConfig(**sizes, vocab_size=96, num_key_value_heads=2, max_position_embeddings=LENGTH)
    pictures = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(
        text_config=words, vision_config=pictures, image_token_id=picture, image_seq_length=4, vision_feature_layer=-1
    )
    tokens = _tokens(picture)
    tokens[:, 1:5] = picture
    given = {"input_ids": tokens, "pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": tokens, "use_cache": False}
    return transformers.LlavaForConditionalGeneration(config), given


def smolvlm() -> Example:
    """Pictures among words, of which those are left out that are nothing but padding: here none."""
    picture = 95
    sizes = {key: value for key, value in SIZES.items() if "prob" not in key}
    words = {"model_type": "llama", **sizes, "vocab_size": 96, "num_key_value_heads": 2, "pad_token_id": 0}
    pictures = {**sizes, "image_size": 16, "patch_size": 4}
    config = transformers.SmolVLMConfig(
        text_config=words, vision_config=pictures, image_token_id=picture, scale_factor=2, tie_word_embeddings=False
    )
    tokens = _tokens(picture)
    tokens[:, 2:6] = picture
    given = {"input_ids": tokens, "pixel_values": torch.randn(BATCH, 1, 3, 16, 16), "labels": tokens}
    return transformers.SmolVLMForConditionalGeneration(config), given | {"use_cache": False}


def videomae() -> Example:
    """Films of which a mask takes as many pieces of each, and the others are told from these."""
    small = {key: value // 2 for key, value in SIZES.items() if "prob" not in key}
    decoder = {f"decoder_{key}": value for key, value in small.items()}
    config = transformers.VideoMAEConfig(**SIZES, **decoder, image_size=16, patch_size=4, num_frames=4, tubelet_size=2)
    mask = torch.stack([torch.randperm(32) < 24 for _ in range(BATCH)])
    given = {"pixel_values": torch.randn(BATCH, 4, 3, 16, 16), "bool_masked_pos": mask}
    return transformers.VideoMAEForPreTraining(config), given


def longformer() -> Example:
    """Words that look at those near them: windows that overlap."""
    config = transformers.LongformerConfig(
        **SIZES, vocab_size=96, attention_window=8, max_position_embeddings=LENGTH + 16, pad_token_id=1
    )
    tokens = _tokens()
    return transformers.LongformerForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


class Loss(torch.nn.Module):
    """The loss that a model gives beside features and scores."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Any) -> torch.Tensor:
        """One number."""
        loss: torch.Tensor = self.model(**given, return_loss=True).loss
        return loss


def clip() -> Example:
    """Pictures and texts that are told apart by each other: a contrastive loss over the batch."""
    sizes = {key: value for key, value in SIZES.items() if "prob" not in key}
    words = transformers.CLIPTextConfig(**sizes, vocab_size=96, max_position_embeddings=LENGTH, eos_token_id=2)
    pictures = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    config = transformers.CLIPConfig(
        text_config=words.to_dict(), vision_config=pictures.to_dict(), projection_dim=16, attn_implementation="sdpa"
    )
    return Loss(transformers.CLIPModel(config)), {"input_ids": _tokens(), "pixel_values": torch.randn(BATCH, 3, 16, 16)}


class Mean(torch.nn.Module):
    """The mean square of the features of an encoder, as a loss."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """One number."""
        features: torch.Tensor = self.encoder(pixel_values)[0]
        return features.square().mean()


def sam() -> Example:
    """The encoder of pictures: windows, and positions relative to them."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 64, "output_channels": 16}
    config = transformers.SamVisionConfig(
        **sizes, image_size=32, patch_size=4, window_size=3, global_attn_indexes=[1], attn_implementation="eager"
    )
    return Mean(transformers.SamVisionModel(config)), {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


_MAKERS = (bert, t5, whisper, wav2vec2, vit, swin, dinov2, llava, clip, sam, smolvlm, videomae, longformer)
_REPRESENTATIVE = {"smolvlm": ("pixel_values", "input_ids"), "videomae": ("bool_masked_pos",)}

ENCODERS = tuple(Member(make.__name__, make, representative=_REPRESENTATIVE.get(make.__name__, ())) for make in _MAKERS)
