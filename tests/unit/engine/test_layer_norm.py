"""Layer normalisations are PyTorch's, whatever their mean, where models are trained and where not; plans find them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engine.passes.graph_edits import aten_operator

pytestmark = pytest.mark.usefixtures("ortmodule")


class Net(nn.Module):
    """Two layers with a normalisation of what is shifted far away from zero."""

    def __init__(self, shape, shift, **more):
        super().__init__()
        width = torch.Size(shape).numel()
        self.shape = shape
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(shape, **more) for _ in range(2))
        with torch.no_grad():
            for layer in self.layers:
                layer.bias += shift

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(layer(x).unflatten(-1, self.shape)).flatten(-len(self.shape))
        return x


def made(shape=(64,), shift=0.0, **more):
    torch.manual_seed(1)
    return Net(shape, shift, **more), torch.randn(8, 5, torch.Size(shape).numel())


def step(model, x):
    """Return what a model computes of a batch, and its gradients."""
    model.zero_grad(set_to_none=True)
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach(), *(one.grad for one in model.parameters())]


def farthest(found, exact):
    """Return the largest difference from exact numbers, by their size."""
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True))


def calls(lab, mode="training"):
    """Return the operators of the graph that is executed."""
    return [
        aten_operator(node) or node.op_type for node in lab.graph("execution", mode=mode).model.graph.node
    ]


SHAPES = {
    "four numbers": ((4,), {}),
    "many numbers": ((64,), {}),
    "two dimensions": ((4, 16), {}),
    "no bias": ((64,), {"bias": False}),
    "no weight": ((64,), {"elementwise_affine": False}),
    "another epsilon": ((64,), {"eps": 1e-2}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_mean_far_larger_than_the_deviation_loses_no_more_than_with_pytorch(case):
    shape, more = SHAPES[case]
    model, x = made(shape, 3000.0, **more)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    expected = step(exact, x.double())
    lab = ortlab.wrap(model)
    assert farthest(step(model, x), expected) < 2 * farthest(step(eager, x), expected) < 0.1
    with torch.no_grad():
        model.eval()
        assert farthest([model(x)], expected[:1]) < 2 * farthest([eager.eval()(x)], expected[:1])
    for mode in ("training", "inference"):
        assert calls(lab, mode).count("ortlab::layer_norm") == 2


def test_what_it_computes_has_pytorchs_bits():
    norm = nn.LayerNorm(48)
    x = torch.randn(6, 7, 48)
    expected = norm(x)
    lab = ortlab.wrap(norm)
    assert torch.equal(norm(x), expected)
    assert "ortlab::layer_norm" in calls(lab)


def test_plans_find_it_and_change_no_bit():
    model, x = made()
    lab = ortlab.wrap(model)
    expected, kept = step(model, x), lab.activations().total_bytes
    (row,) = [row for row in lab.plan().rows if row.cluster == "LayerNormalization+"]
    for changes in ({"memory_plan": ("LayerNormalization+:1:-1",)}, {"memory_plan": (), "memory_level": 1}):
        lab.set(**changes)
        assert all(map(torch.equal, step(model, x), expected)), changes
        (applied,) = [one for one in lab.plan().rows if one.cluster == row.cluster]
        assert applied.applied > 0, changes
        again = [node for node in lab.graph("execution").model.graph.node if node.name.endswith("_recompute")]
        assert "ortlab::layer_norm" in map(aten_operator, again), changes
        assert lab.activations().total_bytes < kept, changes


def test_the_switch_leaves_it_to_onnxruntime_whose_result_is_nan():
    model, x = made(shift=3000.0)
    lab = ortlab.wrap(model, aten_backward=False)
    assert step(model, x)[0].isnan().any()
    assert calls(lab).count("LayerNormalization") == 2


def test_other_types_are_onnxruntimes():
    model, x = made()
    lab = ortlab.wrap(model.double())
    step(model, x.double())
    assert "ortlab::layer_norm" not in calls(lab)
