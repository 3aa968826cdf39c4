"""The gradient of a weight that is used again and again is one product, PyTorch's but for the last digits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ortlab.engine.passes.graph_edits import aten_operator, attributes_of

pytestmark = pytest.mark.usefixtures("no_fallback")

USES = 12
WIDTH = 64


class Loop(nn.Module):
    """A cell in a loop; returns its last state."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for number in range(USES):
            state = self.cell(x[number], state)
        return state if isinstance(state, torch.Tensor) else state[0]


class Shared(nn.Module):
    """A layer that is used again and again behind another one, and whose weight may be used otherwise at the end."""

    def __init__(self, before=None, *, scales=False):
        super().__init__()
        self.before, self.layer, self.scales = before or nn.Identity(), nn.Linear(WIDTH, WIDTH), scales

    def forward(self, x):
        x = self.before(x)
        for _ in range(USES):
            x = torch.tanh(self.layer(x))
        return x * self.layer.weight.sum(0) if self.scales else x


def trained(eager, batches, wrap):
    """Train on PyTorch, and a copy on ONNX Runtime, compare gradients, and return the lab."""
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR")
    for x in batches:
        for one in (model, eager):
            one.zero_grad()
            one(x).square().sum().backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert lab.status.executed_by == "ort"
    return lab


def products(lab):
    """Return the nodes that multiply rows, as for the gradients of weights."""
    return [
        node
        for node in lab.graph("gradient").model.graph.node
        if aten_operator(node) == "ortlab::matmul_of_rows"
        or (node.op_type == "Gemm" and attributes_of(node).get("transA") == 1)
    ]


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("width", [WIDTH, 4 * WIDTH])
def test_a_cell_in_a_loop_has_one_product_for_each_weight(cell, width, wrap):
    torch.manual_seed(1)
    batches = [torch.randn(USES, rows, 32) for rows in (4, 4, 40)]
    assert len(products(trained(Loop(cell(32, width)), batches, wrap))) == 2


@pytest.mark.parametrize(("rows", "found"), [(4, 1), (12, 2), (20, USES)])
def test_no_more_rows_are_copied_than_a_few_gradients_have_entries(rows, found, wrap):
    torch.manual_seed(1)
    assert len(products(trained(Shared(), [torch.randn(rows, WIDTH)], wrap))) == found


def test_its_time_is_told_of_the_module(wrap):
    torch.manual_seed(1)
    model, x = Loop(nn.GRUCell(32, WIDTH)), torch.randn(USES, 4, 32)
    lab = wrap(model, log_level="ERROR")
    lab.step(lambda: model(x).sum().backward(), n=1, memory=False)
    told = {node.name: node.module for node in lab.profile(n=1, progress=False).nodes}
    assert [told[node.name] for node in products(lab)] == ["cell", "cell"]


def test_a_gradient_with_other_parts_is_added_to_them(wrap):
    torch.manual_seed(1)
    assert len(products(trained(Shared(scales=True), [torch.randn(4, WIDTH)], wrap))) == 1


def test_networks_that_normalise_batches_keep_pytorchs_digits(wrap):
    torch.manual_seed(1)
    assert len(products(trained(Shared(nn.BatchNorm1d(WIDTH)), [torch.randn(4, WIDTH)], wrap))) == USES
