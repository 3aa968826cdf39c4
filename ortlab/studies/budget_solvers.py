"""The two solvers of a budget's problem: a quick one, and HiGHS, which finds the best plans."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ortlab.studies.budget_problem import TOLERANCE, Solution, solution

if TYPE_CHECKING:
    from ortlab.studies.budget_problem import Floats, Problem

Offer = tuple[float, int, int]
"""Minus the bytes per ms, the position of a choice, its new count: the smallest is the best."""


def solve_quickly(problem: Problem, limit: float) -> Solution:
    """Choose plans for a limit in bytes, not always the best; `bound_ms` of the solution is nan."""
    # Where it finds nothing that fits, the counts are those with the lowest peak that it saw.
    started = time.perf_counter()
    small = problem.reduced(limit)
    counts = list(problem.nothing)
    best, lowest = list(counts), small.peak(counts)
    offers: list[Offer] = []
    while lowest > limit + TOLERANCE:
        # Rates only fall as others are taken, but for those of places that undo what another adds: ask all again
        # before giving up.
        taken = _best(small, counts, limit, offers)
        if taken is None:
            offers = _offers(small, counts, limit, range(len(counts)))
            taken = _best(small, counts, limit, offers)
        if taken is None:
            break
        _, position, counts[position] = taken
        for offer in _offers(small, counts, limit, [position]):
            heapq.heappush(offers, offer)
        if (peak := small.peak(counts)) < lowest:
            best, lowest = list(counts), peak
    if lowest <= limit + TOLERANCE:
        _take_back(small, best, limit)
    seconds = time.perf_counter() - started
    return solution(problem, best, limit, "greedy", bound_ms=math.nan, proven=False, seconds=seconds)


def _best(problem: Problem, counts: list[int], limit: float, offers: list[Offer]) -> Offer | None:
    """Take the best offer out of the heap: the first that is still the best when its rate is calculated again."""
    while offers:
        _, position, _ = heapq.heappop(offers)
        for offer in _offers(problem, counts, limit, [position]):
            if not offers or offer <= offers[0]:
                return offer
            heapq.heappush(offers, offer)
    return None


def _offers(problem: Problem, counts: list[int], limit: float, positions: range | list[int]) -> list[Offer]:
    """Return a heap of the best new count of each choice, without the choices that take nothing off."""
    live = problem.live_with(counts)
    near = np.flatnonzero(live + problem.rise > limit)
    live = live[near] - limit
    over = np.maximum(live, 0.0).sum()
    offers = []
    for position in positions:
        count = counts[position]
        total, cost = problem.totals[position], problem.costs[position]
        if count == problem.choices[position].places or not (count or _free(problem, counts, position)):
            continue
        after = np.maximum(live - (total[count + 1 :, near] - total[count, near]), 0.0).sum(axis=1)
        # A place without cost is worth any price; the tiny one keeps the larger saving first among those.
        rates = (over - after) / np.maximum(cost[count + 1 :] - cost[count], 1e-9)
        more = int(rates.argmax())
        if rates[more] > 0:
            offers.append((-float(rates[more]), position, count + 1 + more))
    heapq.heapify(offers)
    return offers


def _free(problem: Problem, counts: list[int], position: int) -> bool:
    groups = (group for group in problem.exclusive if position in group)
    return not any(counts[other] for group in groups for other in group if other != position)


def _take_back(problem: Problem, counts: list[int], limit: float) -> None:
    """Switch off places that later ones have made needless, those that spare most first."""
    live = problem.live_with(counts)
    changed = True
    while changed:
        changed = False
        spared = [
            (problem.costs[position][count] - problem.costs[position][fewer], position, fewer)
            for position, count in enumerate(counts)
            for fewer in range(count)
        ]
        for _, position, fewer in sorted(spared, reverse=True):
            total, count = problem.totals[position], counts[position]
            if fewer < count and (live + total[count] - total[fewer]).max() <= limit + TOLERANCE:
                live += total[count] - total[fewer]
                counts[position], changed = fewer, True


TIME_LIMIT_S: Final = 0.85
"""After this many seconds the best that was found is taken, with the gap to what could still be there.

HiGHS checks its clock only now and then; with this limit, all of it stays within a second.
"""

_LEAST_TIME_S: Final = 0.05
_UNIT: Final = 2.0**20
"""Bytes in the unit of the program, in which HiGHS's absolute tolerance of 1e-6 is a byte."""

_OPTIMAL, _INFEASIBLE = 0, 2
"""What `scipy.optimize.milp` calls them."""


def solve_exactly(problem: Problem, limit: float, *, time_limit_s: float = TIME_LIMIT_S) -> Solution:
    """Choose the plans that cost least within a limit in bytes; where nothing fits, those that come closest."""
    # Minimise the sum of the costs over binary variables, one for each place, where a place needs the one before it and
    # at most one choice of a group may have its first place, such that every instant is within the limit. Where nothing
    # fits, minimise the peak instead, and then the cost at that peak. The solution is never dearer than the greedy one
    # where that fits, and never has a higher peak where that does not. If the time runs out, `Solution.proven` is
    # False.
    started = time.perf_counter()

    def left() -> float:
        return max(_LEAST_TIME_S, time_limit_s - (time.perf_counter() - started))

    quick = solve_quickly(problem, limit)
    counts, bound, proven = quick.counts, 0.0, True
    if not quick.fits or quick.cost_ms > 0:
        found = _cheapest(problem.reduced(limit), limit, left())
        bound, proven = found.bound, found.optimal
        if found.counts and problem.fits(found.counts, limit):
            if not quick.fits or problem.cost_ms(found.counts) < quick.cost_ms:
                counts = found.counts
        elif not quick.fits:
            counts, proven = _closest(problem, counts, left)
            proven, bound = proven and found.infeasible, math.nan
    seconds = time.perf_counter() - started
    return solution(problem, counts, limit, "exact", bound_ms=bound, proven=proven, seconds=seconds)


def _closest(problem: Problem, quick: tuple[int, ...], left: Any) -> tuple[tuple[int, ...], bool]:
    """Return the counts with the lowest peak, the cheapest of those, and whether that peak is proven."""
    small = problem.reduced(-math.inf)
    lowest = _lowest_peak(small, left())
    counts = min((quick, lowest.counts or quick), key=problem.peak)
    cheap = _cheapest(small, problem.peak(counts), left())
    if cheap.counts and problem.fits(cheap.counts, problem.peak(counts)):
        counts = min((counts, cheap.counts), key=problem.cost_ms)
    return counts, lowest.optimal


@dataclass(frozen=True)
class _Found:
    counts: tuple[int, ...] | None
    optimal: bool
    infeasible: bool
    bound: float


def _cheapest(problem: Problem, limit: float, time_limit_s: float) -> _Found:
    """Minimise the cost within a limit. Variables: the places, then what lives at each instant."""
    costs = np.concatenate([np.zeros(0), *(choice.cost_ms for choice in problem.choices)])
    instants = len(problem.live)
    objective = np.concatenate([costs, np.zeros(instants)])
    return _solve(problem, objective, np.full(instants, limit / _UNIT), [], time_limit_s)


def _lowest_peak(problem: Problem, time_limit_s: float) -> _Found:
    """Minimise the peak, which is one more variable behind those of `_cheapest`."""
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_matrix, eye, hstack

    instants, places = len(problem.live), _places(problem)
    objective = np.concatenate([np.zeros(places + instants), [1.0]])
    nothing, one = csr_matrix((instants, places)), csr_matrix(np.ones((instants, 1)))
    above = LinearConstraint(hstack([nothing, -eye(instants), one]).tocsr(), lb=0.0)
    return _solve(problem, objective, np.full(instants + 1, np.inf), [above], time_limit_s)


def _solve(
    problem: Problem, objective: Floats, upper: Floats, constraints: list[Any], time_limit_s: float
) -> _Found:
    """Minimise; the variables behind the places are continuous, with upper bounds of their own."""
    from scipy.optimize import Bounds, milp

    places = _places(problem)
    if not places:
        return _Found(None, optimal=False, infeasible=True, bound=math.nan)
    answer = milp(
        objective,
        integrality=np.arange(len(objective)) < places,
        bounds=Bounds(
            np.concatenate([np.zeros(places), np.full(len(upper), -np.inf)]),
            np.concatenate([np.ones(places), upper]),
        ),
        constraints=[*_rules(problem, len(upper)), *constraints],
        options={"time_limit": time_limit_s},
    )
    counts = None
    if answer.x is not None:
        ends = np.cumsum([choice.places for choice in problem.choices])[:-1]
        counts = tuple(int(part.sum()) for part in np.split(np.round(answer.x[:places]), ends))
    bound = math.nan if answer.mip_dual_bound is None else max(0.0, float(answer.mip_dual_bound))
    return _Found(counts, answer.status == _OPTIMAL, answer.status == _INFEASIBLE, bound)


def _rules(problem: Problem, more: int) -> list[Any]:
    """Return the constraints: what lives, that a place needs the one before it, and that groups are exclusive."""
    # What lives at an instant is what lived before and the difference that places make since: a place changes that at
    # few instants, so these rows are sparse where its savings are not, which HiGHS solves many times faster. `more`
    # counts the variables behind the places; the first of them are what lives at each instant.
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_matrix, diags, hstack, lil_matrix

    instants, places = len(problem.live), _places(problem)
    savings = np.vstack([choice.savings for choice in problem.choices]) / _UNIT
    saved = csr_matrix(np.diff(savings, axis=1, prepend=0.0).T)
    since = diags([np.ones(instants), -np.ones(instants - 1)], [0, -1], shape=(instants, more))
    lives = np.diff(problem.live, prepend=0.0) / _UNIT
    rules = [LinearConstraint(hstack([saved, since]).tocsr(), lives, lives)]

    first = np.cumsum([0, *(choice.places for choice in problem.choices)])
    later = [column for start, end in itertools.pairwise(first) for column in range(start + 1, end)]
    order = lil_matrix((len(later), places + more))
    for row, column in enumerate(later):
        order[row, column - 1], order[row, column] = 1.0, -1.0
    groups = [
        [int(first[choice]) for choice in group if problem.choices[choice].places]
        for group in problem.exclusive
    ]
    once = lil_matrix((len(groups), places + more))
    for row, columns in enumerate(groups):
        once[row, columns] = 1.0
    if later:
        rules.append(LinearConstraint(order.tocsr(), lb=0.0))
    if groups:
        rules.append(LinearConstraint(once.tocsr(), ub=1.0))
    return rules


def _places(problem: Problem) -> int:
    return sum(choice.places for choice in problem.choices)
