"""From plans that add up to plans that fit when the whole step is simulated with them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from ortlab.studies import budget_exact as exact
from ortlab.studies import budget_greedy as greedy
from ortlab.studies.budget_problem import TOLERANCE

if TYPE_CHECKING:
    from ortlab.studies.budget_problem import Problem, Solution

ROUNDS: Final = 6
"""How often a limit is tightened or loosened by what the simulation says."""

DESCENT_S: Final = 3.0
"""Seconds for the search for the lowest simulated peak; a later one gets further, since simulated peaks are kept."""

_TRIED: Final = 24
"""How many chosen plans are looked at for places that are spare, those whose last place costs most first."""

_DIFFERS: Final = 0.02
"""Share of a peak by which the simulation may differ from what savings add up to; beyond, plans spoil one another."""

Counts = tuple[int, ...]


class Simulated(Protocol):
    """A step that can be simulated with plans."""

    problem: Problem  # what each place of each plan takes off, as far as that adds up
    levels: Mapping[int, tuple[float, float]]  # by memory level: simulated peak in bytes and added ms

    def peak(self, counts: Sequence[int]) -> float:
        """Return the highest bytes of the step, simulated with all the places together; known ones at once."""


@dataclass(frozen=True)
class Choice:
    """What was chosen for a limit."""

    counts: Counts  # by choice of the problem: how many of its first places are on
    cost_ms: float  # predicted
    peak_bytes: float  # simulated with all of them together
    limit_bytes: float
    solved: Solution  # of the exact solver, in the round that this comes from, or in the last
    quick: Solution  # of the greedy solver, asked the same
    seconds: float  # of all rounds, simulations included
    level: int = 0  # the memory level that is chosen instead of plans; 0 for plans

    @property
    def fits(self) -> bool:
        """Whether the simulated peak is within the limit; otherwise this comes closest of what was tried."""
        return self.peak_bytes <= self.limit_bytes + TOLERANCE


def choose(step: Simulated, limit: float, *, time_limit_s: float = exact.TIME_LIMIT_S) -> Choice:
    """Find the plans that cost least and fit within a limit in bytes when simulated together.

    Plans influence one another: what one recomputes, another may keep alive, and a chain that is recomputed from the
    start of the model lives all at once. So what the solver chooses is simulated, the solver's limit is moved by how
    much the simulation differs, and it is asked again, a few times; where they differ much, also with those plans only
    that the lowest simulated peak has. What a person would tick, largest saving first, and the memory levels stand
    beside it. What is spare in the cheapest that fits is then taken back.

    `time_limit_s` limits the solver's rounds with all plans and, once more, those with the plans of the lowest peak. If
    nothing fits, the choice is the lowest simulated peak that was found.
    """
    started = time.perf_counter()
    problem = step.problem
    solved = _rounds(step, problem, limit, time_limit_s)
    spoilt = any(abs(step.peak(one.counts) - one.peak_bytes) > _DIFFERS * one.peak_bytes for one in solved)
    bottom = lowest_counts(step)
    if spoilt and limit >= step.peak(bottom):
        solved += _rounds(step, _within(problem, bottom), limit, time_limit_s)
    singles = [_with(problem.nothing, position, 1) for position in range(len(problem.choices))]
    tried = [one.counts for one in solved] + [*by_hand(step), *singles, bottom]
    fitting = [counts for counts in tried if step.peak(counts) <= limit + TOLERANCE]
    if fitting:
        cheap = sorted(set(fitting), key=lambda counts: (problem.cost_ms(counts), step.peak(counts)))
        slim = [_without_spare(step, counts, limit) for counts in cheap[:2]]
        counts = min(slim, key=lambda one: (problem.cost_ms(one), step.peak(one)))
    else:
        counts = bottom
    peak, cost, level = step.peak(counts), problem.cost_ms(counts), 0
    for number, (level_peak, level_ms) in step.levels.items():
        fits = level_peak <= limit + TOLERANCE
        if (fits and (not fitting or level_ms < cost)) or (not fitting and level_peak < peak):
            counts, peak, cost, level = problem.nothing, level_peak, level_ms, number
    best = next((one for one in solved if one.counts == counts), solved[-1])
    quick = greedy.solve(problem, best.limit_bytes)
    return Choice(counts, cost, peak, limit, best, quick, time.perf_counter() - started, level)


def by_hand(step: Simulated) -> Iterator[Counts]:
    """Yield what a person would tick: one plan after the other, in all places, the largest saving first."""
    problem = step.problem
    nothing, top = problem.nothing, step.peak(problem.nothing)
    alone = {i: step.peak(_with(nothing, i, one.places)) for i, one in enumerate(problem.choices)}
    counts = nothing
    for position in sorted(alone, key=lambda i: alone[i]):
        counts_with = _with(counts, position, problem.choices[position].places)
        if alone[position] < top and problem.allowed(counts_with):
            counts = counts_with
            yield counts


def lowest_counts(step: Simulated) -> Counts:
    """Find the plans with the lowest simulated peak, going down from several starts, one plan at a time."""
    problem, started = step.problem, time.perf_counter()
    everything = tuple(choice.places for choice in problem.choices)
    starts = [problem.nothing, greedy.solve(problem, 0.0).counts, *by_hand(step)]
    if problem.allowed(everything):
        starts.append(everything)
    order = sorted(set(starts), key=step.peak)
    best = order[0]
    for start in (*order[:2], problem.nothing):
        best = min(best, _down(step, start, started + DESCENT_S), key=lambda one: _rank(step, one))
    return best


def _down(step: Simulated, counts: Counts, until: float) -> Counts:
    """Change one plan at a time, the one that lowers the simulated peak most, or the cost at the same peak."""
    problem = step.problem
    while time.perf_counter() < until:
        better = counts
        for position, choice in enumerate(problem.choices):
            for count in {0, counts[position] - 1, counts[position] + 1, choice.places} - {counts[position]}:
                changed = _with(counts, position, count)
                allowed = 0 <= count <= choice.places and problem.allowed(changed)
                if allowed and _rank(step, changed) < _rank(step, better):
                    better = changed
            if time.perf_counter() > until:
                break
        if better == counts:
            break
        counts = better
    return counts


def _rank(step: Simulated, counts: Counts) -> tuple[float, float]:
    return step.peak(counts), step.problem.cost_ms(counts)


def _with(counts: Counts, position: int, count: int) -> Counts:
    return (*counts[:position], count, *counts[position + 1 :])


def _within(problem: Problem, counts: Counts) -> Problem:
    """Return the problem with those places only."""
    from ortlab.studies import budget_problem as made

    choices = tuple(
        made.Choice(choice.config, choice.savings[:count], choice.cost_ms[:count])
        for choice, count in zip(problem.choices, counts, strict=True)
    )
    return made.Problem(problem.live, choices, problem.exclusive)


def _rounds(step: Simulated, problem: Problem, limit: float, time_limit_s: float) -> list[Solution]:
    """Solve, simulate, move the limit, and solve again."""
    solved: list[Solution] = []
    target: float | None = limit
    spent = 0.0
    while target is not None and len(solved) < ROUNDS and spent < time_limit_s:
        found = exact.solve(problem, target, time_limit_s=time_limit_s - spent)
        spent += found.seconds
        solved.append(found)
        target = None
        if step.peak(found.counts) <= limit + TOLERANCE or found.fits:
            target = _next_target(solved, limit, step)
    return solved


def _next_target(solved: list[Solution], limit: float, step: Simulated) -> float | None:
    """Return the limit to solve for next: what the last simulation says, or half-way between; None to stop.

    The solver's peaks at which the simulation fits are held to lie below those at which it does not.
    """
    peak = step.peak
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


def _without_spare(step: Simulated, counts: Counts, limit: float) -> Counts:
    """Switch off places that the simulation does not need, those that spare most first, until none is spare."""
    problem = step.problem
    while True:
        before = counts
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
                fewer_counts = _with(counts, position, fewer)
                if fewer < counts[position] and step.peak(fewer_counts) <= limit + TOLERANCE:
                    counts = fewer_counts
        if counts == before:
            return counts
