"""Twenty models of all kinds that train on a CPU, in three sizes, and a batch for each; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

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


SIZES: Final = ("small", "middle", "large")
"""The sizes of a model, by number: PyTorch takes some 1 to 9 ms, 9 to 55 ms, and more for a step."""
_WIDTH, _LAYERS, _HEADS = (64, 128, 256), (2, 4, 4), (4, 8, 8)  # of a transformer, by size
_WORDS = {"vocab_size": 2000}


def _words(size: int) -> dict[str, Tensor]:
    return _text(*((2, 32), (4, 64), (8, 128))[size])


def _body(size: int) -> dict[str, int]:
    return {
        "hidden_size": _WIDTH[size],
        "num_hidden_layers": _LAYERS[size],
        "num_attention_heads": _HEADS[size],
        "intermediate_size": 4 * _WIDTH[size],
    }


def _images(batch: int, pixels: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, pixels, pixels), "labels": torch.randint(10, (batch,))}


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


def _recurrent(kind: type[nn.LSTM | nn.GRU], size: int) -> Case:
    batch, length, width = ((4, 16, 64), (16, 64, 192), (32, 96, 384))[size]
    x = torch.randint(2000, (batch, length))
    return Case(WithLoss(LanguageModel(kind, width, 2)), {"x": x, "labels": x})


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


def _unet(size: int) -> Case:
    batch, pixels = ((1, 32), (8, 64), (32, 96))[size]
    shape = (batch, 3, pixels, pixels)
    return Case(UNet(), {"x": torch.randn(shape), "labels": torch.randn(shape)})


def _discriminator(size: int) -> Case:
    batch = (2, 16, 128)[size]
    layers: list[nn.Module] = []
    for a, b in pairwise((3, 32, 64, 128)):
        layers += [nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 64, 2))
    return Case(WithLoss(model), {"x": torch.randn(batch, 3, 64, 64), "labels": torch.randint(2, (batch,))})


def _network(size: int) -> Case:
    batch, width = ((128, 128), (512, 512), (2048, 1024))[size]
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return Case(WithLoss(model), {"x": torch.randn(batch, width), "labels": torch.randint(10, (batch,))})


def _mixer(size: int) -> Case:
    batch, width = ((1, 64), (8, 128), (32, 192))[size]
    model = nn.Sequential(*(Mixer(64, width) for _ in range(_LAYERS[size])), Mean(), nn.Linear(width, 10))
    return Case(WithLoss(model), {"x": torch.randn(batch, 64, width), "labels": torch.randint(10, (batch,))})


def _resnet(size: int) -> Case:
    how = {
        "depths": [2, 2, 2, 2],
        "layer_type": "basic",
        "embedding_size": _WIDTH[size] // 4,
        "hidden_sizes": [_WIDTH[size] // 4 * times for times in (1, 2, 4, 8)],
        "num_labels": 10,
    }
    batch = _images(*((2, 64), (4, 64), (8, 96))[size])
    return _transformer("ResNetForImageClassification", "ResNetConfig", batch, **how)


def _recommender(size: int) -> Case:
    many = (128, 1024, 16384)[size]
    batch = {
        "x": torch.randn(many, 16),
        "features": torch.randint(5000, (many, 12)),
        "labels": torch.randint(2, (many,)).float(),
    }
    return Case(Recommender(), batch)


def _graph_network(size: int) -> Case:
    nodes = (256, 4096, 32768)[size]
    batch = {
        "x": torch.randn(nodes, 128),
        "edges": torch.randint(nodes, (2, 4 * nodes)),
        "labels": torch.randint(10, (nodes,)),
    }
    return Case(GraphNetwork(), batch)


def _series(size: int) -> Case:
    past, series = (64, 128, 256)[size], (2, 4, 8)[size]
    how = {
        "num_input_channels": series,
        "context_length": past,
        "prediction_length": 16,
        "patch_length": 8,
        "patch_stride": 8,
        "d_model": _WIDTH[size],
        "ffn_dim": 4 * _WIDTH[size],
        "num_hidden_layers": _LAYERS[size],
        "num_attention_heads": _HEADS[size],
    }
    many = (2, 4, 8)[size]
    batch = {"past_values": torch.randn(many, past, series), "future_values": torch.randn(many, 16, series)}
    return _transformer("PatchTSTForPrediction", "PatchTSTConfig", batch, **how)


def _bert(size: int) -> dict[str, Any]:
    return {**_body(size), **_WORDS, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def _gpt2(size: int) -> Case:
    how = {"n_embd": _WIDTH[size], "n_layer": _LAYERS[size], "n_head": _HEADS[size], **_WORDS}
    return _transformer("GPT2LMHeadModel", "GPT2Config", _words(size), **how, bos_token_id=1, eos_token_id=2)


def _deberta(size: int) -> Case:
    how = {"relative_attention": True, "position_buckets": 32, "pos_att_type": ["p2c", "c2p"]}
    return _transformer("DebertaV2ForMaskedLM", "DebertaV2Config", _words(size), **_bert(size), **how)


def _t5(size: int) -> Case:
    how = {
        "d_model": _WIDTH[size],
        "d_ff": 4 * _WIDTH[size],
        "num_layers": (1, 2, 3)[size],
        "num_heads": _HEADS[size],
        "d_kv": _WIDTH[size] // _HEADS[size],
    }
    batch = _text(*((2, 16), (4, 32), (8, 64))[size])
    return _transformer(
        "T5ForConditionalGeneration", "T5Config", batch, **how, decoder_start_token_id=0, **_WORDS
    )


def _mixtral(size: int) -> Case:
    how = {**_body(size), "intermediate_size": 2 * _WIDTH[size], "num_hidden_layers": (1, 2, 4)[size]}
    return _transformer(
        "MixtralForCausalLM",
        "MixtralConfig",
        _words(size),
        **how,
        **_WORDS,
        num_key_value_heads=_HEADS[size] // 2,
        num_local_experts=4,
    )


def _mamba(size: int) -> Case:
    batch = _text(*((1, 16), (2, 32), (32, 32))[size])
    how = {"hidden_size": _WIDTH[size], "num_hidden_layers": (1, 2, 2)[size]}
    return _transformer("MambaForCausalLM", "MambaConfig", batch, **how, **_WORDS)


def _vit(size: int) -> Case:
    batch, pixels = ((2, 32), (4, 64), (8, 96))[size]
    how = {**_body(size), "image_size": pixels, "patch_size": 8, "num_labels": 10}
    return _transformer("ViTForImageClassification", "ViTConfig", _images(batch, pixels), **how)


def _swin(size: int) -> Case:
    how = {
        "image_size": 64,
        "patch_size": 4,
        "embed_dim": (24, 48, 96)[size],
        "depths": [2, 2],
        "num_heads": [3, 6],
        "window_size": 4,
        "num_labels": 10,
    }
    return _transformer("SwinForImageClassification", "SwinConfig", _images((1, 8, 32)[size], 64), **how)


def _convnext(size: int) -> Case:
    how = {"depths": [1, 1, 2, 1], "hidden_sizes": [32, 64, 128, 256], "num_labels": 10}
    return _transformer(
        "ConvNextForImageClassification", "ConvNextConfig", _images((1, 8, 64)[size], 64), **how
    )


_KINDS: dict[str, Callable[[int], Case]] = {
    "BERT": lambda size: _transformer("BertForMaskedLM", "BertConfig", _words(size), **_bert(size)),
    "GPT-2": _gpt2,
    "Llama": lambda size: _transformer(
        "LlamaForCausalLM",
        "LlamaConfig",
        _words(size),
        **_body(size),
        **_WORDS,
        num_key_value_heads=_HEADS[size] // 2,
    ),
    "DeBERTa-v2": _deberta,
    "T5": _t5,
    "Mixtral": _mixtral,
    "Mamba": _mamba,
    "ViT": _vit,
    "Swin": _swin,
    "ConvNeXt": _convnext,
    "ResNet-18": _resnet,
    "LSTM": lambda size: _recurrent(nn.LSTM, size),
    "GRU": lambda size: _recurrent(nn.GRU, size),
    "UNet": _unet,
    "GAN discriminator": _discriminator,
    "MLP": _network,
    "MLP-Mixer": _mixer,
    "DLRM": _recommender,
    "graph network": _graph_network,
    "PatchTST": _series,
}

MODELS: dict[str, Callable[[], Case]] = {
    f"{kind} {name}": partial(make, size) for size, name in enumerate(SIZES) for kind, make in _KINDS.items()
}
"""By kind and size; each call makes the same model with the same weights where the seed is the same."""
