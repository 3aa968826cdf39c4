"""Small models of the families that ortlab promises to train, each with a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LENGTH, VOCABULARY = 2, 16, 300
SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Case:
    """A model and what to call it with."""

    model: nn.Module
    batch: dict[str, torch.Tensor]


def tokens() -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (BATCH, LENGTH))


def text(*, mask: bool = True, padded: bool = False, causal: bool = True) -> dict[str, torch.Tensor]:
    ids = tokens()
    labels = ids.clone() if causal else tokens()
    seen = torch.ones_like(ids)
    if padded:
        seen[1, 10:] = 0
        labels = labels.masked_fill(seen == 0, -100)
    batch = {"input_ids": ids, "labels": labels}
    return batch | {"attention_mask": seen} if mask else batch


def _hugging_face(model: str, config: Any, attention: str | None) -> nn.Module:
    if attention is not None:
        config._attn_implementation = attention
    built: nn.Module = getattr(transformers, model)(config)
    return built


def bert(attention: str) -> Case:
    config = transformers.BertConfig(**SIZE, **NO_DROPOUT, vocab_size=VOCABULARY)
    return Case(_hugging_face("BertForMaskedLM", config, attention), text(causal=False))


def gpt2(attention: str, *, mask: bool = True, padded: bool = False) -> Case:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        vocab_size=VOCABULARY,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        **off,
    )
    return Case(_hugging_face("GPT2LMHeadModel", config, attention), text(mask=mask, padded=padded))


def gpt2_without_mask(attention: str) -> Case:
    return gpt2(attention, mask=False)


def gpt2_padded(attention: str) -> Case:
    return gpt2(attention, padded=True)


def llama(attention: str) -> Case:
    config = transformers.LlamaConfig(
        **SIZE, **SPECIAL, num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False
    )
    return Case(_hugging_face("LlamaForCausalLM", config, attention), text())


def t5(attention: str) -> Case:
    config = transformers.T5Config(
        num_layers=2,
        d_model=64,
        d_ff=128,
        num_heads=4,
        d_kv=16,
        vocab_size=VOCABULARY,
        use_cache=False,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return Case(_hugging_face("T5ForConditionalGeneration", config, attention), text(causal=False))


def t5_has_sdpa() -> bool:
    return bool(transformers.T5ForConditionalGeneration._supports_sdpa)


def vit(attention: str) -> Case:
    config = transformers.ViTConfig(**SIZE, **NO_DROPOUT, image_size=32, patch_size=8, num_labels=10)
    batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.tensor([1, 2])}
    return Case(_hugging_face("ViTForImageClassification", config, attention), batch)


def deberta(attention: str) -> Case:
    config = transformers.DebertaV2Config(
        **SIZE,
        **NO_DROPOUT,
        vocab_size=VOCABULARY,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
    )
    return Case(_hugging_face("DebertaV2ForMaskedLM", config, attention), text(causal=False))


def bloom(attention: str) -> Case:
    config = transformers.BloomConfig(
        n_layer=2, hidden_size=64, n_head=4, use_cache=False, vocab_size=VOCABULARY
    )
    return Case(_hugging_face("BloomForCausalLM", config, attention), text())


def wav2vec2(attention: str) -> Case:
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
    batch = {"input_values": torch.randn(BATCH, 400), "labels": torch.tensor([0, 1])}
    return Case(_hugging_face("Wav2Vec2ForSequenceClassification", config, attention), batch)


class Classifier(nn.Module):
    """A body and its cross entropy, as one module."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.body(x)
        loss: torch.Tensor = self.criterion(scores.reshape(-1, scores.shape[-1]), y.reshape(-1))
        return loss


class First(nn.Module):
    """The first output of a recurrent layer or an attention, which return tuples."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = inner
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.call(self.inner, x)[0]
        return first


def _images(body: nn.Module, size: int = 12) -> Case:
    batch = {"x": torch.randn(8, 3, size, size), "y": torch.randint(0, 10, (8,))}
    return Case(Classifier(body), batch)


def _sequences(*body: nn.Module) -> Case:
    batch = {"x": torch.randn(4, 7, 32), "y": torch.randint(0, 10, (4, 7))}
    return Case(Classifier(nn.Sequential(*body, nn.Linear(32, 10))), batch)


def _pooled(channels: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)


def cnn_with_batch_norm(_: str) -> Case:
    first = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16, momentum=None), nn.GELU())
    return _images(nn.Sequential(*first, *second, *_pooled(16)))


def grouped_convolution(_: str) -> Case:
    body = (
        nn.Conv2d(3, 16, 1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=4),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=16),
    )
    return _images(nn.Sequential(*body, nn.ReLU(), *_pooled(16)))


def transposed_convolution(_: str) -> Case:
    body = (
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 3, stride=2, output_padding=1),
        nn.ReLU(),
    )
    return _images(nn.Sequential(*body, *_pooled(8)))


def lstm(_: str) -> Case:
    return _sequences(First(nn.LSTM(32, 32, batch_first=True), lambda layer, x: layer(x)))


def attention_layer(_: str) -> Case:
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    return _sequences(First(layer, lambda attention, x: attention(x, x, x, need_weights=False)))


def transformer_encoder(_: str) -> Case:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return _sequences(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
