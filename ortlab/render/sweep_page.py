"""Pages and figures of a sweep and of engines: points by time and by memory, and what could not be measured."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ortlab import units
from ortlab.options.configuration import engine_kind
from ortlab.records.verdicts import MINIMUM_ROUNDS, SLOW
from ortlab.render.comparison_page import COMPARED, MEMORY_MEASURED, compared_cells, reasons, remark_mark
from ortlab.render.execution_words import ENGINE_NAMES, engine_words
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
    from ortlab.studies.engine_comparison import Candidate, EngineComparison
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
    blocks += _not_measured("point", ((f"{one.number}  {sweep.name(one)}", one) for one in sweep.points))
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


def _not_measured(what: str, points: Iterable[tuple[str, Point]]) -> list[Block]:
    """List points that failed or were not run, each with its name and the reason."""
    rows = tuple(
        row(
            name,
            Cell("failed", Mark.BAD) if point.state == "failed" else Cell("not run", Mark.QUIET),
            point.failure or point.skipped,
        )
        for name, point in points
        if point.state in {"failed", "skipped"}
    )
    columns = (Column(what), Column("what happened"), Column("reason"))
    return [Table("Not measured", columns, rows)] if rows else []


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
        place = one.point.step_memory_bytes / MIB if with_memory else position
        colour = engine_colour(one.point.runs[0].engine, fell_back=one.point.fell_back)
        best = one.on_front
        _mark(axes, one.point, place, str(one.point.number), filled=best, bold=best, color=colour)
    if with_memory:
        _join_front(axes, outcomes)
    memory = "step memory [MiB]" if with_memory else "points, the fastest first"
    heading = f"Step time and step memory, measured on {devices} (median; whiskers: quartiles)"
    dress(axes, heading, memory, "step [ms]")
    axes.margins(0.12)
    _name(axes, sweep, named, len(outcomes))
    return figure


def _mark(
    axes: Axes, point: Point, place: float, number: str, *, filled: bool, bold: bool, **look: Any
) -> None:
    """Draw a point's median step time, with quartiles, and its number."""
    low, high = quartiles(point.warm_steps)
    axes.errorbar(
        [place],
        [point.step_ms],
        yerr=[[point.step_ms - low], [high - point.step_ms]],
        markersize=7,
        markerfacecolor=look["color"] if filled else "none",
        capsize=3,
        linewidth=1,
        linestyle="none",
        **{"marker": "o", **look},
    )
    axes.annotate(
        number,
        (place, point.step_ms),
        xytext=(6, 5),
        textcoords="offset points",
        fontsize=8,
        color=INK,
        fontweight="bold" if bold else "normal",
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


_CANDIDATE_COLUMNS = (
    Column("candidate", meaning="who executed the model, and how it differs from the lab as it is set"),
    *COMPARED,
)


def engines_page(candidates: EngineComparison) -> Page:
    """Say what each candidate took, what it did to the model, and which could not be run."""
    every = list(candidates)
    measured = [candidate for candidate in every if candidate.outcome is not None]
    blocks: list[Block] = []
    if not candidates.sweep.complete:
        done, planned = candidates.sweep.runs_done, candidates.sweep.runs_planned
        blocks.append(Note(f"Interrupted: {done} of {planned} runs are done.", Mark.WARN))
    if measured:
        blocks.append(
            Table(
                "", _CANDIDATE_COLUMNS, tuple(_candidate_row(candidates, candidate) for candidate in measured)
            )
        )
    else:
        blocks.append(Note("No candidate could be measured.", Mark.BAD))
    if (times := candidates.times_of_pytorch) > SLOW:
        blocks.append(Note(f"ONNX Runtime takes {times:.2f} times PyTorch's time.", Mark.WARN))
    blocks += _not_measured("candidate", ((candidate_words(one), one.point) for one in every))
    blocks += [
        Note(f"{candidate_words(candidate)}: {candidate.detail}.", Mark.QUIET)
        for candidate in measured
        if candidate.detail
    ]
    blocks += [
        Note(f"{candidate_words(candidate)}: no step memory: {candidate.no_memory}", Mark.WARN)
        for candidate in every
        if candidate.no_memory
    ]
    blocks += [
        Note(
            f"{candidate_words(candidate)}: {'; '.join(candidate.outcome.remarks)}.",
            Mark.BAD if candidate.outcome.fell_back else Mark.WARN,
        )
        for candidate in measured
        if candidate.outcome is not None and candidate.outcome.remarks
    ]
    blocks += reasons(
        (
            (candidate_words(candidate), candidate.outcome.time.reason)
            for candidate in measured
            if candidate.outcome
        ),
        "lab.compare_engines() with three rounds or more",
    )
    if measured:
        blocks += [
            drawing(
                "Step time against the memory of a step, one mark per candidate; ortlab.plot(candidates) draws it.",
                lambda: engines_plot(candidates),
            ),
            _candidate_sources(measured),
        ]
    rounds = f"{units.count(candidates.sweep.rounds)} rounds of " if candidates.sweep.rounds > 1 else ""
    steps = units.many(candidates.sweep.count, "step")
    return Page(f"Engines of {candidates.sweep.model}: {rounds}{steps} each", tuple(blocks))


def candidate_words(candidate: Candidate) -> str:
    """Name a candidate in words: "ONNX Runtime, memory_level=1", "torch.compile with activation memory budget 0.5"."""
    _, comma, changed = candidate.name.partition(", ")
    return f"{engine_words(candidate.engine)}{comma}{changed}"


def _candidate_row(candidates: EngineComparison, candidate: Candidate) -> tuple[Cell, ...]:
    outcome, point = candidate.outcome, candidate.point
    assert outcome is not None  # noqa: S101 - only measured candidates have a row
    name = Cell(candidate_words(candidate), Mark.BAD if point.fell_back else Mark.PLAIN)
    is_base = point is candidates.sweep.baseline
    return (name, *compared_cells(outcome, candidate.rise_ratio, is_base=is_base))


def _candidate_sources(measured: list[Candidate]) -> Note:
    devices = ", ".join(dict.fromkeys(run.device for candidate in measured for run in candidate.point.runs))
    lines = [
        "Ratios are against ONNX Runtime as the lab is set; below 1 is less.",
        "Brackets: 95 % interval over rounds in turns (with fewer than three, over the warm steps of all).",
        f"Times: measured on {devices}; what was built or compiled is no part of them.",
    ]
    if any(candidate.rise_bytes > 0 for candidate in measured):
        lines.append(MEMORY_MEASURED)
    if any(engine_kind(candidate.engine) != "ort" for candidate in measured):
        lines.append(
            "PyTorch and ONNX Runtime draw dropout masks from different generators: with dropout, losses differ."
        )
    return Note("\n".join(lines), Mark.QUIET)


# ---- the figure -----------------------------------------------------------------------------------------------------


_MARKERS = {"ort": "o", "eager": "s", "checkpoint": "^", "compile": "D"}


def engines_plot(candidates: EngineComparison) -> Figure:
    """Draw the median step time, with quartiles, against step memory.

    Where step memory is not known, the candidates stand in a row.
    Those that were not measured are left out.
    """
    shown = [candidate for candidate in candidates if candidate.outcome is not None]
    figure = new_figure(max(3.4, 1.4 + 0.34 * len(shown)))
    axes = figure.add_subplot()
    if not shown:
        dress(axes, "Step time against memory", "", "step [ms]")
        say(axes, "No candidate was measured.")
        return figure
    devices = ", ".join(dict.fromkeys(run.device for candidate in shown for run in candidate.point.runs))
    memory, words = _memory(shown)
    for number, (candidate, place) in enumerate(zip(shown, memory, strict=True), start=1):
        name = textwrap.fill(
            units.fold(units.printable(f"{number}  {candidate_words(candidate)}"), 2 * _NAME_WIDTH),
            _NAME_WIDTH,
            subsequent_indent="    ",
        )
        _mark(
            axes,
            candidate.point,
            place,
            str(number),
            filled=True,
            bold=False,
            color=engine_colour(candidate.engine, fell_back=candidate.point.fell_back),
            marker=_MARKERS.get(engine_kind(candidate.engine), "o"),
            label=plain(name),
        )
    dress(
        axes, f"Step time and memory, measured on {devices} (median; whiskers: quartiles)", words, "step [ms]"
    )
    axes.margins(0.14)
    axes.set_ylim(bottom=0)
    key(axes, 1.02, handlelength=1.2)
    return figure


def _memory(shown: list[Candidate]) -> tuple[list[float], str]:
    """Return where each candidate stands, and what that is: step memory, or places in a row."""
    sizes = [candidate.rise_bytes / MIB for candidate in shown]
    if not any(map(math.isnan, sizes)):
        return sizes, "step memory [MiB]"
    return [float(number) for number in range(1, len(shown) + 1)], "candidates"
