"""What a search does next: it follows from what is written down, so that an interrupted search goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ortlab.studies.batch_size_points import TOO_LARGE, BatchSizePoint, Plans

if TYPE_CHECKING:
    from ortlab.studies.batch_size_search import BatchSizeSearch

LARGEST: Final = 1 << 20
"""The largest power of two that is tried."""


@dataclass(frozen=True)
class Task:
    """One thing to do."""

    kind: str  # "try" a point and measure its peak, "time" one that fits, or "choose" the sets of plans
    size: int = 0  # 0 for a choice
    plans: Plans = ()
    round: int = 0  # of a timed run, from 1


def following(search: BatchSizeSearch) -> Task | None:
    """Return the next task; None if the search is complete.

    1. Without plans, sizes go up until one does not fit.
    2. With each set of plans: the largest size that fits without them, from which the next is predicted; then that
       next size, row F7's advice, and on until one does not fit.
    3. Every point that fits is timed, in rounds; every other round goes backwards, so that a drift of the machine
       favours no point.
    """
    task = _climb(search, (), from_size=None)
    if task is not None:
        return task
    misfit = first_misfit(search)
    if misfit is not None and misfit.outcome in TOO_LARGE:
        if search.plan_sets is None:
            return Task("choose")
        alone = search.largest(())
        for plans in search.plan_sets:
            task = _climb(search, plans, from_size=misfit.size if alone is None else alone.size)
            if task is not None:
                return task
    return _round(search)


def first_misfit(search: BatchSizeSearch) -> BatchSizePoint | None:
    """Return the smallest size that does not fit without plans; None if all fit that were tried."""
    return next((one for one in search.points if not one.plans and not one.fits), None)


def sizes_of(search: BatchSizeSearch) -> Iterator[int]:
    """Yield the sizes that may be tried, in ascending order."""
    if search.sizes is not None:
        yield from search.sizes
        return
    size = 1
    while size <= LARGEST:
        yield size
        size *= 2


def remaining(search: BatchSizeSearch) -> int:
    """Count the timed runs that the points found so far still need."""
    return sum(max(0, search.rounds - len(one.runs)) for one in search.points if one.fits)


def _climb(search: BatchSizeSearch, plans: Plans, *, from_size: int | None) -> Task | None:
    for size in sizes_of(search):
        if from_size is not None and size < from_size:
            continue
        point = search.point(size, plans)
        if point is None:
            return Task("try", size, plans)
        if not point.fits:
            return None
    return None


def _round(search: BatchSizeSearch) -> Task | None:
    order = [one for one in search.points if one.fits]
    for number in range(1, search.rounds + 1):
        for point in order if number % 2 else reversed(order):
            if len(point.runs) < number:
                return Task("time", point.size, point.plans, number)
    return None
