"""Small models of transformers that look and listen."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from zoo_case import (
    BATCH,
    HEADS,
    LAYERS,
    NO_DROPOUT,
    SIZE,
    SPECIAL,
    VOCABULARY,
    WIDTH,
    images,
    tokens,
    transformer,
)

PATCHES = {"image_size": 32, "patch_size": 8}
CLASSES = {"num_labels": 10}
DROPOUT_OFF = {"attention_dropout": 0.0, "activation_dropout": 0.0}

Described = tuple[Any, dict]


@transformer("ViTForImageClassification")
def vit() -> Described:
    return transformers.ViTConfig(**SIZE, **NO_DROPOUT, **PATCHES, **CLASSES), images()


@transformer("BeitForImageClassification")
def beit() -> Described:
    """Resizes its table of relative positions."""
    positions = {"use_relative_position_bias": True, "use_absolute_position_embeddings": False}
    config = transformers.BeitConfig(
        **SIZE, **NO_DROPOUT, **PATCHES, **CLASSES, **positions, drop_path_rate=0.0
    )
    return config, images()


@transformer("SwinForImageClassification")
def swin() -> Described:
    """Attends in windows, shifted in every second layer."""
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    config = transformers.SwinConfig(**sizes, **CLASSES, **NO_DROPOUT, window_size=4, drop_path_rate=0.0)
    return config, images()


@transformer("ResNetForImageClassification", sdpa=False)
def resnet() -> Described:
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    return transformers.ResNetConfig(**sizes, **CLASSES), images(4)


@transformer("ConvNextForImageClassification", sdpa=False)
def convnext() -> Described:
    sizes = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1]}
    return transformers.ConvNextConfig(**sizes, **CLASSES, drop_path_rate=0.0), images()


@transformer("CLIPModel", learning_rate=1e-4)
def clip() -> Described:
    """Two encoders, and a loss over all pairs of a text and an image.

    With two pairs and steps of 1e-3, gradients of PyTorch's float32 are up to 3e-5 away from its float64, and those of
    ONNX Runtime up to 2e-5: few similarities, each 14 times a cosine, nearly cancel. Hence more pairs, and small steps.
    """
    sizes = {**SIZE, "projection_dim": 32, "attention_dropout": 0.0}
    written = {**sizes, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config=written, vision_config={**sizes, **PATCHES}, projection_dim=32
    )
    ids = tokens(count=8)
    ids[:, -1] = 2  # CLIP reads a sentence where it ends
    seen = images(8)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": seen["pixel_values"]}
    return config, {**batch, "return_loss": True}


@transformer("WhisperForConditionalGeneration")
def whisper() -> Described:
    encoder = {"encoder_layers": LAYERS, "encoder_ffn_dim": 2 * WIDTH, "encoder_attention_heads": HEADS}
    decoder = {"decoder_layers": LAYERS, "decoder_ffn_dim": 2 * WIDTH, "decoder_attention_heads": HEADS}
    lengths = {"num_mel_bins": 20, "max_source_positions": 30, "max_target_positions": 32}
    tells = {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(
        **encoder,
        **decoder,
        **lengths,
        **tells,
        **SPECIAL,
        **DROPOUT_OFF,
        d_model=WIDTH,
        vocab_size=VOCABULARY,
        use_cache=False,
        dropout=0.0,
    )
    return config, {"input_features": torch.randn(BATCH, 20, 60), "labels": tokens()}


@transformer("Wav2Vec2ForSequenceClassification")
def wav2vec2() -> Described:
    """Its positions are a grouped convolution whose weight is normalised."""
    off = ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "activation_dropout", "layerdrop")
    config = transformers.Wav2Vec2Config(
        **SIZE,
        **dict.fromkeys(off, 0.0),
        conv_dim=(32, 32),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        vocab_size=32,
        num_labels=4,
        classifier_proj_size=32,
        apply_spec_augment=False,
    )
    return config, {"input_values": torch.randn(BATCH, 400), "labels": torch.tensor([0, 1])}
