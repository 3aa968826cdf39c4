"""The page and the figure of a search for the batch size: its points, what they say, and what the numbers are."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.memory.measured import RESIDENT
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row
from ortlab.render.plots import COLOURS, FALLBACK, INK, MIB, drawing, dress, key, new_figure, say
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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.studies.batch_size import BatchSizePoint, BatchSizeSearch, Plans

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
    said = closing_sentence(search), largest_sentence(search), best_sentence(search)
    blocks += [Note(sentence) for sentence in said if sentence]
    if search.points:
        order = sorted(search.points, key=lambda one: (_place(search, one), one.size))
        blocks.append(Table("", _COLUMNS, tuple(_row(search, one, best) for one in order)))
        blocks += [
            drawing(
                "Samples per second and memory against the batch, with the limit; ortlab.plot(search) draws it.",
                lambda: batch_size_plot(search),
            ),
            _sources(search),
        ]
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


def largest_sentence(search: BatchSizeSearch) -> str:
    """Say which batch is the largest that fits, where it is another than the ones that the other sentences name."""
    named = [one.size for one in (search.largest(()), search.best_with_plans, search.best) if one]
    timed = [one for one in search.points if one.timed]
    largest = max(timed, key=lambda one: (one.size, one.samples_per_s), default=None)
    if largest is None or largest.size <= max(named):
        return ""
    what = f"Largest batch: {units.count(largest.size)}, recomputing {plans_name(largest.plans)}"
    return f"{what}, {units.rate(largest.samples_per_s)}."


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


# ---- the figure -----------------------------------------------------------------------------------------------------


_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_HEIGHT: Final = 5.2  # inches
_NAME_WIDTH: Final = 26  # characters


def batch_size_plot(search: BatchSizeSearch) -> Figure:
    """Draw samples per second (median, quartiles) and memory of the batches, those that do not fit hollow."""
    figure = new_figure(_HEIGHT)
    top, bottom = figure.subplots(2, sharex=True)
    sets = tuple(dict.fromkeys(one.plans for one in search.points))
    for position, plans in enumerate(sets):
        points = sorted((one for one in search.points if one.plans == plans), key=lambda one: one.size)
        colour, marker = COLOURS[position % len(COLOURS)], _MARKERS[position % len(_MARKERS)]
        _draw_pace(top, points, colour, marker)
        _draw_memory(bottom, search, points, colour, marker)
    dress(
        top, f"Samples per second, measured on {search.device} (median; whiskers: quartiles)", "", "samples/s"
    )
    kinds = ", ".join(dict.fromkeys(one.kind for one in search.points if one.kind))
    what = f"Peak of {search.limit_of}" if search.of_device else "Step memory"
    dress(bottom, f"{what} ({kinds or 'not measured'})", "batch", "MiB")
    limit = search.asked_bytes / MIB
    bottom.axhline(limit, color=FALLBACK, linestyle="--", linewidth=1)
    bottom.annotate(
        f"limit: {units.size(search.asked_bytes)}",
        (0.0, limit),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8,
        color=FALLBACK,
    )
    if not any(one.timed for one in search.points):
        say(top, "No batch was timed.")
    _scale(bottom, sorted({one.size for one in search.points}))
    top.set_ylim(bottom=0)
    _key(top, sets)
    return figure


def _draw_pace(axes: Axes, points: list[BatchSizePoint], colour: str, marker: str) -> None:
    timed = [one for one in points if one.timed]
    if not timed:
        return
    medians = [one.samples_per_s for one in timed]
    spread = [
        [max(0.0, median - one.spread[0]) for one, median in zip(timed, medians, strict=True)],
        [max(0.0, one.spread[1] - median) for one, median in zip(timed, medians, strict=True)],
    ]
    axes.errorbar(
        [one.size for one in timed],
        medians,
        yerr=spread,
        color=colour,
        marker=marker,
        markersize=5,
        capsize=3,
        linewidth=1.2,
    )


def _draw_memory(
    axes: Axes, search: BatchSizeSearch, points: list[BatchSizePoint], colour: str, marker: str
) -> None:
    measured = [one for one in points if search.needed(one) is not None]
    axes.plot(
        [one.size for one in measured],
        [(search.needed(one) or 0) / MIB for one in measured],
        color=colour,
        linewidth=1.2,
    )
    for one in points:
        needed = search.needed(one)
        known = needed if needed is not None else one.predicted_bytes
        if known is not None:
            filled = colour if one.fits else "none"
            axes.plot(
                [one.size], [known / MIB], color=colour, marker=marker, markersize=5, markerfacecolor=filled
            )


def _scale(axes: Axes, sizes: list[int]) -> None:
    if not sizes:
        return
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _position: units.count(size)))


def _key(axes: Axes, sets: tuple[Plans, ...]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[position % len(COLOURS)],
            marker=_MARKERS[position % len(_MARKERS)],
            markersize=5,
            linewidth=1.2,
            label=textwrap.fill(units.fold(units.printable(plans_name(plans)), 4 * _NAME_WIDTH), _NAME_WIDTH),
        )
        for position, plans in enumerate(sets)
    ]
    handles.append(
        Line2D(
            [],
            [],
            linestyle="none",
            marker="o",
            markerfacecolor="none",
            color=INK,
            label=textwrap.fill("hollow: does not fit, or predicted and not run", _NAME_WIDTH),
        )
    )
    key(axes, handles=handles)
