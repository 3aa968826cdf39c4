"""Models of all kinds that train on a CPU: what makes each, and a batch for it; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Case(NamedTuple):
    """A model in training mode and the keyword arguments of a forward that returns its loss."""

    model: nn.Module
    batch: dict[str, Tensor]


class WithLoss(nn.Module):
    """A model that classifies `x`, with its cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))}


def _text(batch: int, length: int, vocabulary: int = 2000, **more: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(5, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids, **more}


def _transformer(kind: str, config: str, batch: dict[str, Tensor], **how: Any) -> Case:
    import transformers

    return Case(getattr(transformers, kind)(getattr(transformers, config)(**how)).train(), batch)


_SIZE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
_WORDS = {"vocab_size": 2000}
_IMAGES = {"image_size": 96, "patch_size": 8, "num_labels": 10}


def _images(batch: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(10, (batch,))}


class LanguageModel(nn.Module):
    """A recurrent language model."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, width)
        self.recurrent = kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 2000)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each word."""
        result: Tensor = self.head(self.recurrent(self.embedding(x))[0])
        return result


def _recurrent(kind: type[nn.LSTM | nn.GRU]) -> Case:
    x = torch.randint(2000, (16, 64))
    return Case(WithLoss(LanguageModel(kind, 256, 2)), {"x": x, "labels": x})


class UNet(nn.Module):
    """Two scales of convolutions with a way across, as in segmentation and diffusion."""

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU())

        self.down, self.deep = block(3, 32), block(32, 64)
        self.up, self.out = nn.ConvTranspose2d(64, 32, 2, stride=2), nn.Conv2d(64, 3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of the noise that was added."""
        across = self.down(x)
        deep = self.up(self.deep(F.max_pool2d(across, 2)))
        return {"loss": F.mse_loss(self.out(torch.cat([across, deep], 1)), labels)}


class Recommender(nn.Module):
    """Embeddings of many features, their products, and a network (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5000, 32) for _ in range(12))
        self.dense = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.top = nn.Sequential(nn.Linear(13 * 13 + 32, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x: Tensor, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of the click."""
        dense = self.dense(x)
        rows = [table(features[:, number]) for number, table in enumerate(self.tables)]
        stacked = torch.stack([dense, *rows], 1)
        products = (stacked @ stacked.transpose(1, 2)).flatten(1)
        clicks = self.top(torch.cat([dense, products], 1))[:, 0]
        return {"loss": F.binary_cross_entropy_with_logits(clicks, labels)}


class GraphNetwork(nn.Module):
    """Messages along the edges of a graph, summed at each node."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of the nodes' classes."""
        for layer in self.layers:
            messages = layer(x)[edges[0]]
            x = F.relu(torch.zeros_like(x).index_add(0, edges[1], messages) + x)
        return {"loss": F.cross_entropy(self.head(x), labels)}


class Mixer(nn.Module):
    """A layer of MLP-Mixer: a network across places, and one across channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.places = nn.Sequential(nn.Linear(places, 256), nn.GELU(), nn.Linear(256, places))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of shape (batch, places, width)."""
        x = x + self.places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.channels(self.norms[1](x))
        return result


class Mean(nn.Module):
    """The mean over places."""

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (batch, width)."""
        return x.mean(1)


def _discriminator() -> Case:
    channels = (3, 32, 64, 128)
    layers: list[nn.Module] = []
    for a, b in pairwise(channels):
        layers += [nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 64, 2))
    return Case(WithLoss(model), {"x": torch.randn(16, 3, 64, 64), "labels": torch.randint(2, (16,))})


def _network() -> Case:
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    return Case(WithLoss(model), {"x": torch.randn(512, 512), "labels": torch.randint(10, (512,))})


def _mixer() -> Case:
    model = nn.Sequential(*(Mixer(64, 192) for _ in range(4)), Mean(), nn.Linear(192, 10))
    return Case(WithLoss(model), {"x": torch.randn(16, 64, 192), "labels": torch.randint(10, (16,))})


def _resnet() -> Case:
    how = {
        "depths": [2, 2, 2, 2],
        "layer_type": "basic",
        "hidden_sizes": [64, 128, 256, 512],
        "num_labels": 10,
    }
    return _transformer("ResNetForImageClassification", "ResNetConfig", _images(8, 96), **how)


def _recommender() -> Case:
    batch = {
        "x": torch.randn(1024, 16),
        "features": torch.randint(5000, (1024, 12)),
        "labels": torch.randint(2, (1024,)).float(),
    }
    return Case(Recommender(), batch)


def _graph_network() -> Case:
    batch = {
        "x": torch.randn(4096, 128),
        "edges": torch.randint(4096, (2, 16384)),
        "labels": torch.randint(10, (4096,)),
    }
    return Case(GraphNetwork(), batch)


_BERT = {**_SIZE, **_WORDS, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}

MODELS: dict[str, Callable[[], Case]] = {
    "BERT": lambda: _transformer("BertForMaskedLM", "BertConfig", _text(8, 128), **_BERT),
    "GPT-2": lambda: _transformer(
        "GPT2LMHeadModel",
        "GPT2Config",
        _text(8, 128),
        n_embd=256,
        n_layer=4,
        n_head=8,
        bos_token_id=1,
        eos_token_id=2,
        **_WORDS,
    ),
    "Llama": lambda: _transformer(
        "LlamaForCausalLM", "LlamaConfig", _text(8, 128), **_SIZE, **_WORDS, num_key_value_heads=4
    ),
    "DeBERTa-v2": lambda: _transformer(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        _text(8, 128),
        **_BERT,
        relative_attention=True,
        position_buckets=32,
        pos_att_type=["p2c", "c2p"],
    ),
    "T5": lambda: _transformer(
        "T5ForConditionalGeneration",
        "T5Config",
        _text(8, 64),
        d_model=256,
        d_ff=1024,
        num_layers=3,
        num_heads=8,
        d_kv=32,
        decoder_start_token_id=0,
        **_WORDS,
    ),
    "Mixtral": lambda: _transformer(
        "MixtralForCausalLM",
        "MixtralConfig",
        _text(4, 64),
        **{**_SIZE, "num_hidden_layers": 2, "intermediate_size": 512},
        **_WORDS,
        num_key_value_heads=4,
        num_local_experts=4,
    ),
    "Mamba": lambda: _transformer(
        "MambaForCausalLM", "MambaConfig", _text(2, 32), hidden_size=128, num_hidden_layers=2, **_WORDS
    ),
    "ViT": lambda: _transformer("ViTForImageClassification", "ViTConfig", _images(8, 96), **_SIZE, **_IMAGES),
    "Swin": lambda: _transformer(
        "SwinForImageClassification",
        "SwinConfig",
        _images(8, 64),
        image_size=64,
        patch_size=4,
        embed_dim=48,
        depths=[2, 2],
        num_heads=[3, 6],
        window_size=4,
        num_labels=10,
    ),
    "ConvNeXt": lambda: _transformer(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        _images(8, 64),
        depths=[1, 1, 2, 1],
        hidden_sizes=[32, 64, 128, 256],
        num_labels=10,
    ),
    "ResNet-18": _resnet,
    "LSTM": lambda: _recurrent(nn.LSTM),
    "GRU": lambda: _recurrent(nn.GRU),
    "UNet": lambda: Case(UNet(), {"x": torch.randn(8, 3, 64, 64), "labels": torch.randn(8, 3, 64, 64)}),
    "GAN discriminator": _discriminator,
    "MLP": _network,
    "MLP-Mixer": _mixer,
    "DLRM": _recommender,
    "graph network": _graph_network,
}
"""By name; each call makes the same model with the same weights where the seed is the same."""
