"""Small models of plain PyTorch: layers that train differently, and what a forward takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from zoo_case import Case

if TYPE_CHECKING:
    from collections.abc import Callable

FEATURES, CLASSES = 32, 10


class Classifier(nn.Module):
    """A body and its cross entropy, as one module."""

    def __init__(self, body: nn.Module, *, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.body = body
        self.criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.body(x)
        loss: Tensor = self.criterion(scores.reshape(-1, scores.shape[-1]), y.reshape(-1))
        return loss


class First(nn.Module):
    """The first output of a recurrent layer or an attention, which return tuples."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner = inner
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.call(self.inner, x)[0]
        return first


def _images(*body: nn.Module, size: int = 12) -> Case:
    batch = {"x": torch.randn(8, 3, size, size), "y": torch.randint(0, CLASSES, (8,))}
    return Case(Classifier(nn.Sequential(*body)), batch)


def _sequences(*body: nn.Module, label_smoothing: float = 0.0) -> Case:
    batch = {"x": torch.randn(4, 7, FEATURES), "y": torch.randint(0, CLASSES, (4, 7))}
    scores = nn.Linear(FEATURES, CLASSES)
    return Case(Classifier(nn.Sequential(*body, scores), label_smoothing=label_smoothing), batch)


def _rows() -> dict[str, Tensor]:
    return {"x": torch.randn(8, FEATURES), "y": torch.randint(0, CLASSES, (8,))}


def _pooled(channels: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)


# ---- layers ---------------------------------------------------------------------------------------------------


def mlp(_: str) -> Case:
    return _sequences(nn.Linear(FEATURES, 2 * FEATURES), nn.ReLU(), nn.Linear(2 * FEATURES, FEATURES))


def cnn_with_batch_norm(_: str) -> Case:
    """Running statistics are buffers: one exponential average, one plain (`momentum=None`)."""
    first = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16, momentum=None), nn.GELU())
    return _images(*first, *second, *_pooled(16))


def grouped_convolution(_: str) -> Case:
    grouped = (nn.Conv2d(16, 16, 3, groups=4), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16))
    return _images(nn.Conv2d(3, 16, 1), nn.ReLU(), *grouped, nn.ReLU(), *_pooled(16))


def transposed_convolution(_: str) -> Case:
    back = nn.ConvTranspose2d(8, 8, 3, stride=2, output_padding=1)
    return _images(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), back, nn.ReLU(), *_pooled(8))


def lstm(_: str) -> Case:
    return _sequences(First(nn.LSTM(FEATURES, FEATURES, batch_first=True), lambda layer, x: layer(x)))


def gru(_: str) -> Case:
    return _sequences(First(nn.GRU(FEATURES, FEATURES, batch_first=True), lambda layer, x: layer(x)))


def multihead_attention(_: str) -> Case:
    layer = nn.MultiheadAttention(FEATURES, 4, batch_first=True)
    return _sequences(First(layer, lambda attention, x: attention(x, x, x, need_weights=False)))


def transformer_encoder(_: str) -> Case:
    layer = nn.TransformerEncoderLayer(FEATURES, 4, 64, dropout=0.0, batch_first=True)
    return _sequences(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


class Activations(nn.Module):
    """Activations without a gradient in ONNX Runtime."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.prelu = nn.PReLU(width)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = nn.functional.elu(x) + nn.functional.hardswish(x) + nn.functional.mish(x)
        return total + self.prelu(x)


def untrained_activations(_: str) -> Case:
    body = (nn.Conv2d(3, 8, 3), Activations(8), nn.Upsample(scale_factor=2, mode="bilinear"))
    return _images(*body, *_pooled(8))


# ---- ways of training -----------------------------------------------------------------------------------------


def label_smoothing(_: str) -> Case:
    return _sequences(nn.Linear(FEATURES, FEATURES), nn.Tanh(), label_smoothing=0.1)


class ScaledSquare(torch.autograd.Function):
    """The square of x times w, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * 2 * x * w, (gradient * x * x).sum((0, 1))


class Squared(nn.Module):
    """Applies `ScaledSquare` with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        squared: Tensor = ScaledSquare.apply(x, self.weight)
        return squared


def autograd_function(_: str) -> Case:
    return _sequences(nn.Linear(FEATURES, FEATURES), Squared())


def frozen_layers(_: str) -> Case:
    """The first layer and one bias in the middle do not train."""
    first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    first.requires_grad_(requires_grad=False)
    second.bias.requires_grad_(requires_grad=False)
    return _sequences(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(FEATURES, FEATURES))


class Tied(nn.Module):
    """Its embedding is its output layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, FEATURES)
        self.mixing = nn.Linear(FEATURES, FEATURES)
        self.scores = nn.Linear(FEATURES, CLASSES)
        self.scores.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.mixing(self.embedding(x)).tanh())
        return scores


def tied_weights(_: str) -> Case:
    batch = {"x": torch.randint(0, CLASSES, (4, 7)), "y": torch.randint(0, CLASSES, (4, 7))}
    return Case(Classifier(Tied()), batch)


# ---- arguments and outputs ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Takes integers that index, booleans that choose, and integers that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, FEATURES)
        self.scores = nn.Linear(FEATURES, CLASSES)

    def forward(self, ids: Tensor, keep: Tensor, times: Tensor, y: Tensor) -> Tensor:
        chosen = self.embedding(ids).masked_fill(~keep[..., None], 0.0) * times[:, None, None]
        pooled = torch.where(keep.any(1, keepdim=True), chosen.sum(1), chosen.mean(1))
        return nn.functional.cross_entropy(self.scores(pooled), y)


def integer_and_bool_inputs(_: str) -> Case:
    keep = torch.rand(4, 7) > 0.3
    batch = {"ids": torch.randint(0, 20, (4, 7)), "keep": keep, "times": torch.tensor([1, 2, 3, 1]).int()}
    return Case(Mixed(), batch | {"y": torch.randint(0, CLASSES, (4,))})


class Several(nn.Module):
    """Two losses of one body, and what they were made of."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.scores = nn.Linear(FEATURES, CLASSES)
        self.copy = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = self.body(x)
        scores = self.scores(hidden)
        return self.outputs(
            nn.functional.cross_entropy(scores, y), nn.functional.mse_loss(self.copy(hidden), x), scores
        )

    def outputs(self, choice: Tensor, copy: Tensor, scores: Tensor) -> Any:
        return choice, copy, scores


def several_losses(_: str) -> Case:
    """Both losses go backward at once, with weights of their own."""
    return Case(Several(), _rows(), loss=lambda output: output[0] + 0.5 * output[1])


class AsDict(Several):
    """Returns a dict, with a dict inside."""

    def outputs(self, choice: Tensor, copy: Tensor, scores: Tensor) -> Any:
        return {"loss": choice + copy, "parts": {"choice": choice, "copy": copy}, "scores": scores}


def dict_output(_: str) -> Case:
    return Case(AsDict(), _rows())


@dataclass
class Output:
    """What `AsDataclass` returns."""

    loss: Tensor
    scores: Tensor
    hidden: Tensor | None = None


class AsDataclass(Several):
    """Returns a dataclass, one of whose fields is None."""

    def outputs(self, choice: Tensor, copy: Tensor, scores: Tensor) -> Any:
        return Output(choice + copy, scores)


def dataclass_output(_: str) -> Case:
    return Case(AsDataclass(), _rows())
