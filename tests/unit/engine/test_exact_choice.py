"""On the CPU, sums, means, losses and convolutions of a training graph have every digit that PyTorch gives them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortlab

ROWS, WIDTH = 4096, 8


class Applied(nn.Module):
    """A function of the input times a parameter per channel; the input needs a gradient, too."""

    def __init__(self, function, *shape) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


class Added(nn.Module):
    """The input and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def loss_of(x, **options):
    target = torch.arange(x.shape[0]) % 4
    return F.cross_entropy(x, torch.where(target == 3, -100, target), **options)


PIXELS = (2, 6, 9, 9)
CASES = {
    "bias of many rows": (lambda: Added(WIDTH), (ROWS, WIDTH)),
    "linear layer": (lambda: nn.Linear(WIDTH, 3), (16, WIDTH)),
    "linear layer of many features behind a batch normalisation": (
        lambda: nn.Sequential(nn.BatchNorm1d(1280), nn.Linear(1280, 2)),
        (2, 1280),
    ),
    "convolution": (lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1), PIXELS),
    "convolution without bias": (lambda: nn.Conv2d(6, 8, 3, dilation=2, bias=False), PIXELS),
    "one dimension": (lambda: nn.Conv1d(6, 8, 3, padding=1), (2, 6, 40)),
    "three dimensions": (lambda: nn.Conv3d(2, 4, 2), (2, 2, 5, 5, 5)),
    "mean of the last two axes": (lambda: Applied(lambda x: x.mean((2, 3)), 6, 1, 1), PIXELS),
    "mean of all": (lambda: Applied(torch.mean, 6, 1, 1), PIXELS),
    "sum, axis kept": (lambda: Applied(lambda x: x.sum(1, keepdim=True), 6, 1, 1), PIXELS),
    "global pooling": (lambda: Applied(lambda x: F.adaptive_avg_pool2d(x, 1), 6, 1, 1), PIXELS),
    "pooling to a size": (lambda: Applied(lambda x: F.adaptive_avg_pool2d(x, 3), 6, 1, 1), PIXELS),
    "tanh": (lambda: Applied(torch.tanh, WIDTH), (16, WIDTH)),
    "sigmoid": (lambda: Applied(torch.sigmoid, WIDTH), (16, WIDTH)),
    "layer normalisation of few": (lambda: nn.LayerNorm(4), (16, 4)),
    "mean of losses": (lambda: Applied(loss_of, WIDTH), (16, WIDTH)),
    "sum of losses": (lambda: Applied(lambda x: loss_of(x, reduction="sum"), WIDTH), (16, WIDTH)),
    "weighted losses": (
        lambda: Applied(lambda x: loss_of(x, weight=torch.linspace(0.5, 2, WIDTH)), WIDTH),
        (16, WIDTH),
    ),
    "loss of pixels": (
        lambda: Applied(lambda x: F.cross_entropy(x, (x[:, 0] > 0).long()), 6, 1, 1),
        PIXELS,
    ),
}

PRODUCTS = {"linear layer": 8, "linear layer of many features behind a batch normalisation": 8}
"""Roundings that a product may be apart: on some processors (AMD's among them) the order in which its terms are added
depends on how the matrices lie in memory, and PyTorch asks for it another way in a graph than in a layer."""


def trained(module, x, grad=None):
    """Return the output and the gradients of input and parameters, by name."""
    x = x.clone().requires_grad_()
    output = module(x)
    (output.sum() if grad is None else (output * grad).sum()).backward()
    return {"output": output.detach(), "input": x.grad} | {
        name: one.grad for name, one in module.named_parameters()
    }


def trained_on_ort(module, x, grad):
    """Return what `trained` does, computed by ONNX Runtime."""
    lab = ortlab.wrap(module)
    try:
        actual = trained(module, x, grad)
        assert lab.status.executed_by == "ort"
    finally:
        lab.unwrap()
    return actual


@pytest.mark.parametrize("name", CASES)
def test_every_digit_is_pytorchs(name):
    build, shape = CASES[name]
    torch.manual_seed(0)
    module, x = build().train(), torch.randn(shape)
    expected_module = copy.deepcopy(module)
    grad = torch.randn_like(expected_module(x).detach())
    expected = trained(expected_module, x, grad)
    actual = trained_on_ort(module, x, grad)
    roundings = PRODUCTS.get(name, 0)
    for key, value in expected.items():
        apart = (actual[key] - value).abs().max().item()
        assert apart <= roundings * torch.finfo(torch.float32).eps * value.abs().max().item(), key


class Pooled(nn.Module):
    """The mean over all places, or a pooling, and a layer normalisation, as in Hiera and ConvNeXt."""

    def __init__(self, pool) -> None:
        super().__init__()
        self.pool = pool
        self.norm = nn.LayerNorm(384)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.pool(x.transpose(1, 2)))


HEADS = {
    "mean, normalised": (lambda: Pooled(lambda x: x.mean(-1)), (8, 49, 384)),
    "pooling, normalised": (lambda: Pooled(lambda x: F.adaptive_avg_pool1d(x, 1).flatten(1)), (8, 49, 384)),
    "head of many features": (lambda: nn.Linear(2048, 2), (32, 2048)),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_leads_to_the_logits_is_as_near_to_float64_as_pytorch(name):
    build, shape = HEADS[name]
    torch.manual_seed(0)
    module, x = build().train(), torch.randn(shape) + 2
    grad = torch.randn_like(module(x).detach())
    exact = trained(copy.deepcopy(module).double(), x.double(), grad.double())
    eager = trained(copy.deepcopy(module), x, grad)
    actual = trained_on_ort(module, x, grad)
    for key, value in exact.items():
        ort, own = ((side[key] - value).norm().item() for side in (actual, eager))
        assert ort <= 1.5 * own + 1e-7 * value.norm().item(), key


class Network(nn.Module):
    """Convolutions with batch normalisations of few values behind them, which enlarge each difference."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), labels)


def test_a_small_batch_behind_batch_normalisation_trains_like_pytorch():
    torch.manual_seed(0)
    module = Network().train()
    expected = copy.deepcopy(module)
    batch = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2, momentum=0.9) for one in (module, expected)]
    lab = ortlab.wrap(module)
    try:
        for _ in range(4):
            for one, optimizer in zip((module, expected), optimizers, strict=True):
                optimizer.zero_grad()
                one(*batch).backward()
                optimizer.step()
    finally:
        lab.unwrap()
    for (name, one), two in zip(expected.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6, msg=name)


def test_gradients_that_nobody_asks_for_are_not_computed():
    """Of the first convolution's three gradients, that of the image is left out."""
    module = nn.Conv2d(3, 4, 3).train()
    lab = ortlab.wrap(module)
    try:
        module(torch.randn(2, 3, 8, 8)).sum().backward()
        graph = lab.graph("gradient").model.graph
    finally:
        lab.unwrap()
    (node,) = [
        node
        for node in graph.node
        if any(attribute.s == b"ortlab::convolution_backward" for attribute in node.attribute)
    ]
    assert len(node.output) == 2


def test_the_switch_leaves_all_of_it_to_onnx_runtime():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh()).train()
    lab = ortlab.wrap(module, aten_backward=False)
    try:
        module(torch.randn(2, 3, 8, 8)).sum().backward()
        types = {node.op_type for node in lab.graph("gradient").model.graph.node}
    finally:
        lab.unwrap()
    assert {"Conv", "ConvGrad", "Tanh"} <= types
