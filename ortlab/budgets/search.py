"""From plans that add up to plans that fit when the whole step is simulated with them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from ortlab.budgets import exact, greedy
from ortlab.budgets.problem import TOLERANCE

if TYPE_CHECKING:
    from ortlab.budgets.problem import Problem, Solution

ROUNDS: Final = 6
"""How often a limit is tightened or loosened by what the simulation says."""

_TRIED: Final = 24
"""Chosen plans with the most places; more are not looked at for places that are spare."""

Counts = tuple[int, ...]


class Simulated(Protocol):
    """A step that can be simulated with plans."""

    problem: Problem

    def peak(self, counts: Sequence[int]) -> float:
        """Return the highest bytes of the step, simulated with all the places together."""


@dataclass(frozen=True)
class Choice:
    """What was chosen for a limit.

    Attributes
    ----------
    counts
        By choice of the problem: how many of its first places are on.
    cost_ms
        What they add to a step, predicted, in ms.
    peak_bytes
        The highest instant of the step, simulated with all of them together.
    limit_bytes
        The limit.
    solved
        What the exact solver said in the round that this comes from.
    quick
        The greedy solver, asked the same.
    seconds
        How long all rounds took, simulations included.
    """

    counts: Counts
    cost_ms: float
    peak_bytes: float
    limit_bytes: float
    solved: Solution
    quick: Solution
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the simulated peak is within the limit; otherwise this comes closest of what was tried."""
        return self.peak_bytes <= self.limit_bytes + TOLERANCE


def choose(step: Simulated, limit: float, *, time_limit_s: float = exact.TIME_LIMIT_S) -> Choice:
    """Find the plans that cost least and fit when simulated together.

    Plans influence one another: what one recomputes, another may keep alive. So what the solver chooses is simulated,
    the solver's limit is moved by how much the simulation differs, and it is asked again, a few times. What is spare
    in the cheapest that fits is then taken back.

    Parameters
    ----------
    step
        What can be simulated.
    limit
        Bytes.
    time_limit_s
        Seconds for all rounds of the solver together.

    Returns
    -------
    Choice
        With `fits` False if nothing was found; it is then what came closest.
    """
    started = time.perf_counter()
    problem = step.problem
    peaks: dict[Counts, float] = {}

    def peak(counts: Counts) -> float:
        if counts not in peaks:
            peaks[counts] = step.peak(counts)
        return peaks[counts]

    solved: list[Solution] = []
    target: float | None = limit
    spent = 0.0
    while target is not None and len(solved) < ROUNDS and spent < time_limit_s:
        found = exact.solve(problem, target, time_limit_s=time_limit_s - spent)
        spent += found.seconds
        solved.append(found)
        target = None
        if peak(found.counts) <= limit + TOLERANCE or found.fits:
            target = _next_target(solved, limit, peak)
    fitting = [one for one in solved if peak(one.counts) <= limit + TOLERANCE]
    if fitting:
        best = min(fitting, key=lambda one: one.cost_ms)
        counts = _without_spare(problem, best.counts, limit, peak)
    else:
        best = min(solved, key=lambda one: peak(one.counts))
        counts = best.counts
    return Choice(
        counts,
        problem.cost_ms(counts),
        peak(counts),
        limit,
        best,
        greedy.solve(problem, best.limit_bytes),
        time.perf_counter() - started,
    )


def _next_target(solved: list[Solution], limit: float, peak: Callable[[Counts], float]) -> float | None:
    """Return the limit to solve for next: what the last simulation says, or half-way between; None to stop.

    The solver's peaks at which the simulation fits are held to lie below those at which it does not.
    """
    fitting = [one.peak_bytes for one in solved if peak(one.counts) <= limit + TOLERANCE]
    failing = [one.peak_bytes for one in solved if peak(one.counts) > limit + TOLERANCE]
    low, high = max(fitting, default=-math.inf), min(failing, default=math.inf)
    last = solved[-1]
    target = limit - (peak(last.counts) - last.peak_bytes)
    if not low < target < high:
        target = (low + high) / 2
    if not math.isfinite(target) or (fitting and last.cost_ms == 0):
        return None
    # An optimal solution stays the same for every limit between its own peak and its limit.
    same = any(one.peak_bytes <= target <= one.limit_bytes for one in solved)
    return None if same else target


def _without_spare(problem: Problem, counts: Counts, limit: float, peak: Callable[[Counts], float]) -> Counts:
    """Switch places off that the simulation does not need, those that spare most first."""
    spared = sorted(
        (
            (problem.costs[position][count] - problem.costs[position][count - 1], position)
            for position, count in enumerate(counts)
            if count
        ),
        reverse=True,
    )
    for _, position in spared[:_TRIED]:
        for fewer in (0, counts[position] - 1):
            fewer_counts = (*counts[:position], fewer, *counts[position + 1 :])
            if fewer < counts[position] and peak(fewer_counts) <= limit + TOLERANCE:
                counts = fewer_counts
    return counts
