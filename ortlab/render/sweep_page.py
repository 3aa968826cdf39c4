"""The page of a sweep: its points by time and by memory, the figure, and what could not be measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ortlab import units
from ortlab.options.configuration import engine_kind
from ortlab.records.verdicts import MINIMUM_ROUNDS
from ortlab.render.page import Block, Cell, Column, Drawing, Folded, Mark, Note, Page, Table, row
from ortlab.render.verdict_cells import BASELINE, MEMORY_MEASURED, reasons, verdict_cell

if TYPE_CHECKING:
    from ortlab.records.runs import Run
    from ortlab.studies.sweep import Sweep
    from ortlab.studies.sweep_outcomes import Outcome
    from ortlab.studies.sweep_points import Point

_COLUMNS = (
    Column("point", meaning="its number in the order of the grid, and what differs between the points"),
    Column("time", numeric=True, meaning="measured: step time over the baseline's, with 95 % interval"),
    Column(
        "verdict", meaning="what may be said; nothing where the machine may have drifted between the runs"
    ),
    Column("step", numeric=True, meaning="measured: median wall time of a warm step, all rounds together"),
    Column("step memory", numeric=True, meaning="measured: how far a step rises above its start"),
    Column("memory", numeric=True, meaning="measured: step memory against the baseline's"),
    Column(
        "best trade-off",
        meaning="no other point is faster without more memory; memory within 2 % counts as equal",
    ),
    Column("last loss", numeric=True, meaning="measured: loss of the last step"),
    Column("loss difference", numeric=True, meaning="measured: largest relative one, step by step"),
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
        blocks.append(_drawing(sweep))
    elif sweep.complete:
        blocks.append(Note("No point could be measured.", Mark.BAD))
    blocks += _not_measured(sweep)
    blocks += reasons(
        ((sweep.name(one.point), one.time.reason) for one in outcomes), "lab.sweep(..., rounds=3)"
    )
    blocks += [
        Note(
            f"Point {one.point.number} ({sweep.name(one.point)}): {'; '.join(one.remarks)}.",
            _remark_mark(one),
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
    steps = f"{units.count(sweep.count)} {'steps' if sweep.count > 1 else 'step'}"
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
    is_base = point is sweep.baseline
    ratio = units.ratio(1.0) if is_base else units.ratio_interval(one.time_ratio, one.time_low, one.time_high)
    return row(
        Cell(f"{point.number}  {sweep.name(point)}", Mark.BAD if point.fell_back else Mark.PLAIN),
        ratio,
        BASELINE if is_base and not point.fell_back else verdict_cell(one.verdict, one.memory),
        units.duration(point.step_ms),
        units.size(point.step_memory_bytes),
        "-" if is_base else units.change(one.memory_ratio),
        Cell("yes", Mark.GOOD) if one.on_front else "",
        units.loss(point.runs[-1].losses[-1]),
        "-" if is_base else units.difference(one.loss_difference),
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


def _drawing(sweep: Sweep) -> Drawing:
    what = "Step time against step memory, best trade-offs joined; ortlab.plot(sweep) draws it."

    def svg() -> str:
        from ortlab.render.plots import svg as inline
        from ortlab.render.sweep_plot import plot

        return inline(plot(sweep), what)

    return Drawing(what, svg)


def _remark_mark(one: Outcome) -> Mark:
    return Mark.BAD if one.fell_back else Mark.WARN


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
