"""Modules on which onnxruntime 1.19.2 goes wrong, and how far a training run is from PyTorch's.

Run as a script it measures 1.19.2 as it is, each case in a process of its own, since some end the process: all, or
those named behind it. The tests import the same cases and measure it repaired.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 3

_FILL, _BYTE = -6, 165  # M_PERTURB of glibc's malloc.h, and a byte that makes numbers of 1e16


class Wrapped(nn.Module):
    """A function of a linear layer's output, of a second layer and of the input."""

    def __init__(self, function, features=8):
        super().__init__()
        self.first = nn.Linear(features, features)
        self.second = nn.Linear(features, features)
        self.function = function

    def forward(self, x):
        return self.function(self.first(x), self.second, x)


class PositionalConvolution(nn.Module):
    """The grouped convolution of wav2vec2 between linear layers, whose gradients it damages in 1.19.2."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.convolution = nn.Conv1d(64, 64, 16, padding=8, groups=2)
        self.after = nn.Linear(64, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        hidden = self.before(x)
        position = F.gelu(self.convolution(hidden.transpose(1, 2))[:, :, :-1]).transpose(1, 2)
        return self.head(torch.tanh(self.after(hidden + position)))


class FrozenBatchNorm(nn.Module):
    """A batch normalisation that stays in eval mode while the rest trains, as in fine-tuning."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(6, 6, 1)
        self.norm = nn.BatchNorm2d(6)
        self.norm.running_mean.normal_()

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.norm(self.convolution(x))


class Deciding(nn.Module):
    """Its forward goes on as `decide` says, by the hidden layer and the input."""

    def __init__(self, decide):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.decide = decide

    def forward(self, x):
        return self.decide(self.layer(x), x)


class BroadcastWhere(nn.Module):
    def __init__(self, yes, no, condition):
        super().__init__()
        self.yes = nn.Parameter(torch.randn(yes))
        self.no = nn.Parameter(torch.randn(no))
        self.register_buffer("condition", torch.rand(condition) > 0.5)
        self.scale = nn.Linear(8, 1)

    def forward(self, x):
        return torch.where(self.condition, torch.tanh(self.yes), torch.sin(self.no)) * self.scale(x).mean()


class ConstantKernel(nn.Module):
    """A depthwise blur, twice: the kernel is a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kernel", torch.randn(6, 1, 3, 3))
        self.mix = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        once = F.conv2d(self.mix(x), self.kernel, groups=6)
        return F.conv2d(once, self.kernel, groups=6)


def without_gradient(hidden, second, _):
    with torch.no_grad():
        scale = second(hidden).abs() + 1
    return hidden / scale


def batch(*shape):
    return (torch.randn(shape),)


POSITIONS = torch.tensor([0, 0, 1, 2])


class SqueezeAndExcitation(nn.Module):
    """Channels weighed by what a pooling sees of them: dimensions that are 1 meet dimensions that are not."""

    def __init__(self):
        super().__init__()
        self.before = nn.Conv2d(6, 6, 1)
        self.weigh = nn.Sequential(nn.Conv2d(6, 2, 1), nn.ReLU(), nn.Conv2d(2, 6, 1), nn.Sigmoid())

    def forward(self, x):
        hidden = self.before(x)
        return hidden * self.weigh(F.adaptive_avg_pool2d(hidden, 1))


# Wrong numbers without a word: forward, gradients or buffers differ.
SILENT = {
    "squeeze and excitation": lambda: (SqueezeAndExcitation(), batch(4, 6, 8, 8)),
    "grouped convolution": lambda: (PositionalConvolution(), batch(2, 39, 64)),
    "convolution, padding same": lambda: (nn.Conv2d(6, 6, 2, padding="same"), batch(4, 6, 8, 8)),
    "batch norm": lambda: (nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 3, 1)), batch(4, 6, 8, 8)),
    "batch norm, cumulative": lambda: (
        nn.Sequential(nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)),
        batch(7, 8),
    ),
    "batch norm, frozen": lambda: (FrozenBatchNorm().train(), batch(4, 6, 8, 8)),
    "where, branch narrower": lambda: (BroadcastWhere((4,), (3, 4), (3, 4)), batch(5, 8)),
    "where, condition spans": lambda: (BroadcastWhere((1, 4), (1, 4), (3, 1)), batch(5, 8)),
    "where, neither spans": lambda: (BroadcastWhere((3, 1), (4,), (4,)), batch(5, 8)),
    "where, all scalars": lambda: (BroadcastWhere((1,), (1,), (2, 3, 4)), batch(5, 8)),
    "detach": lambda: (Wrapped(lambda h, second, _: h * second(h).detach()), batch(5, 8)),
    "data": lambda: (Wrapped(lambda h, second, _: h * second(h).data), batch(5, 8)),
    "no_grad": lambda: (Wrapped(without_gradient), batch(5, 8)),
    "slices, one without gradient": lambda: (
        Wrapped(lambda h, second, _: second(h)[:, :4] * second(h)[:, 4:].detach()),
        batch(5, 8),
    ),
    "index_add": lambda: (Wrapped(lambda h, _, x: x.index_add(0, POSITIONS, h)), batch(4, 8)),
    "scatter_add": lambda: (
        Wrapped(lambda h, _, x: h.scatter_add(0, (x > 0).long(), h.exp())),
        batch(4, 8),
    ),
}

# An error or the end of the process.
LOUD = {
    "transposed convolution": lambda: (nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2), batch(2, 6, 5, 5)),
    "batch norm without statistics": lambda: (
        nn.Sequential(nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6, track_running_stats=False)),
        batch(4, 6, 8, 8),
    ),
    "instance norm": lambda: (nn.Sequential(nn.InstanceNorm2d(6), nn.Conv2d(6, 3, 1)), batch(4, 6, 8, 8)),
    "group norm first": lambda: (nn.GroupNorm(2, 6), batch(4, 6, 8, 8)),
    "layer norm without bias": lambda: (
        nn.Sequential(nn.LayerNorm(8, bias=False), nn.Linear(8, 8), nn.LayerNorm(8, bias=False)),
        batch(5, 8),
    ),
    "max_pool1d": lambda: (Wrapped(lambda h, *_: F.max_pool1d(h, 2)), batch(3, 4, 8)),
    "avg_pool1d": lambda: (Wrapped(lambda h, *_: F.avg_pool1d(h, 3, padding=1)), batch(3, 4, 8)),
    "max_pool3d": lambda: (Wrapped(lambda h, *_: F.max_pool3d(h, 2)), batch(1, 2, 4, 4, 8)),
    "split, partly used": lambda: (Wrapped(lambda h, *_: h.split(4, -1)[1]), batch(3, 4, 8)),
    "last axis of a linear layer": lambda: (Wrapped(lambda h, *_: h[..., 2:]), batch(3, 4, 8)),
    "matrix times vector": lambda: (Wrapped(lambda h, second, _: h @ second.bias), batch(3, 4, 8)),
    "norm": lambda: (Wrapped(lambda h, *_: h.norm(dim=-1)), batch(5, 8)),
    "logsumexp": lambda: (Wrapped(lambda h, *_: h.logsumexp(-1)), batch(5, 8)),
    "softplus": lambda: (Wrapped(lambda h, *_: F.softplus(h, beta=2, threshold=1)), batch(5, 8)),
    "diff": lambda: (Wrapped(lambda h, *_: torch.diff(h, dim=-1, prepend=h[:, :1])), batch(5, 8)),
    "copy": lambda: (
        Wrapped(lambda h, *_: torch.zeros(5, 8).copy_(h[:1]) * h),
        batch(5, 8),
    ),
    "unflatten": lambda: (Wrapped(lambda h, *_: h.unflatten(-1, (2, -1)).sum(-2)), batch(3, 4, 8)),
    "transformer encoder": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
        ),
        batch(2, 5, 8),
    ),
}


def largest_difference(ortmodule, build):
    """Train a module with ORT and a copy of it with PyTorch, and return the largest relative difference.

    Outputs, gradients, parameters and buffers are compared, each with the largest entry of PyTorch's, or with a
    hundredth of one where that is smaller.
    """
    torch.manual_seed(3)
    module, inputs = build()
    reference = copy.deepcopy(module)
    wrapped = ortmodule.ORTModule(module)
    worst = 0.0
    for _ in range(STEPS):
        expected, actual = reference(*inputs), wrapped(*inputs)
        upstream = torch.randn_like(expected)
        expected.backward(upstream)
        actual.backward(upstream)
        pairs = [(expected, actual)]
        for (_, left), (_, right) in zip(
            reference.named_parameters(), module.named_parameters(), strict=True
        ):
            if (left.grad is None) != (right.grad is None):
                return float("inf")
            pairs += [(left, right)] + ([] if left.grad is None else [(left.grad, right.grad)])
        pairs += list(zip(reference.buffers(), module.buffers(), strict=True))
        for left, right in pairs:
            difference = (left.double() - right.double()).abs().max().item()
            worst = max(worst, difference / max(left.double().abs().max().item(), 1e-2))
        for model in (reference, module):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            optimizer.step()
            optimizer.zero_grad()
    return worst


def unrepaired():
    """Import ORTModule with what it needs to start beside this torch, and nothing more."""
    from ortlab.engine import exporter, extensions

    exporter.prepare_torch()
    from onnxruntime.training import ortmodule

    exporter.adapt_ort()
    extensions.install()
    return ortmodule


def fill_memory():
    """Let memory that nobody has written hold large numbers.

    1.19.2 reads the gradients that it does not reduce past their end: TanhGrad is given twelve gradients of Where and
    three values. What lies there can be what would be right.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_FILL, _BYTE)


def main():
    warnings.simplefilter("ignore")
    fill_memory()
    ortmodule = unrepaired()
    cases = {**SILENT, **LOUD}
    for name, build in ((name, cases[name]) for name in sys.argv[1:] or cases):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                outcome = largest_difference(ortmodule, build)
            except Exception as error:  # noqa: BLE001 - whatever ORT raises is the outcome
                outcome = type(error).__name__
            os.write(writer, json.dumps(outcome).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            outcome = pipe.read()
        os.waitpid(child, 0)
        print(json.dumps([name, json.loads(outcome) if outcome else "crash"]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
