"""What a search found, in sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ortlab.render import units
from ortlab.studies.batch_size_following import first_misfit
from ortlab.studies.batch_size_points import RAN_OUT, TOO_LARGE, plans_name

if TYPE_CHECKING:
    from ortlab.studies.batch_size_points import BatchSizePoint
    from ortlab.studies.batch_size_search import BatchSizeSearch


def best_sentence(search: BatchSizeSearch) -> str:
    """Say which point is fastest; "" if none was timed."""
    best = search.best
    if best is None:
        return ""
    with_what = f", recomputing {plans_name(best.plans)}" if best.plans else ""
    return f"Most samples per second: batch {units.count(best.size)}{with_what}, {units.rate(best.samples_per_s)}."


def closing_sentence(search: BatchSizeSearch) -> str:
    """Say what recomputation is good for under the limit, or that it is not; "" while that is not known."""
    limit = f"{units.size(search.asked_bytes)} of {search.limit_of}"
    alone, larger = search.largest(()), search.best_with_plans
    if larger is None:
        return _stays(search, alone, limit)
    if alone is None:
        return f"Only with recomputing {plans_name(larger.plans)} does a batch of {larger.size} fit under {limit}."
    return _pays(search, larger, alone, limit) if alone.timed else ""


def _stays(search: BatchSizeSearch, alone: BatchSizePoint | None, limit: str) -> str:
    """Say why no plan makes a larger batch fit."""
    misfit, size = first_misfit(search), units.count(alone.size if alone else None)
    if misfit is None:
        said = f"Every batch that was tried fits under {limit}, so no plan is needed." if alone else ""
    elif misfit.outcome not in TOO_LARGE:
        said = f"Larger batches than {size} could not be made or run." if alone else ""
    elif alone is None:
        said = f"No batch fits under {limit}: {_need(search, misfit)}."
    elif search.plan_sets:
        said = f"No plan that was tried makes a larger batch than {size} fit under {limit}."
    elif search.plan_sets is not None:
        said = f"Batch {units.count(misfit.size)} does not fit under {limit}, and there are no plans to try."
    else:
        said = ""
    return said


def _pays(search: BatchSizeSearch, larger: BatchSizePoint, alone: BatchSizePoint, limit: str) -> str:
    ratio, low, high = search.pace_ratio(larger, alone)
    grow = "double" if larger.size == 2 * alone.size else "grow"
    what = (
        f"Recomputing {plans_name(larger.plans)} lets the batch {grow} from {units.count(alone.size)} "
        f"to {units.count(larger.size)} under {limit}"
    )
    times = units.times(ratio, low, high)
    if math.isnan(low):
        return f"{what}; {times} the samples per second, of too few steps to tell a difference."
    if low > 1:
        return f"{what}; {times} the samples per second."
    if high < 1:
        return f"{what}, but does not pay here: {times} the samples per second."
    return f"{what}, with no difference in samples per second that could be told: {times}."


def _need(search: BatchSizeSearch, point: BatchSizePoint) -> str:
    needed = search.needed(point)
    if needed is not None:
        return f"batch {units.count(point.size)} was measured to need {units.size(needed)}"
    if point.predicted_bytes is not None:
        return f"batch {units.count(point.size)} is predicted to need {units.size(point.predicted_bytes)}"
    return f"batch {units.count(point.size)} {'ran out of memory' if point.outcome == RAN_OUT else 'was not run'}"
