"""Pages of runs: one run, the ledger, and runs held against a baseline."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from ortlab.cautions import FELL_BACK, cautions, fallen_share
from ortlab.options import Options
from ortlab.render import units
from ortlab.render.coverage_words import coverage_blocks, extent
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row
from ortlab.render.recorded_tables import density_table, phases_table
from ortlab.runs import EXECUTED_BY_PARTS, Initialization, Ledger, PeakMemory, Run, Step

if TYPE_CHECKING:
    from ortlab.comparison import Comparison, Contrast

ENGINE_NAMES = {
    "ort": "ONNX Runtime",
    "eager": "PyTorch eager",
    "checkpoint": "PyTorch, layers checkpointed",
    "compile": "torch.compile",
}
"""What the engines are called in sentences; `engine_words` says what one is told, too."""

ROWS_SHOWN = 50
"""Runs that the ledger's page shows: the latest ones."""

_RUN = Column("run", meaning="number, who executed it, and the switches that differ from the defaults")
_TIMES = (
    Column("step", numeric=True, meaning="measured: median wall time of a warm step, start-up left out"),
    Column("forward", numeric=True, meaning="measured: median wall time inside the model's forward"),
    Column("backward", numeric=True, meaning="measured: median wall time inside backward() calls"),
    Column("optimizer", numeric=True, meaning="measured: median wall time inside optimizer.step()"),
)
_WAITED = Column("start-up", numeric=True, meaning="reported by ORT: export, graph building, sessions")
_RATIO = Column("time", numeric=True, meaning="measured: step time over the baseline's, with 95 % interval")
_VERDICT = Column("verdict", meaning="what the interval allows to say about time")
_PEAK = Column("peak memory", numeric=True, meaning="measured: highest memory of the run, see below")
_MEMORY = Column("peak memory", numeric=True, meaning="measured, and its ratio to the baseline's")
_LOSS = Column("last loss", numeric=True, meaning="measured: loss of the last step")
LISTED = (_RUN, Column("steps", numeric=True), *_TIMES, _WAITED, _PEAK, _LOSS)
"""Columns of a list of runs; `listed` gives the cells."""

_APART = Column("loss apart", numeric=True, meaning="measured: largest relative difference, step by step")


def run_page(run: Run) -> Page:
    """Say everything that a run holds, each number with where it comes from."""
    asked = engine_words(run.engine)
    blocks: list[Block] = [_executed(run), *_cautions(run), *coverage_blocks(run.coverage), _times(run)]
    if run.initialization is not None:
        blocks.append(_initialization(run.initialization))
    if run.density:
        blocks.append(density_table(run.density))
    if run.phases:
        blocks.append(phases_table(run.phases))
    losses = f"{units.loss(run.losses[0])} → {units.loss(run.losses[-1])}"
    digests = [row(f"{stage} graph", units.fold(d, 16), "SHA-256") for stage, d in run.graph_digests.items()]
    facts = [
        row("engine asked for", asked, "recorded"),
        *([row("mode", run.mode, "recorded")] if run.mode != "training" else []),
        row("device", run.device, "recorded"),
        row("steps", f"{units.count(len(run.steps))} ({units.count(len(run.warm_steps))} warm)", "recorded"),
        row("loss", losses, "measured, first → last step"),
        *_memory_rows(run.memory),
        *([row("optimizer", "; ".join(run.optimizers), "recorded")] if run.optimizers else []),
        row("switches changed", _changed(run), "recorded"),
        row("seed", str(run.seed), "recorded"),
        row("started", run.started_at, "recorded, UTC"),
        row("start digest", units.fold(run.start_digest, 16), "weights, optimizer and random state"),
        row("data digest", units.fold(run.data_digest, 16), "the model's inputs, in order"),
        *digests,
        row("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items()), "recorded"),
    ]
    heads = (Column(""), Column(""), Column("where it comes from"))
    blocks.append(Table("Facts", heads, tuple(facts)))
    return Page(f"Run {title(run)}", tuple(blocks))


def engine_words(engine: str) -> str:
    """Name an engine in a sentence: "torch.compile with activation memory budget 0.5"."""
    kind, _, told = engine.partition(":")
    name = ENGINE_NAMES.get(kind, kind)
    if not told:
        return name
    if kind == "checkpoint":
        return f"PyTorch, {told.replace('+', ', ')} checkpointed"
    return f"{name} with activation memory budget {told}"


def ledger_page(ledger: Ledger, rows_shown: int = ROWS_SHOWN) -> Page:
    """List the latest runs."""
    if not len(ledger):
        return Page("Runs", (Note("No run yet. Run a step: %%ort_step, or lab.step(fn, n=20).", Mark.QUIET),))
    groups = _groups(ledger)
    shown = groups[-rows_shown:]
    runs = [run for group in shown for run in group]
    hidden = len(ledger) - len(runs)
    rows = tuple(_swept(group) if group[0].sweep else listed(group[0]) for group in shown)
    left_out = f"{units.count(hidden)} earlier runs: lab.runs.table() has them." if hidden else ""
    sweeps = dict.fromkeys(group[0].sweep for group in shown if group[0].sweep)
    marked = [
        Note(f"Sweep {number}: lab.sweeps[{number - 1}] shows its points.", Mark.QUIET) for number in sweeps
    ]
    return Page("Runs", (Table("", LISTED, rows, left_out), *_fallbacks(runs), *marked, _sources(runs)))


def _groups(ledger: Ledger) -> list[list[Run]]:
    """Put runs of one sweep that follow each other together; every other run stands alone."""
    keyed = itertools.groupby(ledger, key=lambda run: (run.sweep, 0 if run.sweep else run.number))
    return [list(group) for _, group in keyed]


def listed(run: Run) -> tuple[Cell, ...]:
    """Say in one line what a run has measured, in the columns of `LISTED`."""
    return row(
        name_cell(run),
        units.count(len(run.steps)),
        *_medians(run),
        units.duration(run.initialization.total_ms) if run.initialization else "-",
        units.size(run.memory.peak_bytes if run.memory else None),
        units.loss(run.losses[-1]),
    )


def _swept(runs: list[Run]) -> tuple[Cell, ...]:
    """Say in one line what a sweep has run: its own page has the points."""
    times = [run.step_ms for run in runs]
    peaks = [run.memory.peak_bytes for run in runs if run.memory]
    waited = sum(run.initialization.total_ms for run in runs if run.initialization)
    first, last = runs[0].number, runs[-1].number
    return row(
        Cell(f"sweep {runs[0].sweep}: #{first}" + (f" to #{last}" if last != first else ""), Mark.QUIET),
        units.count(sum(len(run.steps) for run in runs)),
        _range(units.duration(min(times)), units.duration(max(times))),
        *("-",) * (len(_TIMES) - 1),
        units.duration(waited) if waited else "-",
        _range(units.size(min(peaks)), units.size(max(peaks))) if peaks else units.MISSING,
        "-",
    )


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def comparison_page(comparison: Comparison) -> Page:
    """Set each run beside the baseline: time with its confidence interval, memory, loss."""
    base = comparison.baseline
    columns = (_RUN, _RATIO, _VERDICT, *_TIMES[:-1], _MEMORY, _LOSS, _APART)
    rows = [_compared(base, None)] + [_compared(contrast.run, contrast) for contrast in comparison.contrasts]
    remarks: list[Block] = [
        Note(f"{title(contrast.run)}: {'; '.join(contrast.remarks)}.", _remark_mark(contrast))
        for contrast in comparison.contrasts
        if contrast.remarks
    ]
    runs = [base, *(contrast.run for contrast in comparison.contrasts)]
    interval = Note(
        f"Ratios are against {title(base)}; below 1 is less. Brackets: 95 % bootstrap confidence interval "
        "over warm steps. Runs were taken one after another, so a drift of the machine is not in it.",
        Mark.QUIET,
    )
    return Page("Comparison", (Table("", columns, tuple(rows)), *remarks, interval, _sources(runs)))


def title(run: Run) -> str:
    """Name a run for tables; one that PyTorch executed for ORT says so in capitals."""
    return run.title.replace("PyTorch (fallback", "PYTORCH (fallback")


def name_cell(run: Run) -> Cell:
    """Name a run in a cell, red where PyTorch executed it for ORT."""
    return Cell(title(run), Mark.BAD if run.fell_back else Mark.PLAIN)


def _executed(run: Run) -> Note:
    if run.fell_back:
        return Note(_fallback(run), Mark.BAD)
    if run.executed_by == EXECUTED_BY_PARTS:
        return Note(
            f"Executed by ONNX Runtime: {extent(run.coverage)}; by PyTorch: the rest; on {run.device}.",
            Mark.GOOD,
        )
    name = engine_words(run.executed_by)
    return Note(f"Executed by {name} on {run.device}.", Mark.GOOD if run.executed_by == "ort" else Mark.PLAIN)


def _fallbacks(runs: list[Run]) -> list[Block]:
    """Give the reason of every fallback among `runs`, in words and in red; and what else is to be known of them."""
    fallen: list[Block] = [Note(f"#{run.number} {_fallback(run)}", Mark.BAD) for run in runs if run.fell_back]
    return fallen + [
        Note(f"#{run.number}: {note.text}", note.mark) for run in runs for note in _cautions(run)
    ]


def _fallback(run: Run) -> str:
    return f"PYTORCH (fallback){fallen_share(run)}: {run.fallback_reason or 'no reason was recorded'}"


def _cautions(run: Run) -> list[Note]:
    """Say what is to be known of a run besides a fallback, which has a red line of its own."""
    return [Note(f"The run {words}.", Mark.WARN) for words in cautions(run)[run.fell_back :]]


def _times(run: Run) -> Table:
    parts: tuple[tuple[str, Callable[[Step], float]], ...] = (
        ("forward", lambda step: step.forward_ms),
        ("backward", lambda step: step.backward_ms),
        ("optimizer", lambda step: step.optimizer_ms),
        ("everything else", lambda step: step.other_ms),
    )
    whole = run.step_ms
    rows = [row("step", units.duration(whole), units.percent(1.0))]
    for name, part in parts:
        value = statistics.median(part(step) for step in run.warm_steps)
        rows.append(row(name, units.duration(value), units.percent(value / whole if whole else None)))
    columns = (Column("part"), Column("time", numeric=True), Column("share", numeric=True))
    warm = units.count(len(run.warm_steps))
    caption = f"Time of a step: measured on {run.device}, median of {warm} warm steps"
    return Table(caption, columns, tuple(rows))


def _initialization(initialization: Initialization) -> Table:
    named = (
        ("export to ONNX", initialization.export_ms),
        ("graph builder", initialization.graph_builder_ms),
        ("input detection", initialization.detection_ms),
        ("gradient graph", initialization.graph_ms),
        ("sessions", initialization.session_ms),
    )
    rows = [row(name, units.duration(value)) for name, value in named]
    rows.append(row("total, everything between included", units.duration(initialization.total_ms)))
    columns = (Column("part"), Column("time", numeric=True))
    caption = f"Start-up: reported by ORT, from the {initialization.stage} on"
    if initialization.reason:
        caption += f" ({initialization.reason})"
    return Table(caption, columns, tuple(rows))


def _memory_rows(memory: PeakMemory | None) -> list[tuple[Cell, ...]]:
    if memory is None:
        return [row("peak memory", units.MISSING, "this platform cannot tell")]
    source = f"measured, {memory.kind} of {memory.scope}"
    return [
        row("peak memory", units.size(memory.peak_bytes), source),
        row("rise above start", units.size(memory.rise_bytes), source),
    ]


def _changed(run: Run) -> str:
    names = run.options.changed(Options())
    return ", ".join(f"{name}={getattr(run.options, name)}" for name in names) or "none, all defaults"


def _medians(run: Run) -> list[str]:
    warm = run.warm_steps
    return [
        units.duration(run.step_ms),
        units.duration(statistics.median(step.forward_ms for step in warm)),
        units.duration(statistics.median(step.backward_ms for step in warm)),
        units.duration(statistics.median(step.optimizer_ms for step in warm)),
    ]


def _compared(run: Run, contrast: Contrast | None) -> tuple[Cell, ...]:
    time, verdict, apart = units.ratio(1.0), Cell("baseline", Mark.QUIET), "-"
    if contrast is not None:
        time = units.ratio_interval(contrast.time_ratio, contrast.time_low, contrast.time_high)
        verdict = Cell(contrast.verdict, _verdict_mark(contrast))
        apart = units.difference(contrast.loss_difference)
    memory = contrast.memory_ratio if contrast else 1.0
    peak = f"{units.size(run.memory.peak_bytes)} ({units.ratio(memory)})" if run.memory else units.MISSING
    return row(name_cell(run), time, verdict, *_medians(run)[:-1], peak, units.loss(run.losses[-1]), apart)


def _verdict_mark(contrast: Contrast) -> Mark:
    """Colour a verdict; that a side fell back is none, and is red."""
    marks = {"faster": Mark.GOOD, "slower": Mark.WARN, FELL_BACK: Mark.BAD}
    return marks.get(contrast.verdict, Mark.QUIET)


def _remark_mark(contrast: Contrast) -> Mark:
    return Mark.BAD if contrast.fell_back else Mark.WARN


def _sources(runs: list[Run]) -> Note:
    """Say once, under a table, what its numbers are."""
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    kinds = dict.fromkeys(f"{run.memory.kind} of {run.memory.scope}" for run in runs if run.memory)
    lines = [f"Times: measured on {devices}, median of warm steps, start-up left out."]
    if kinds:
        lines.append(f"Peak memory: measured, {'; '.join(kinds)}.")
    if any(run.memory and run.memory.kind == "resident set" for run in runs):
        lines.append(
            "What earlier runs left in an allocator counts in it; lab.measure_memory() tells what a setting needs."
        )
    return Note(" ".join(lines), Mark.QUIET)
