"""What is computed with whole and complex numbers is PyTorch's, also below zero and in eight bits."""

# ruff: noqa: ARG005 - computations are called alike, whatever they look at

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ortlab.errors import BuildError

pytestmark = pytest.mark.usefixtures("no_fallback")

COMPUTATIONS = {
    "quotient": lambda i, j: i // j,
    "quotient by a number": lambda i, j: (i // 4, (-i) // 4, i // -3, 7 // j),
    "quotient of floats": lambda i, j: (i * 0.3 // 0.7, i.float() // j),
    "rounding of a quotient": lambda i, j: (
        torch.div(i, j, rounding_mode="floor"),
        torch.div(i, j, rounding_mode="trunc"),
        torch.floor_divide(i, 4),
    ),
    "remainder": lambda i, j: (i % j, i % 3, i % -3, 7 % j, torch.fmod(i, j)),
    "shift": lambda i, j: (i >> 1, i << 2, i >> j.abs(), torch.bitwise_right_shift(i, 1)),
    "of 32 bits": lambda i, j: (i.int() // 2, i.int() % 3, i.int() * j),
    "of 16 bits": lambda i, j: (i.short() * j.short(), i.short() + 1, -i.short()),
    "of 8 bits": lambda i, j: (i.abs().to(torch.uint8) * 40, i.to(torch.uint8) // 3, i.to(torch.int8).abs()),
    "of 8 bits, summed": lambda i, j: (i.to(torch.uint8).sum(), (i.to(torch.uint8) - 200).float() / 255),
    "places": lambda i, j: (i.argmin(0), i.argmax(1), i.argmin()),
    "masks of eye": lambda i, j: (torch.eye(len(i), 5, dtype=torch.bool), torch.eye(5, dtype=torch.uint8)),
    "diagonals": lambda i, j: ((i @ j.T).fill_diagonal_(-7), i.float().fill_diagonal_(0.5)),
    "full of a sum": lambda i, j: torch.full((2,), len(i)) // 2,
}


class Computing(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.scale, self.compute = nn.Parameter(torch.ones(())), compute

    def forward(self, i, j):
        results = self.compute(i, j)
        return self.scale * 2, results


@pytest.mark.parametrize("name", COMPUTATIONS)
@pytest.mark.parametrize("training", [True, False])
def test_whole_numbers_are_those_of_pytorch(name, training, wrap):
    model = Computing(COMPUTATIONS[name]).train(training)
    reference, lab = copy.deepcopy(model), wrap(model)
    for seed in range(2):
        torch.manual_seed(seed)
        i = torch.randint(-9, 10, (4, 5))
        j = torch.randint(1, 5, (4, 5)) * (1 - 2 * torch.randint(0, 2, (4, 5)))
        with torch.set_grad_enabled(training):
            scaled, found = model(i, j)
        torch.testing.assert_close(found, reference(i, j)[1], rtol=1e-6, atol=1e-6)
        if training:
            scaled.backward()
    assert lab.status.executed_by == "ort"


def pairs(h):
    return torch.view_as_complex(h.reshape(-1, 2, 2))


COMPLEX = {
    "unit": lambda h: (1j * h).imag + (h * 1j).imag,
    "sum": lambda h: (h + 2j).real,
    "turned": lambda h: torch.exp(1j * h).real,
    "factor": lambda h: (pairs(h) * (1 + 2j)).real,
    "quotient": lambda h: (2j / (pairs(h) + 3)).imag,
    "choice": lambda h: torch.where(h[:, :2] > 0, pairs(h), 0j).real,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_of_python_are_computed_with(name, wrap):
    class Turning(nn.Linear):
        def forward(self, x):
            return COMPLEX[name](super().forward(x))

    model = Turning(4, 4)
    reference, lab = copy.deepcopy(model), wrap(model)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        found, expected = model(x), reference(x)
        torch.testing.assert_close(found, expected)
        for one in (found, expected):
            one.square().sum().backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    assert lab.status.executed_by == "ort"


def test_complex_weights_and_arguments_are_refused_by_name(wrap):
    class Spectral(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=dtype))

        def forward(self, x):
            return (
                torch.view_as_complex(x) * self.scale if x.dtype == torch.float32 else x * self.scale
            ).abs()

    with pytest.raises(BuildError, match="'scale' of Spectral is complex64") as refusal:
        wrap(Spectral(torch.complex64)).module(torch.randn(4, 2))
    assert "torch.view_as_real" in refusal.value.fix
    with pytest.raises(BuildError, match="`x` is complex64"):
        wrap(Spectral(torch.float32)).module(torch.randn(4, dtype=torch.complex64))
