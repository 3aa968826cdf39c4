"""Where has a quicker kernel in the place of ONNX Runtime's, to the bit, and its plans still find their own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ortlab
from ortlab.engine.operators import compiled_calls, quick_choice, where
from ortlab.engine.passes.graph_edits import aten_operator

pytestmark = pytest.mark.usefixtures("ortmodule")


def broadcasts(count):
    """Return shapes of a condition and two tensors that broadcast, of all kinds."""
    draw = np.random.default_rng(5)
    for _ in range(count):
        whole = draw.choice([1, 2, 3, 5, 17, 300], size=draw.integers(0, 6)).tolist()
        yield tuple(
            tuple(size if draw.random() < 0.6 else 1 for size in whole[draw.integers(0, len(whole) + 1) :])
            for _ in range(3)
        )


SHAPES = [
    *[
        ((8, 12, 128, 128),) * 3,
        ((8, 1, 128, 128), (), (8, 12, 128, 128)),
        ((1, 1, 128, 128), (8, 12, 128, 128), ()),
    ],
    *[((70_000,), (1,), (70_000,)), ((9000, 1), (9000, 8), (8,)), ((3, 1), (1, 70_001), (3, 70_001))],
    *[((0, 4), (4,), ()), ((), (), ()), ((2, 0), (2, 1), (1,))],
    *broadcasts(150),
]


def test_a_choice_is_pytorchs_however_it_broadcasts(ortmodule):
    assert compiled_calls.lacking() == ""
    make = torch.Generator().manual_seed(3)
    for shapes in SHAPES:
        condition = (torch.rand(shapes[0], generator=make) < 0.5).to(torch.uint8) * 3
        a, b = (torch.randn(shape, generator=make) for shape in shapes[1:])
        if a.numel():
            a.view(-1)[:3] = torch.tensor([-0.0, torch.nan, torch.inf])[: a.numel()]
        expected = torch.where(condition.bool(), a, b)
        made = where.where(condition, a, b)
        assert made.shape == expected.shape, shapes
        assert torch.equal(made.view(torch.int32), expected.view(torch.int32)), shapes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_pytorchs_own(dtype):
    condition, a = torch.tensor([1, 0, 1], dtype=torch.uint8), torch.arange(3).to(dtype)
    assert torch.equal(where.where(condition, a, -a), torch.tensor([0, -1, 2]).to(dtype))


def test_without_the_library_pytorch_chooses(monkeypatch):
    monkeypatch.setattr(compiled_calls._Connected, "lacking", "no compiler")
    chosen = where.where(torch.tensor([1, 0], dtype=torch.uint8), torch.ones(2), torch.zeros(()))
    assert chosen.tolist() == [1, 0]


class Net(nn.Module):
    """Two layers with a choice between two tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.inner = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        x = self.first(x)
        for number, norm in enumerate(self.norms):
            y = norm(x)
            one, other, third = (layer(y) for layer in self.inner[3 * number : 3 * number + 3])
            x = x + torch.where(one > 0, one * F.gelu(other), third)
        return self.last(x)


def train(model, x):
    model.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def operators(lab):
    return [aten_operator(node) or node.op_type for node in lab.graph("execution").model.graph.node]


@pytest.fixture
def net():
    torch.manual_seed(4)
    return Net()


X = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(6))


def test_choices_are_the_librarys(net):
    eager = copy.deepcopy(net)
    lab = ortlab.wrap(net)
    for one, other in zip(train(net, X), train(eager, X), strict=True):
        torch.testing.assert_close(one, other)
    used = operators(lab)
    border = used.index("YieldOp")
    assert used[:border].count("ortlab::where") == 2
    assert "Where" not in used
    lab.set(aten_backward=False)
    train(net, X)
    used = operators(lab)
    assert "Where" in used
    assert not any(operator.startswith("ortlab::") for operator in used)


def test_with_onnxruntimes_the_numbers_are_the_same_bits(net, monkeypatch):
    twin = copy.deepcopy(net)
    ortlab.wrap(net)
    mine = train(net, X)
    monkeypatch.delitem(quick_choice.BEHIND_PLANS, "Where")
    lab = ortlab.wrap(twin)
    assert all(map(torch.equal, mine, train(twin, X)))
    assert "Where" in operators(lab)


def test_a_plan_that_recomputes_a_choice_changes_no_bit(net):
    lab = ortlab.wrap(net)
    expected, kept = train(net, X), lab.activations().total_bytes
    (row,) = [row for row in lab.plan().rows if "Where" in row.cluster]
    lab.set(memory_plan=(f"{row.cluster}:1:-1",))
    assert all(map(torch.equal, train(net, X), expected))
    (applied,) = [one for one in lab.plan().rows if one.cluster == row.cluster]
    assert applied.applied == row.frequency == 2
    assert lab.activations().total_bytes < kept
    names = [
        node.name
        for node in lab.graph("execution").model.graph.node
        if aten_operator(node) == "ortlab::where"
    ]
    assert sum(name.endswith("_recompute") for name in names) == 2


def test_other_plans_leave_choices_to_the_library(net):
    lab = ortlab.wrap(net)
    expected = train(net, X)
    lab.set(memory_plan=("Gelu+:1:-1",))
    assert all(map(torch.equal, train(net, X), expected))
    assert "Where" not in operators(lab)
    assert sum(one.applied or 0 for one in lab.plan().rows) == 2
