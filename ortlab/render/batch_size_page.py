"""The page of a search: its points, the figure, what they say, and what the numbers are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.memory.measured import RESIDENT
from ortlab.render.page import Block, Cell, Column, Drawing, Mark, Note, Page, Table, row
from ortlab.studies.batch_size import (
    FAILED,
    FELL_BACK,
    FITS,
    OVER,
    PREDICTED,
    RAN_OUT,
    TOO_LARGE,
    first_misfit,
    following,
    plans_name,
)

if TYPE_CHECKING:
    from ortlab.studies.batch_size import BatchSizePoint, BatchSizeSearch

_COLUMNS: Final = (
    Column("batch", numeric=True, meaning="samples in a batch"),
    Column("recomputed", meaning="the operators whose results are recomputed instead of kept"),
    Column("outcome", meaning="whether it ran under the limit"),
    Column("memory, predicted", numeric=True, meaning="predicted from the smaller batches, before it ran"),
    Column("memory, measured", numeric=True, meaning="measured; see below what"),
    Column("samples", numeric=True, meaning="measured: median over the warm steps of all rounds"),
    Column("quartiles", numeric=True, meaning="measured: of the samples per second over the warm steps"),
    Column("why"),
)

_MARKS: Final = {
    FITS: Mark.PLAIN,
    OVER: Mark.WARN,
    RAN_OUT: Mark.WARN,
    PREDICTED: Mark.QUIET,
    FELL_BACK: Mark.BAD,
    FAILED: Mark.BAD,
}


def batch_size_page(search: BatchSizeSearch) -> Page:
    """Say what a search found, what did not fit, and how to go on if it was interrupted."""
    blocks: list[Block] = []
    if search.stopped and following(search) is not None:
        blocks.append(
            Note(
                f"Interrupted after {units.count(len(search.points))} points. "
                "Go on: lab.find_batch_size(make_batch, resume=...).",
                Mark.WARN,
            )
        )
    best = search.best
    blocks += [Note(sentence) for sentence in (closing_sentence(search), best_sentence(search)) if sentence]
    if search.points:
        order = sorted(search.points, key=lambda one: (_place(search, one), one.size))
        blocks.append(Table("", _COLUMNS, tuple(_row(search, one, best) for one in order)))
        blocks += [_drawing(search), _sources(search)]
    limit = f"{units.size(search.asked_bytes)} of {search.limit_of}"
    return Page(
        f"Batch sizes {search.number} of {search.model}: batch sizes on {search.engine} under {limit}",
        tuple(blocks),
    )


def _place(search: BatchSizeSearch, point: BatchSizePoint) -> int:
    sets = ((), *(search.plan_sets or ()))
    return sets.index(point.plans) if point.plans in sets else len(sets)


def _row(search: BatchSizeSearch, point: BatchSizePoint, best: BatchSizePoint | None) -> tuple[Cell, ...]:
    low, high = point.spread
    spread = f"{units.rate(low)} to {units.rate(high)}" if point.timed else ""
    is_best = point is best
    return row(
        units.count(point.size),
        Cell(plans_name(point.plans), Mark.PLAIN if point.plans else Mark.QUIET, more=",".join(point.plans)),
        Cell(
            "fits, the fastest" if is_best else point.outcome, Mark.GOOD if is_best else _MARKS[point.outcome]
        ),
        units.size(point.predicted_bytes) if point.predicted_bytes is not None else "",
        "" if (needed := search.needed(point)) is None else units.size(needed),
        units.rate(point.samples_per_s) if point.timed else "",
        spread,
        units.fold(point.reason),
    )


def _drawing(search: BatchSizeSearch) -> Drawing:
    what = "Samples per second and memory against the batch, with the limit; ortlab.plot(search) draws it."

    def svg() -> str:
        from ortlab.render.batch_size_plot import plot
        from ortlab.render.plots import svg as inline

        return inline(plot(search), what)

    return Drawing(what, svg)


def _sources(search: BatchSizeSearch) -> Note:
    """Say once, under the table, what the numbers are and what they are not."""
    kinds = ", ".join(dict.fromkeys(one.kind for one in search.points if one.kind))
    kept, rounds, steps = units.size(search.kept_bytes), units.count(search.rounds), units.count(search.steps)
    pace = f"Samples per second: measured on {search.device}, {rounds} rounds of {steps} warm steps."
    of = "what a step needs above its start" if not search.of_device else f"peak of {search.limit_of}"
    kept = f"without {kept} of weights and optimizer state that the search keeps to go back to"
    memory = f"Memory: {of}, measured, {kinds or 'none'}, {kept}; predicted on the straight line through the smaller"
    lines = [pace, f"{memory} batches."]
    if RESIDENT in kinds:
        more = (
            "They are of live buffers. An ordinary heap, and ONNX Runtime's arena, keep freed memory as well"
        )
        highest = max((one.ordinary_peak_bytes or 0 for one in search.points), default=0)
        lines.append(
            f"{more}: the timed runs rose to {units.size(highest)} at most." if highest else f"{more}."
        )
    return Note("\n".join(lines), Mark.QUIET)


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
