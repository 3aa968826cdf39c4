"""What is not a number, infinite, tiny or huge goes through an operator, forward and backward, as in PyTorch."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortlab

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning"),
    pytest.mark.filterwarnings("ignore:Exporting aten..index operator of advanced indexing:UserWarning"),
]

nan, inf = math.nan, math.inf
SMALLEST = 2.0**-126
"""Below it numbers are denormal."""

_SIZES = [
    *(0.0, 1e-45, 1e-40, 1e-38, 1e-20, 1e-7, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0, 88.0, 89.5, 100.0, 104.0),
    *(1e4, 1e10, 1.8e19, 1e30, 3e38, inf),
]
VALUES = torch.tensor([nan, *(sign * size for size in _SIZES for sign in (1, -1))])

OF_ONE = {
    "abs": torch.abs,
    "acos": torch.acos,
    "atan": torch.atan,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_max": lambda x: x.clamp_max(1.0),
    "clamp_min": lambda x: x.clamp_min(0.0),
    "cos": torch.cos,
    "cosh": torch.cosh,
    "elu": F.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "floor": lambda x: x.floor() + x,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "leaky_relu, negative slope": lambda x: F.leaky_relu(x, -0.2),
    "log": torch.log,
    "log1p": torch.log1p,
    "logit": torch.logit,
    "logsigmoid": F.logsigmoid,
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "mish": F.mish,
    "nan_to_num": torch.nan_to_num,
    "neg": torch.neg,
    "1 - x": lambda x: 1 - x,
    "1 / x": lambda x: 1 / x,
    "2 ** x": lambda x: 2**x,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "reciprocal": torch.reciprocal,
    "relu": F.relu,
    "relu6": F.relu6,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sign": lambda x: x.sign() * x,
    "silu": F.silu,
    "sin": torch.sin,
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "sqrt": torch.sqrt,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "x * x": lambda x: x * x,
    "x ** 0": lambda x: x**0,
    "x ** 0.5": lambda x: x**0.5,
    "x ** -0.5": lambda x: x**-0.5,
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
}
OF_TWO = {
    "add": torch.add,
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(
        a.sigmoid().nan_to_num(), b.detach().sigmoid().nan_to_num(), reduction="none"
    ),
    "binary_cross_entropy_with_logits": lambda a, b: F.binary_cross_entropy_with_logits(
        a, b, reduction="none"
    ),
    "clamp by a tensor": lambda a, b: a.clamp(min=b),
    "div": torch.div,
    "kl_div": lambda a, b: F.kl_div(a, b, reduction="none"),
    "logaddexp": torch.logaddexp,
    "max": torch.max,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mse_loss": lambda a, b: F.mse_loss(a, b, reduction="none"),
    "mul": torch.mul,
    "sub": torch.sub,
}
ROWS = {
    "nan": [nan, 1, 2, 3],
    "inf": [inf, 1, 2, 3],
    "-inf": [-inf, 1, 2, 3],
    "only -inf": [-inf, -inf, -inf, -inf],
    "both infinities": [inf, -inf, 0, 1],
    "zeros": [0, 0, 0, 0],
    "negative zeros": [-0.0, -0.0, -0.0, -0.0],
    "equal": [2, 2, 2, 2],
    "tiny": [1e-20, 2e-20, 3e-20, 1e-20],
    "denormal": [1e-40, 2e-40, 3e-40, 1e-40],
    "large": [1e30, 1e30, -1e30, 2e30],
    "huge": [3e38, 1e38, -3e38, 2e38],
    "far apart": [100, -100, 50, 3],
    "near each other": [1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3],
    "ties": [1, 2, 2, 1],
    "about the end of exp": [88, 89, 90, 1],
}
OF_ROWS = {
    "amax": lambda x: x.amax(-1),
    "argsort": lambda x: x.gather(-1, x.argsort(-1)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1, dim=-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(len(ROWS)) % 4, reduction="none"),
    "cumsum": lambda x: x.cumsum(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "mean": lambda x: x.mean(-1),
    "norm": lambda x: x.norm(dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(-1)),
    "rms norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: x.sort(-1)[0],
    "sort, descending": lambda x: x.sort(-1, descending=True)[0],
    "std": lambda x: x.std(-1),
    "sum": lambda x: x.sum(-1),
    "topk": lambda x: x.topk(2, -1)[0],
    "var": lambda x: x.var(-1),
    "vector_norm of order 3": lambda x: torch.linalg.vector_norm(x, ord=3, dim=-1),
}


class Exempt(NamedTuple):
    """Where an operator may differ: the inputs for which the result may, and those for which the gradient may."""

    result: object = None
    gradient: object = None
    atol: float = SMALLEST  # by which numbers may differ besides


def _is(*values):
    return lambda x: x in values


def _denormal(x):
    return 0 < x < SMALLEST


def _beyond(limit):
    return lambda x: abs(x) >= limit


EXEMPT = {
    "gelu": Exempt(_beyond(1e38), _beyond(1e38), atol=1e-6),
    "gelu, tanh": Exempt(None, _beyond(1e19), atol=1e-6),
    "log": Exempt(_denormal),
    "quick gelu": Exempt(None, _beyond(1e38), atol=1e-6),
    "relu": Exempt(None, math.isnan),
    "silu": Exempt(atol=1e-7),
    "x ** -0.5": Exempt(None, _is(-inf, 0.0)),
    # By row.
    "rms norm": Exempt(None, _is("huge")),
    "var": Exempt(None, _is("inf", "-inf", "both infinities", "large", "huge")),
}
"""This list may only shrink; `docs/parity.md` names each with its reason."""


class Applied(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self.function(*values)


def differs(found: torch.Tensor, wanted: torch.Tensor, atol: float) -> torch.Tensor:
    """Say for each entry whether one is nan or infinite and the other is not, or they are different numbers."""
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    close = (found.double() - wanted.double()).abs() <= 2e-5 * wanted.double().abs() + atol
    return ~(same | (close & found.isfinite() & wanted.isfinite()))


def compared(name, function, *values):
    """Return where the result of `function` differs from PyTorch's, and where each gradient does."""
    exempt = EXEMPT.get(name, Exempt())
    outcomes = []
    for module in (Applied(function), ortlab.wrap(Applied(function)).module):
        inputs = [value.clone().requires_grad_() for value in values]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = module(*inputs)
        weights = torch.ones_like(result)
        weights.view(-1)[1::2] = -2
        result.backward(weights)
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs]
        outcomes.append([result.detach(), *gradients])
    wanted, found = outcomes
    return [differs(ours, theirs, exempt.atol) for ours, theirs in zip(found, wanted, strict=True)], outcomes


def surprises(name, cells, outcomes, labels):
    """Name the entries that differ and are not exempt, with what was found and what PyTorch has."""
    exempt = EXEMPT.get(name, Exempt())
    lines = []
    for index, (cell, wanted, found) in enumerate(zip(cells, *outcomes, strict=True)):
        is_exempt = (exempt.gradient if index else exempt.result) or (lambda _: False)
        each = cell.numel() // len(labels)
        for place in cell.flatten().nonzero().flatten().tolist():
            label = labels[place // max(each, 1)]
            if not is_exempt(label):
                kind = f"gradient {index}" if index else "result"
                lines.append(
                    f"{kind} at {label}: {found.flatten()[place]}, PyTorch {wanted.flatten()[place]}"
                )
    return lines


@pytest.mark.parametrize("name", OF_ONE)
def test_each_value(name):
    cells, outcomes = compared(name, OF_ONE[name], VALUES[None])
    assert surprises(name, cells, outcomes, VALUES.tolist()) == []


@pytest.mark.parametrize("name", OF_TWO)
def test_each_pair_of_values(name):
    left, right = VALUES.repeat_interleave(len(VALUES))[None], VALUES.repeat(len(VALUES))[None]
    cells, outcomes = compared(name, OF_TWO[name], left, right)
    assert surprises(name, cells, outcomes, list(zip(*left.tolist(), *right.tolist(), strict=True))) == []


@pytest.mark.parametrize("name", OF_ROWS)
def test_each_row(name):
    cells, outcomes = compared(name, OF_ROWS[name], torch.tensor(list(ROWS.values()), dtype=torch.float32))
    assert surprises(name, cells, outcomes, list(ROWS)) == []


def test_a_loss_of_an_input_trains():
    """1.19.2 ends the process while it builds the gradient of a loss whose scores nothing in the graph makes."""
    labels = torch.arange(8) % 4
    scores = torch.randn(8, 4)
    cells, _ = compared("cross entropy", lambda x: F.cross_entropy(x, labels), scores)
    assert not any(cell.any() for cell in cells)


def test_every_exemption_is_said_and_names_an_operator():
    said = (Path(__file__).parents[3] / "docs" / "parity.md").read_text()
    assert EXEMPT.keys() <= OF_ONE.keys() | OF_TWO.keys() | OF_ROWS.keys()
    assert [name for name in EXEMPT if f"`{name}`" not in said] == []
    assert len(EXEMPT) <= 10


@pytest.mark.parametrize("name", ["log1p", "logsigmoid", "clamp_min", "hardshrink"])
def test_a_graph_without_gradient_has_the_same_results(name):
    model = Applied(OF_ONE[name])
    module = ortlab.wrap(Applied(OF_ONE[name])).module.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, wanted = module(VALUES[None]), model(VALUES[None])
    assert not differs(found, wanted, SMALLEST).any()
