"""The two solvers against trying everything, on small random problems."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ortlab.studies.budget_problem import Choice, Problem
from ortlab.studies.budget_solvers import solve_exactly, solve_quickly

INSTANTS = 12
SHARES = (0.6, 0.8, 0.9, 0.95, 1.1)


def random_problem(seed: int) -> Problem:
    generator = np.random.default_rng(seed)
    choices = []
    for number in range(int(generator.integers(1, 5))):
        places = int(generator.integers(1, 4))
        savings = generator.integers(-15, 40, (places, INSTANTS)) * 1e5
        choices.append(Choice(f"C{number}+:1", savings, generator.integers(0, 20, places) / 4))
    exclusive = ((0, 1),) if len(choices) > 1 else ()
    return Problem(generator.integers(50, 200, INSTANTS) * 1e5, tuple(choices), exclusive)


def everything(problem: Problem) -> list[tuple[int, ...]]:
    counts = itertools.product(*(range(choice.places + 1) for choice in problem.choices))
    return [each for each in counts if problem.allowed(each)]


@pytest.mark.parametrize("seed", range(20))
def test_exact_finds_what_trying_everything_finds(seed):
    problem = random_problem(seed)
    for share in SHARES:
        limit = share * problem.live.max()
        found, quick = solve_exactly(problem, limit), solve_quickly(problem, limit)
        for one in (found, quick):
            assert problem.allowed(one.counts)
            assert one.cost_ms == problem.cost_ms(one.counts)
            assert one.peak_bytes == problem.peak(one.counts)
            assert one.fits == problem.fits(one.counts, limit)
        fitting = [each for each in everything(problem) if problem.fits(each, limit)]
        assert found.proven
        assert found.fits == bool(fitting)
        if fitting:
            assert found.cost_ms == pytest.approx(min(map(problem.cost_ms, fitting)))
            assert found.gap == pytest.approx(0, abs=1e-3)
        else:
            lowest = min(map(problem.peak, everything(problem)))
            cheapest = min(problem.cost_ms(e) for e in everything(problem) if problem.fits(e, lowest))
            assert found.peak_bytes == pytest.approx(lowest)
            assert found.cost_ms == pytest.approx(cheapest)
        if quick.fits:
            assert found.cost_ms <= quick.cost_ms
        else:
            assert found.fits or found.peak_bytes <= quick.peak_bytes


@pytest.mark.parametrize("seed", range(20))
def test_instants_that_are_left_out_decide_nothing(seed):
    problem = random_problem(seed)
    limit = 0.8 * problem.live.max()
    small = problem.reduced(limit)
    assert len(small.live) <= INSTANTS
    assert all(small.fits(each, limit) == problem.fits(each, limit) for each in everything(problem))
    every = problem.reduced(-np.inf)
    assert all(every.peak(each) == problem.peak(each) for each in everything(problem))


def test_neighbours_that_hold_less_are_left_out():
    live = np.array([1.0, 5.0, 9.0, 8.0, 2.0, 6.0])
    saving = np.array([[0.0, 4.0, 4.0, 4.0, 0.0, 0.0]])
    small = Problem(live, (Choice("Gelu+:1", saving, np.ones(1)),)).reduced(2)
    assert small.live.tolist() == [9.0, 6.0]
    assert small.choices[0].savings.tolist() == [[4.0, 0.0]]


def test_a_problem_without_plans_has_the_peak_that_it_has():
    problem = Problem(np.array([1e6, 3e6]), ())
    for solver in (solve_exactly, solve_quickly):
        assert solver(problem, 3e6).fits
        closest = solver(problem, 2e6)
        assert (closest.fits, closest.counts, closest.peak_bytes) == (False, (), 3e6)


def test_exclusive_plans_are_never_on_together():
    live, size = np.full(3, 10e6), np.full((1, 3), 4e6)
    choices = (Choice("Add+:1", size, np.ones(1)), Choice("FusedMatMul+Add+:1", size, np.ones(1)))
    both = solve_exactly(Problem(live, choices), 2e6)
    assert both.counts == (1, 1)
    one = solve_exactly(Problem(live, choices, ((0, 1),)), 2e6)
    assert not one.fits
    assert sorted(one.counts) == [0, 1]
    assert sorted(solve_quickly(Problem(live, choices, ((0, 1),)), 2e6).counts) == [0, 1]


def test_arrays_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match=r"Gelu\+:1: savings of shape"):
        Problem(np.ones(3), (Choice("Gelu+:1", np.ones((1, 2)), np.ones(1)),))
    with pytest.raises(ValueError, match="a cost below zero"):
        Problem(np.ones(3), (Choice("Gelu+:1", np.ones((1, 3)), -np.ones(1)),))
    with pytest.raises(ValueError, match="finite ones"):
        Problem(np.array([np.nan]), ())
