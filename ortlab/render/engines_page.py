"""The page of candidates: time, memory and loss of each beside ONNX Runtime's, and what could not be run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab import units
from ortlab.options.configuration import engine_kind
from ortlab.render.page import Block, Cell, Column, Drawing, Mark, Note, Page, Table, row
from ortlab.render.run_pages import engine_words
from ortlab.render.verdict_cells import BASELINE, MEMORY_MEASURED, reasons, verdict_cell

if TYPE_CHECKING:
    from ortlab.studies.engine_comparison import Candidate, EngineComparison

_COLUMNS = (
    Column("candidate", meaning="who executed the model, and how it differs from the lab as it is set"),
    Column("time", numeric=True, meaning="measured: step time over the baseline's, with 95 % interval"),
    Column(
        "verdict", meaning="what may be said; nothing where the machine may have drifted between the runs"
    ),
    Column("step", numeric=True, meaning="measured: median wall time of a warm step, all rounds together"),
    Column("step memory", numeric=True, meaning="measured: how far a step rises above its start"),
    Column("memory", numeric=True, meaning="measured: step memory against the baseline's"),
    Column("last loss", numeric=True, meaning="measured: loss of the last step"),
    Column("loss difference", numeric=True, meaning="measured: largest relative one, step by step"),
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
        blocks.append(Table("", _COLUMNS, tuple(_row(candidates, candidate) for candidate in measured)))
    else:
        blocks.append(Note("No candidate could be measured.", Mark.BAD))
    if not_run := [candidate for candidate in every if candidate.reason]:
        columns = (Column("candidate"), Column("what happened"), Column("reason"))
        rows = tuple(
            row(
                candidate_words(candidate),
                Cell("failed", Mark.BAD) if candidate.point.failure else Cell("not run", Mark.QUIET),
                candidate.reason,
            )
            for candidate in not_run
        )
        blocks.append(Table("Not measured", columns, rows))
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
        blocks += [_drawing(candidates), _sources(measured)]
    rounds = f"{units.count(candidates.sweep.rounds)} rounds of " if candidates.sweep.rounds > 1 else ""
    steps = f"{units.count(candidates.sweep.count)} {'steps' if candidates.sweep.count > 1 else 'step'}"
    return Page(f"Engines of {candidates.sweep.model}: {rounds}{steps} each", tuple(blocks))


def candidate_words(candidate: Candidate) -> str:
    """Name a candidate in words: "ONNX Runtime, memory_level=1", "torch.compile with activation memory budget 0.5"."""
    _, comma, changed = candidate.name.partition(", ")
    return f"{engine_words(candidate.engine)}{comma}{changed}"


def _row(candidates: EngineComparison, candidate: Candidate) -> tuple[Cell, ...]:
    outcome, point = candidate.outcome, candidate.point
    assert outcome is not None  # noqa: S101 - only measured candidates have a row
    is_base = point is candidates.sweep.baseline
    name = Cell(candidate_words(candidate), Mark.BAD if point.fell_back else Mark.PLAIN)
    time = units.ratio_interval(outcome.time_ratio, outcome.time_low, outcome.time_high)
    return row(
        name,
        units.ratio(1.0) if is_base else time,
        BASELINE if is_base and not point.fell_back else verdict_cell(outcome.verdict, outcome.memory),
        units.duration(point.step_ms),
        units.size(candidate.rise_bytes),
        "-" if is_base else units.change(candidate.rise_ratio),
        units.loss(point.runs[-1].losses[-1]),
        "-" if is_base else units.difference(outcome.loss_difference),
    )


def _drawing(candidates: EngineComparison) -> Drawing:
    what = "Step time against the memory of a step, one mark per candidate; ortlab.plot(candidates) draws it."

    def svg() -> str:
        from ortlab.render.engines_plot import engines_plot
        from ortlab.render.plots import svg as inline

        return inline(engines_plot(candidates), what)

    return Drawing(what, svg)


def _sources(measured: list[Candidate]) -> Note:
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
