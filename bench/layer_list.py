"""Layers and functions that models are made of, each with an input on which PyTorch takes a few milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDE = (8, 256, 768)
"""Batch, length and width of a transformer's activation."""
IMAGE = (8, 32, 56, 56)
SCORES = (8, 8, 256, 256)
HEADS = (8, 8, 256, 64)
LONG = (2, 8, 1024, 32)
SMALL = (64, 32)


class OfScaled(nn.Module):
    """A function of an input times a trained weight, so that a gradient reaches the input of the function."""

    def __init__(self, of: Callable[..., Tensor], *extra: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.of = of
        for number, tensor in enumerate(extra):
            self.register_buffer(f"extra{number}", tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's value."""
        return self.of(x * self.scale, *self.buffers(recurse=False))


class Loop(nn.Module):
    """A cell of a recurrent network, called once for each entry of a sequence."""

    def __init__(self, cell: nn.LSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        """Return the states, shape (length, batch, width)."""
        h = c = x.new_zeros(x.shape[1], self.cell.hidden_size)
        states = []
        for entry in x.unbind():
            h, c = self.cell(entry, (h, c))
            states.append(h)
        return torch.stack(states)


def first(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the first result of a layer that returns several."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            return self.layer(x)[0]

    return First()


def indices(*shape: int, below: int) -> Tensor:
    """Return random indices."""
    return torch.randint(below, shape)


def causal(length: int) -> Tensor:
    """Return the mask of what comes later."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def attention(mask: Tensor | None = None, **how: Any) -> Callable[..., Tensor]:
    """Return attention of an input to itself, shape (batch, heads, length, width)."""
    return lambda x: F.scaled_dot_product_attention(x, x * 0.5, x * 2, mask, **how)


def by_hand(x: Tensor) -> Tensor:
    """Return causal attention, written out as many models do."""
    scores = (x @ (x * 0.5).transpose(-1, -2) / math.sqrt(x.shape[-1])).masked_fill(
        causal(x.shape[-2]), float("-inf")
    )
    return scores.softmax(-1) @ x


def rms(x: Tensor) -> Tensor:
    """Return an RMS normalisation, written out as Llama's."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention of an input to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(256, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is attended to."""
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


def mlp() -> nn.Module:
    """Return 16 tiny layers, whose time is what a step costs besides arithmetic."""
    return nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(32, 32), nn.Tanh())])


_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "softplus": F.softplus,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 1),
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "sin": torch.sin,
    "erf": torch.erf,
    "abs": torch.abs,
    "x**2": lambda x: x**2,
    "x**3": lambda x: x**3,
    "clamp": lambda x: x.clamp(-1, 1),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.5),
    "dropout": lambda x: F.dropout(x, 0.1, training=True),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(1),
    "max": lambda x: x.max(-1).values,
    "amax": lambda x: x.amax(-1),
    "var": lambda x: x.var(-1),
    "norm": lambda x: x.norm(dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cumsum": lambda x: x.cumsum(1),
    "topk": lambda x: x.topk(16).values,
    "sort": lambda x: x.sort(-1).values,
    "rms norm by hand": rms,
    "transpose": lambda x: x.transpose(1, 2).contiguous(),
    "slice": lambda x: x[:, :-1],
    "split": lambda x: torch.cat([part * 2 for part in x.split(256, -1)], 1),
    "cat": lambda x: torch.cat([x, x], -1),
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "expand": lambda x: x[:, :1].expand(-1, 256, -1) + 1,
    "glu": F.glu,
    "fft": lambda x: torch.fft.rfft(x).abs(),
}
"""By name: functions of an input of shape `WIDE`."""


def layers() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:  # noqa: PLR0915 - a list
    """Return, by name, what makes each module and the shape of its input."""
    made: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        name: (lambda of=of: OfScaled(of), WIDE)
        for name, of in _ELEMENTWISE.items()  # type: ignore[misc]
    }

    def add(
        name: str, of: Callable[[], Callable[..., Tensor]], shape: tuple[int, ...], *extra: Tensor
    ) -> None:
        made[name] = (lambda: OfScaled(of(), *extra), shape)

    def function(name: str, of: Callable[..., Tensor], shape: tuple[int, ...], *extra: Tensor) -> None:
        add(name, lambda: of, shape, *extra)

    add("linear", lambda: nn.Linear(768, 768), WIDE)
    add("mlp, gelu", lambda: nn.Sequential(nn.Linear(768, 1024), nn.GELU(), nn.Linear(1024, 768)), WIDE)
    made["tiny mlp, 16 layers"] = (mlp, SMALL)
    add("layer norm", lambda: nn.LayerNorm(768), WIDE)
    add("rms norm", lambda: nn.RMSNorm(768), WIDE)
    add("lstm", lambda: first(nn.LSTM(256, 256)), (32, 16, 256))
    add(
        "lstm, 2 layers, both directions",
        lambda: first(nn.LSTM(128, 128, 2, bidirectional=True)),
        (32, 16, 128),
    )
    add("gru", lambda: first(nn.GRU(256, 256)), (32, 16, 256))
    add("rnn", lambda: first(nn.RNN(256, 256)), (32, 16, 256))
    add("lstm cell, loop of 32", lambda: Loop(nn.LSTMCell(256, 256)), (32, 16, 256))
    add("attention block", SelfAttention, (8, 128, 256))
    add(
        "encoder layer",
        lambda: nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, dropout=0.1),
        (8, 256, 256),
    )
    function("attention", attention(), HEADS)
    function("attention, causal", attention(is_causal=True), HEADS)
    function("attention, mask", lambda x, mask: attention(mask)(x), HEADS, ~causal(256))
    function("attention by hand", by_hand, HEADS)
    function("attention, causal, 1024 positions", attention(is_causal=True), LONG)
    function("attention by hand, 1024 positions", by_hand, LONG)
    function("matmul of batches", lambda x: x @ x.transpose(-1, -2), HEADS)
    function("einsum", lambda x: torch.einsum("bhid,bhjd->bhij", x, x), HEADS)
    function("softmax of scores", lambda x: x.softmax(-1), SCORES)
    function("tril", lambda x: (x @ x.transpose(-1, -2)).tril(), HEADS)
    add("batch norm", lambda: nn.BatchNorm2d(32), IMAGE)
    add("group norm", lambda: nn.GroupNorm(8, 32), IMAGE)
    add("instance norm", lambda: nn.InstanceNorm2d(32, affine=True), IMAGE)
    add("conv 3x3", lambda: nn.Conv2d(32, 64, 3, padding=1), IMAGE)
    add("conv 3x3, stride 2", lambda: nn.Conv2d(32, 64, 3, stride=2, padding=1), IMAGE)
    add("conv 1x1", lambda: nn.Conv2d(32, 64, 1), IMAGE)
    add("conv, depthwise", lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), IMAGE)
    add("conv, depthwise, wide", lambda: nn.Conv2d(32, 32, 7, padding=3, groups=32), IMAGE)
    add("conv, groups", lambda: nn.Conv2d(32, 64, 3, padding=1, groups=4), IMAGE)
    add("conv 1d", lambda: nn.Conv1d(256, 256, 3, padding=1), (8, 256, 256))
    add("conv 3d", lambda: nn.Conv3d(8, 16, 3, padding=1), (2, 8, 16, 28, 28))
    add("conv, transposed", lambda: nn.ConvTranspose2d(32, 32, 2, stride=2), IMAGE)
    add("max pool", lambda: nn.MaxPool2d(2), IMAGE)
    add("average pool", lambda: nn.AvgPool2d(2), IMAGE)
    add("adaptive average pool", lambda: nn.AdaptiveAvgPool2d(7), IMAGE)
    add("pixel shuffle", lambda: nn.PixelShuffle(2), IMAGE)
    add("bilinear", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE)
    add("nearest", lambda: nn.Upsample(scale_factor=2), IMAGE)
    add("unfold", lambda: nn.Unfold(3, padding=1), (4, 16, 56, 56))
    function(
        "grid_sample",
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        IMAGE,
        torch.rand(8, 56, 56, 2) * 2 - 1,
    )
    function("rows x[i]", lambda x, i: x[i], (4096, 512), indices(4096, below=4096))
    function("index_select", lambda x, i: x.index_select(1, i), WIDE, indices(256, below=256))
    function("gather", lambda x, i: x.gather(1, i), WIDE, indices(8, 64, 768, below=256))
    function(
        "scatter_add",
        lambda x, i: torch.zeros_like(x).scatter_add(1, i, x),
        WIDE,
        indices(8, 256, 768, below=256),
    )
    function("index_add", lambda x, i: torch.zeros_like(x).index_add(1, i, x), WIDE, indices(256, below=256))
    made["embedding"] = (Tokens, (16, 256))
    function("cross entropy, 100", F.cross_entropy, (4096, 100), indices(4096, below=100))
    function("cross entropy, 30,000", F.cross_entropy, (256, 30000), indices(256, below=30000))
    function("mse", F.mse_loss, WIDE, torch.rand(WIDE))
    function("smooth l1", F.smooth_l1_loss, WIDE, torch.rand(WIDE))
    function("bce with logits", F.binary_cross_entropy_with_logits, WIDE, torch.rand(WIDE))
    function(
        "kl div", lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"), WIDE, torch.rand(WIDE)
    )
    return made


class Tokens(nn.Module):
    """An embedding whose input holds the indices as numbers with a fraction, as every input here does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8192, 512)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows."""
        rows: Tensor = self.embedding((x.abs() * 2000).long().clamp(max=8191))
        return rows
