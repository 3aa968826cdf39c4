"""The page and the figure of a sweep: its points by time and by memory, and what could not be measured."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ortlab import units
from ortlab.options.configuration import engine_kind
from ortlab.records.verdicts import MINIMUM_ROUNDS
from ortlab.render.comparison_page import COMPARED, MEMORY_MEASURED, compared_cells, reasons, remark_mark
from ortlab.render.execution_words import ENGINE_NAMES
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row
from ortlab.render.plots import (
    FALLBACK,
    INK,
    MIB,
    drawing,
    dress,
    engine_colour,
    key,
    new_figure,
    plain,
    quartiles,
    say,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.records.runs import Run
    from ortlab.studies.sweep import Outcome, Point, Sweep

_COLUMNS = (
    Column("point", meaning="its number in the order of the grid, and what differs between the points"),
    *COMPARED[:5],
    Column(
        "best trade-off",
        meaning="no other point is faster without more memory; memory within 2 % counts as equal",
    ),
    *COMPARED[5:],
    Column("rebuilt", meaning="what was built for the point, all rounds together; never part of a step time"),
)


def sweep_page(sweep: Sweep) -> Page:
    """Say what a sweep found, what it could not measure, and how to go on if it was interrupted."""
    outcomes = sweep.outcomes()
    blocks: list[Block] = []
    if not sweep.complete:
        blocks.append(
            Note(
                f"Interrupted: {sweep.runs_done} of {sweep.runs_planned} runs are done. "
                "Go on: lab.sweep(resume=...), or %ort_sweep --resume.",
                Mark.WARN,
            )
        )
    if sweep.constants:
        words = ", ".join(f"{name}={value}" for name, value in sweep.constants.items())
        blocks.append(Note(f"At every point: {words}.", Mark.QUIET))
    if outcomes:
        blocks += _tables(sweep, outcomes)
        blocks.append(
            drawing(
                "Step time against step memory, best trade-offs joined; ortlab.plot(sweep) draws it.",
                lambda: sweep_plot(sweep),
            )
        )
    elif sweep.complete:
        blocks.append(Note("No point could be measured.", Mark.BAD))
    blocks += _not_measured(sweep)
    blocks += reasons(
        ((sweep.name(one.point), one.time.reason) for one in outcomes), "lab.sweep(..., rounds=3)"
    )
    blocks += [
        Note(
            f"Point {one.point.number} ({sweep.name(one.point)}): {'; '.join(one.remarks)}.",
            remark_mark(one),
        )
        for one in outcomes
        if one.remarks
    ]
    if outcomes:
        blocks.append(_sources(sweep, outcomes))
    return Page(_title(sweep), tuple(blocks))


def _title(sweep: Sweep) -> str:
    points = units.count(len(sweep.points))
    rounds = f"{units.count(sweep.rounds)} rounds of " if sweep.rounds > 1 else ""
    steps = units.many(sweep.count, "step")
    return f"Sweep {sweep.number} of {sweep.model}: {points} points, {rounds}{steps} each"


def _tables(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Block]:
    """Show the rows by time, and folded in other orders: HTML without scripts cannot sort."""
    orders: tuple[tuple[str, Callable[[Outcome], float]], ...] = (
        ("By step memory", lambda one: one.point.step_memory_bytes),
        ("In the order of the grid", lambda one: one.point.number),
    )
    if len(outcomes) == 1:
        return [_table(sweep, outcomes, "")]
    folded = [
        Folded(title, blocks=(_table(sweep, sorted(outcomes, key=key), ""),), repeats=True)
        for title, key in orders
        if not any(math.isnan(key(one)) for one in outcomes)
    ]
    return [_table(sweep, outcomes, "The fastest first"), *folded]


def _table(sweep: Sweep, outcomes: Sequence[Outcome], caption: str) -> Table:
    return Table(caption, _COLUMNS, tuple(_row(sweep, one) for one in outcomes))


def _row(sweep: Sweep, one: Outcome) -> tuple[Cell, ...]:
    point = one.point
    cells = compared_cells(one, one.memory_ratio, is_base=point is sweep.baseline)
    return row(
        Cell(f"{point.number}  {sweep.name(point)}", Mark.BAD if point.fell_back else Mark.PLAIN),
        *cells[:5],
        Cell("yes", Mark.GOOD) if one.on_front else "",
        *cells[5:],
        _rebuilt(point),
    )


def _rebuilt(point: Point) -> str:
    build = point.rebuilt
    if build is None:
        return "nothing"
    what = "compiled" if engine_kind(point.runs[0].engine) == "compile" else build.stage
    times = f" in {len(point.builds)} builds" if len(point.builds) > 1 else ""
    return f"{what}, {units.duration(build.total_ms)}{times}"


def _not_measured(sweep: Sweep) -> list[Block]:
    failed = [point for point in sweep.points if point.state in {"failed", "skipped"}]
    if not failed:
        return []
    columns = (Column("point"), Column("what happened"), Column("reason"))
    marks = {"failed": Mark.BAD, "skipped": Mark.QUIET}
    rows = tuple(
        row(
            f"{point.number}  {sweep.name(point)}",
            Cell(point.state if point.state == "failed" else "not run", marks[point.state]),
            point.failure or point.skipped,
        )
        for point in failed
    )
    return [Table("Not measured", columns, rows)]


def _sources(sweep: Sweep, outcomes: Sequence[Outcome]) -> Note:
    """Say once, under the tables, what the numbers are and what they are not."""
    runs: list[Run] = [run for one in outcomes for run in one.point.runs]
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    base = (
        f"Ratios are against point {sweep.baseline.number} ({sweep.name(sweep.baseline)}); below 1 is less."
    )
    if not sweep.baseline.measured:
        base = f"There are no ratios: the baseline, point {sweep.baseline.number}, was not measured."
    rounds = sweep.rounds
    how = f"Brackets: 95 % interval over {rounds} rounds in turns, which a drift of the machine meets alike."
    if rounds < MINIMUM_ROUNDS:
        how = (
            f"Brackets: 95 % bootstrap interval over warm steps of {rounds} {'rounds' if rounds > 1 else 'round'}, "
            f"which a drift of the machine is not in; {MINIMUM_ROUNDS} rounds or more are compared round by round."
        )
    lines = [
        f"{base} {how}",
        f"Times: measured on {devices}, median of warm steps, what was built left out.",
        MEMORY_MEASURED,
    ]
    missing = dict.fromkeys(one.point.no_step_memory for one in outcomes if one.point.no_step_memory)
    lines += [f"No step memory: {reason}" for reason in missing]
    return Note("\n".join(lines), Mark.QUIET)


# ---- the figure -----------------------------------------------------------------------------------------------------


_NAMES_SHOWN = 24
"""Points that the key names; a sweep's page names all."""

_NAME_WIDTH = 46  # characters
_INCHES_PER_LINE = 0.17


def sweep_plot(sweep: Sweep) -> Figure:
    """Draw step time, the median with quartiles, against step memory.

    Points on the front, which no other point beats in both, are filled and joined. Where step memory is
    not known, the points stand in a row by time.
    Points that were not measured are left out.
    """
    outcomes = sweep.outcomes()
    named = sorted(outcomes, key=lambda one: one.point.number)[:_NAMES_SHOWN]
    lines = sum(_label(sweep, one).count("\n") + 1 for one in named)
    figure = new_figure(max(3.6, 1.2 + _INCHES_PER_LINE * lines))
    axes = figure.add_subplot()
    if not outcomes:
        dress(axes, "Step time against memory", "", "step [ms]")
        say(axes, "No point was measured.")
        return figure
    with_memory = not any(math.isnan(one.point.step_memory_bytes) for one in outcomes)
    devices = ", ".join(dict.fromkeys(run.device for one in outcomes for run in one.point.runs))
    for position, one in enumerate(outcomes):
        _mark(axes, one, one.point.step_memory_bytes / MIB if with_memory else position)
    if with_memory:
        _join_front(axes, outcomes)
    memory = "step memory [MiB]" if with_memory else "points, the fastest first"
    heading = f"Step time and step memory, measured on {devices} (median; whiskers: quartiles)"
    dress(axes, heading, memory, "step [ms]")
    axes.margins(0.12)
    _name(axes, sweep, named, len(outcomes))
    return figure


def _mark(axes: Axes, one: Outcome, memory: float) -> None:
    point = one.point
    low, high = quartiles(point.warm_steps)
    colour = engine_colour(point.runs[0].engine, fell_back=point.fell_back)
    axes.errorbar(
        [memory],
        [point.step_ms],
        yerr=[[point.step_ms - low], [high - point.step_ms]],
        color=colour,
        marker="o",
        markersize=7,
        markerfacecolor=colour if one.on_front else "none",
        capsize=3,
        linewidth=1,
    )
    axes.annotate(
        str(point.number),
        (memory, point.step_ms),
        xytext=(6, 5),
        textcoords="offset points",
        fontsize=8,
        color=INK,
        fontweight="bold" if one.on_front else "normal",
    )


def _join_front(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    front = sorted((one.point for one in outcomes if one.on_front), key=lambda point: point.step_memory_bytes)
    axes.plot(
        [point.step_memory_bytes / MIB for point in front],
        [point.step_ms for point in front],
        color=INK,
        linestyle="--",
        linewidth=1,
        zorder=0,
    )


def _name(axes: Axes, sweep: Sweep, named: Sequence[Outcome], total: int) -> None:
    """Write the key beside the axes: number and name of each point, and what the marks mean."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="none", label=_label(sweep, one)) for one in named]
    if total > len(named):
        handles.append(Line2D([], [], linestyle="none", label=f"and {total - len(named)} more"))
    engines = dict.fromkeys(engine_kind(one.point.runs[0].engine) for one in named if not one.fell_back)
    handles += [
        Line2D(
            [],
            [],
            linestyle="none",
            marker="o",
            color=engine_colour(name),
            label=ENGINE_NAMES[name],
        )
        for name in engines
    ]
    if any(one.fell_back for one in named):
        handles.append(
            Line2D([], [], linestyle="none", marker="o", color=FALLBACK, label="PYTORCH (fallback)")
        )
    handles.append(
        Line2D([], [], linestyle="--", marker="o", color=INK, linewidth=1, label="filled: best trade-offs")
    )
    key(axes, 1.02, handles=handles, handlelength=1.2)


def _label(sweep: Sweep, one: Outcome) -> str:
    """Name a point."""
    base = ", baseline" if one.point is sweep.baseline else ""
    name = units.fold(units.printable(sweep.name(one.point)), 2 * _NAME_WIDTH)
    words = f"{one.point.number}  {name}{base}"
    # A hyphen is the minus of a plan, "Gelu+:1:-1", and no place to break a line at.
    lines = textwrap.fill(words, _NAME_WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return plain(lines)
