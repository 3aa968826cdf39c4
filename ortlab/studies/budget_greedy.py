"""The quick way: switch on what takes most bytes off above the limit for each ms, then take back what is spare."""

from __future__ import annotations

import heapq
import math
import time
from typing import TYPE_CHECKING

import numpy as np

from ortlab.studies.budget_problem import TOLERANCE, Solution, solution

if TYPE_CHECKING:
    from ortlab.studies.budget_problem import Problem

Offer = tuple[float, int, int]
"""Minus the bytes per ms, the position of a choice, its new count: the smallest is the best."""


def solve(problem: Problem, limit: float) -> Solution:
    """Choose plans for a limit in bytes, not always the best; `bound_ms` of the solution is nan.

    Where it finds nothing that fits, the counts are those with the lowest peak that it saw.
    """
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
