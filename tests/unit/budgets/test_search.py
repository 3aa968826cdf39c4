"""Plans whose savings do not add up: what is chosen fits when all of it is simulated together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ortlab.studies.budget import Setting
from ortlab.studies.budget_problem import Choice, Problem
from ortlab.studies.budget_search import by_hand, choose


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
        self.settings: dict[Setting, tuple[float, float]] = {}

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


@pytest.mark.parametrize("seed", range(12))
def test_the_closest_is_as_low_as_any_and_as_what_a_person_would_tick(seed):
    """The lowest peak where savings add up need not be the lowest one: what is chosen there was not held against it."""
    step = Interacting(seed)
    found = choose(step, 0)
    lowest = min(step.peak(each) for each in itertools.product(range(4), repeat=4))
    assert found.peak_bytes <= 1.02 * lowest
    assert found.peak_bytes <= min(map(step.peak, by_hand(step)), default=found.peak_bytes)


def test_a_person_ticks_the_largest_saving_first():
    step = Interacting(2)
    nothing = step.problem.nothing
    ticked = list(by_hand(step))
    assert all(sum(count > 0 for count in counts) == number for number, counts in enumerate(ticked, start=1))
    alone = [step.peak((*nothing[:i], 3, *nothing[i + 1 :])) for i in range(4)]
    assert ticked[0].index(3) == alone.index(min(alone))


def test_a_memory_level_is_chosen_where_it_costs_less_or_comes_closer():
    step = Interacting(3)
    closest, level = choose(step, 0), Setting(memory_level=1)
    step.settings = {level: (0.5 * closest.peak_bytes, 0.25)}
    for limit in (0.0, 0.9 * step.problem.live.max()):
        found = choose(step, limit)
        assert (found.setting, found.peak_bytes, found.cost_ms) == (level, 0.5 * closest.peak_bytes, 0.25)
