"""The gradient of a factor that is broadcast is summed without its product where that is large."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ortlab.engine.operators import sums_of_products

LARGE = (8, 128, 64)
FUSED = "ortlab::sum_of_products"


class Scaled(nn.Module):
    """A function of an input times trained factors that are broadcast."""

    def __init__(self, function, *shapes, before=()):
        super().__init__()
        make = torch.Generator().manual_seed(2)
        self.factors = nn.ParameterList(torch.rand(shape, generator=make) + 0.5 for shape in shapes)
        self.function = function
        self.before = nn.Sequential(*before)

    def forward(self, x):
        x = self.before(x)
        for factor in self.factors:
            x = x * factor
        return self.function(x)


CASES = {
    "a number": Scaled(torch.tanh, ()),
    "a row": Scaled(torch.tanh, (64,)),
    "a column": Scaled(torch.tanh, (128, 1)),
    "a number for each sample": Scaled(torch.tanh, (8, 1, 1)),
    "a product of three": Scaled(torch.exp, ()),
    "one behind another": Scaled(torch.tanh, (64,), (128, 1)),
    "sums of rows": Scaled(lambda x: x.sum(-1).square(), (64,)),
}


def train(model, x):
    loss = model(x).square().sum()
    loss.backward()
    return loss


def nodes_of(model, x, wrap, **options):
    """Train on both engines, compare, and return the operators that ran."""
    eager = copy.deepcopy(model)
    lab = wrap(model, log_level="ERROR", **options)
    run = lab.step(lambda: train(model, x), n=1, memory=False)
    loss = train(eager, x)
    torch.testing.assert_close(torch.tensor(run.losses[0]), loss.detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-3)
    return [node.operator for node in lab.profile(n=1, progress=False).nodes]


@pytest.mark.parametrize("case", CASES)
def test_the_product_is_not_made(case, wrap):
    torch.manual_seed(1)
    model = copy.deepcopy(CASES[case])
    assert nodes_of(model, torch.randn(LARGE), wrap).count(FUSED) == len(model.factors)


def test_sizes_that_change_are_summed_as_well(wrap):
    torch.manual_seed(1)
    model = copy.deepcopy(CASES["a row"])
    eager = copy.deepcopy(model)
    wrap(model, log_level="ERROR")
    for rows in (8, 3, 1):
        for one in (model, eager):
            one.zero_grad()
            train(one, torch.linspace(-1, 1, rows * 128 * 64).reshape(rows, 128, 64))
        torch.testing.assert_close(model.factors[0].grad, eager.factors[0].grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (CASES["a row"], (4, 3, 64)),
        (Scaled(torch.tanh, (64, 1), before=[nn.BatchNorm1d(64)]), (8, 64, 128)),
    ],
    ids=["a small product", "normalised batches"],
)
def test_where_digits_count_pytorch_sums(model, shape, wrap):
    torch.manual_seed(1)
    used = nodes_of(copy.deepcopy(model), torch.randn(shape), wrap)
    assert FUSED not in used
    assert "ortlab::sum_over" in used


def test_a_product_that_others_read_is_made(wrap):
    torch.manual_seed(1)
    model = Scaled(lambda x: x.tanh(), (64,), before=[nn.Linear(64, 64)])
    # The gradient of a bias and of the layer's weight are of the same product as the row's.
    used = nodes_of(model, torch.randn(LARGE), wrap)
    assert used.count(FUSED) == 1


def test_the_switch_turns_it_off(wrap):
    torch.manual_seed(1)
    used = nodes_of(copy.deepcopy(CASES["a row"]), torch.randn(LARGE), wrap, aten_backward=False)
    assert FUSED not in used


def test_python_sums_where_there_is_no_library():
    factors = [torch.randn(3, 4, 5), torch.randn(4, 1), torch.randn(5)]
    product = factors[0] * factors[1] * factors[2]
    found = sums_of_products.sum_of_products([1, 0], [0, 2], factors)
    torch.testing.assert_close(found, product.sum((0, 2), keepdim=True))
    assert torch.equal(sums_of_products.sum_of_products([0, 1], None, factors), product)
