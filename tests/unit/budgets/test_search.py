"""Plans whose savings do not add up: what is chosen fits when all of it is simulated together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ortlab.budgets.problem import Choice, Problem
from ortlab.budgets.search import choose


class Interacting:
    """A step in which every further plan spoils a part of what the others save, or adds to it."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        choices = tuple(
            Choice(
                f"C{number}+:1",
                generator.integers(-15, 40, (3, 10)) * 1e5,
                generator.integers(1, 20, 3) / 4,
            )
            for number in range(4)
        )
        self.problem = Problem(generator.integers(50, 200, 10) * 1e5, choices)
        self.spoilt = generator.uniform(-0.1, 0.2)

    def peak(self, counts) -> float:
        saved = self.problem.live - self.problem.live_with(counts)
        others = max(0, sum(count > 0 for count in counts) - 1)
        return float((self.problem.live - saved * (1 - self.spoilt * others)).max())


@pytest.mark.parametrize("seed", range(12))
def test_what_is_chosen_fits_as_simulated(seed):
    step = Interacting(seed)
    everything = list(itertools.product(range(4), repeat=4))
    for share in (0.75, 0.9):
        limit = share * step.problem.live.max()
        found = choose(step, limit)
        assert found.peak_bytes == step.peak(found.counts)
        assert found.cost_ms == step.problem.cost_ms(found.counts)
        fitting = [step.problem.cost_ms(each) for each in everything if step.peak(each) <= limit]
        assert found.fits == bool(fitting)
        if fitting:
            assert min(fitting) <= found.cost_ms <= 1.5 * min(fitting)


def test_nothing_is_chosen_where_all_fits_already():
    step = Interacting(0)
    found = choose(step, step.problem.live.max())
    assert (found.fits, found.cost_ms, set(found.counts)) == (True, 0, {0})


def test_the_closest_is_chosen_where_nothing_fits():
    step = Interacting(1)
    found = choose(step, 0)
    assert not found.fits
    assert found.peak_bytes < step.problem.live.max()
