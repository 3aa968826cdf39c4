"""The page and the figure of engines: time, memory and loss of each, and what could not be run."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from ortlab import units
from ortlab.options.configuration import engine_kind
from ortlab.records.verdicts import SLOW
from ortlab.render.comparison_page import (
    COMPARED,
    MEMORY_MEASURED,
    compared_cells,
    reasons,
)
from ortlab.render.execution_words import engine_words
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row
from ortlab.render.plots import (
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
    from matplotlib.figure import Figure

    from ortlab.studies.engine_comparison import Candidate, EngineComparison

_COLUMNS = (
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
        blocks.append(Table("", _COLUMNS, tuple(_row(candidates, candidate) for candidate in measured)))
    else:
        blocks.append(Note("No candidate could be measured.", Mark.BAD))
    if (times := candidates.times_of_pytorch) > SLOW:
        blocks.append(Note(f"ONNX Runtime takes {times:.2f} times PyTorch's time.", Mark.WARN))
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
        blocks += [
            drawing(
                "Step time against the memory of a step, one mark per candidate; ortlab.plot(candidates) draws it.",
                lambda: engines_plot(candidates),
            ),
            _sources(measured),
        ]
    rounds = f"{units.count(candidates.sweep.rounds)} rounds of " if candidates.sweep.rounds > 1 else ""
    steps = units.many(candidates.sweep.count, "step")
    return Page(f"Engines of {candidates.sweep.model}: {rounds}{steps} each", tuple(blocks))


def candidate_words(candidate: Candidate) -> str:
    """Name a candidate in words: "ONNX Runtime, memory_level=1", "torch.compile with activation memory budget 0.5"."""
    _, comma, changed = candidate.name.partition(", ")
    return f"{engine_words(candidate.engine)}{comma}{changed}"


def _row(candidates: EngineComparison, candidate: Candidate) -> tuple[Cell, ...]:
    outcome, point = candidate.outcome, candidate.point
    assert outcome is not None  # noqa: S101 - only measured candidates have a row
    name = Cell(candidate_words(candidate), Mark.BAD if point.fell_back else Mark.PLAIN)
    is_base = point is candidates.sweep.baseline
    return (name, *compared_cells(outcome, candidate.rise_ratio, is_base=is_base))


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


# ---- the figure -----------------------------------------------------------------------------------------------------


_MARKERS = {"ort": "o", "eager": "s", "checkpoint": "^", "compile": "D"}
_NAME_WIDTH = 44  # characters


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
        low, high = quartiles(candidate.point.warm_steps)
        colour = engine_colour(candidate.engine, fell_back=candidate.point.fell_back)
        name = textwrap.fill(
            units.fold(units.printable(f"{number}  {candidate_words(candidate)}"), 2 * _NAME_WIDTH),
            _NAME_WIDTH,
            subsequent_indent="    ",
        )
        axes.errorbar(
            [place],
            [candidate.point.step_ms],
            yerr=[[candidate.point.step_ms - low], [high - candidate.point.step_ms]],
            color=colour,
            marker=_MARKERS.get(engine_kind(candidate.engine), "o"),
            markersize=7,
            capsize=3,
            linewidth=1,
            linestyle="none",
            label=plain(name),
        )
        axes.annotate(
            str(number),
            (place, candidate.point.step_ms),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=8,
            color=INK,
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
