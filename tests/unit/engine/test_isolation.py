"""What 1.19.2's optimizers move, join or read wrongly gives PyTorch's results and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortlab

pytestmark = pytest.mark.usefixtures("ortmodule")

IGNORED = torch.tensor([[1, -100, 2, 3, -100, -100, 0, 7], [-100] * 4 + [1, 2, 3, 4], [-100] * 8])


class Net(nn.Module):
    """As many places as features, so that a choice along the wrong axis has the right shape."""

    def __init__(self, body):
        super().__init__()
        self.linear, self.norm, self.embedding = nn.Linear(8, 8), nn.LayerNorm(8), nn.Embedding(11, 8)
        self.places, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 1))
        self.body = body

    def forward(self, x, words):
        return self.body(self, x, words)


def squared(one):
    return one * one.sin() + one


CHOICES_READ_TWICE = {
    "behind a transposition": lambda m, x, _: squared(m.linear(x).transpose(1, 2)[:, :, 0]),
    "the last of time first": lambda m, x, _: squared(m.norm(x).transpose(0, 1)[-1]),
    "of a mask, which broadcasts": lambda m, x, _: (
        squared((x > 0).float().transpose(1, 2)[:, 0]) * m.linear(x).sum(-1)
    ),
    "behind a product": lambda m, x, _: squared((x @ m.places)[..., 0]),
    "behind a sum that broadcasts": lambda m, x, _: squared((m.linear(x) + m.linear(x)[:, :1])[:, 0]),
    "places that are counted": lambda m, x, _: (
        m.linear(x)[(x[:, 0, 0] > 0).nonzero()[:, 0]].sum()
        + m.norm(x)[(x[:, 0, 0] > 0).nonzero()[:, 0]].sum()
    ),
}

OPERANDS_OF_LESS_DIMENSIONS = {
    "positions": lambda m, x, _: (m.linear(x) + m.places)[:, 0],
    "positions before": lambda m, x, _: (m.places + m.linear(x))[:, -1],
    "a divisor": lambda m, x, _: (m.linear(x) / (1 + m.places**2))[:, 0],
    "a sample": lambda m, x, _: (m.linear(x) + m.linear(x[0]))[:, 0],
    "a slice": lambda m, x, _: (m.linear(x) + m.places)[:, 1:2],
    "one place, kept": lambda m, x, _: (m.linear(x) + m.places)[:, torch.tensor([0])],
    "two places": lambda m, x, _: (m.linear(x) + m.places)[:, torch.tensor([2, 0])],
    "far behind": lambda m, x, _: m.linear(m.norm(F.gelu(m.linear(m.linear(x) + m.places))))[:, 0],
    "behind a transposition": lambda m, x, _: (m.places + m.linear(x)).transpose(1, 2)[:, :, 0],
    "behind heads": lambda m, x, _: (m.linear(x) + m.places).view(3, 8, 2, 4).transpose(1, 2)[:, :, 0],
    "the last axis": lambda m, x, _: F.gelu(m.linear(x) + m.scale)[..., 0],
    "a loss that leaves rows out": lambda m, x, _: F.cross_entropy(
        m.norm(m.linear(x) + m.places).flatten(0, 1), IGNORED.flatten()
    ),
}

PARTS_WITHOUT_GRADIENT = {
    "zeros on both sides": lambda m, _, words: torch.cat(
        [torch.zeros(3, 1, 8), m.embedding(words), torch.zeros(3, 1, 8)], 1
    ),
    "one tensor three times": lambda m, x, words: torch.cat([x, m.embedding(words), x, x], -1),
    "computed alike": lambda m, x, words: torch.stack([x.exp(), m.embedding(words), x.exp()], 2),
    "beside a result": lambda m, x, words: (
        torch.cat([x, m.embedding(words), x], 1),
        m.embedding(words).tanh(),
    ),
}

CASES = {
    f"{kind}: {name}": body
    for kind, bodies in (
        ("read twice", CHOICES_READ_TWICE),
        ("fewer dimensions", OPERANDS_OF_LESS_DIMENSIONS),
        ("no gradient", PARTS_WITHOUT_GRADIENT),
    )
    for name, body in bodies.items()
}


def trained(model, x, words):
    model.zero_grad()
    results = model(x, words)
    results = results if isinstance(results, tuple) else (results,)
    sum(one.sin().sum() for one in results).backward()
    return [one.detach() for one in results], [one.grad for one in model.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_pytorch(name):
    torch.manual_seed(0)
    model = Net(CASES[name])
    plain = copy.deepcopy(model)
    lab = ortlab.wrap(model)
    for _ in range(2):
        batch = torch.randn(3, 8, 8), torch.randint(0, 11, (3, 8))
        torch.testing.assert_close(trained(model, *batch), trained(plain, *batch), rtol=1e-4, atol=1e-5)
    assert lab.status.executed_by == "ort"


def test_a_graph_whose_gradient_cannot_be_built_behind_moved_choices_is_built_without_the_optimizer(wrap):
    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            products = x @ self.linear(x).transpose(1, 2)
            return F.gelu((products + products)[:, :, 0].mean(0)), x.permute(1, 2, 0)[:, 0]

    torch.manual_seed(0)
    model = Moved()
    plain = copy.deepcopy(model)
    lab = wrap(model)
    x = torch.randn(3, 5, 8)
    for one in (model, plain):
        one(x)[0].sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)
    assert lab.status.executed_by == "ort"
