"""How far apart two engines may be at a site."""

from __future__ import annotations

import pytest
import torch

from ortlab.parity.parity import Site
from ortlab.parity.tensor_comparison import FACTOR, LEAST, MOST, Compared, Reference, limits, stored


def observed(values, *, shape=(4,)):
    """Return what a run has handed over: a module's output, and the gradient of a parameter."""
    return {
        Site(1, "part", 1, "output", "0"): torch.full(shape, values[0]),
        Site(1, "part", 1, "output gradient", "0"): torch.full(shape, values[1]),
        Site(1, "part", 0, "parameter gradient", "weight"): torch.full(shape, values[2]),
    }


def limits_of(first, rounded, repeated):
    with stored() as store:
        reference = Reference(store)
        for site, tensor in first.items():
            reference.take(site, tensor)
        compared = []
        for run in (rounded, repeated):
            other = Compared(store)
            for site, tensor in run.items():
                other.take(site, tensor)
            compared.append(other)
        return [*limits(reference, compared[0], compared[1:]).values()]


def test_a_limit_is_some_floors_and_a_floor_what_rounding_or_chance_moves():
    found = limits_of(observed([1.0, 1.0, 1.0]), observed([1.5, 1.25, 1.0]), observed([1.0, 1.5, 1.0]))
    assert found[0] == (0.5, FACTOR * 0.5)
    assert found[1] == (0.5, FACTOR * 0.5)
    assert found[2] == (0.0, LEAST * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    ("shape", "units"), [((2, 3), LEAST), ((1024, 2), 32), ((2, 1600), 40), ((2**20,), MOST)]
)
def test_the_least_limit_grows_with_the_sums_of_a_step(shape, units):
    ones = observed([1.0, 1.0, 1.0], shape=shape)
    assert limits_of(ones, ones, ones)[2][1] == units * torch.finfo(torch.float32).eps


def test_a_tensor_that_other_rounding_does_not_reach_has_the_floor_of_its_neighbours():
    first, rounded = observed([1.0, 1.0, 1.0]), observed([1.0, 1.5, 1.0])
    beside = Site(1, "part", 1, "output gradient", "1")
    floors = limits_of({**first, beside: torch.ones(4)}, rounded, first)
    assert floors[3] == floors[1] == (0.5, FACTOR * 0.5)
