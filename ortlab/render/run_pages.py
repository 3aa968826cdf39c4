"""Pages of runs: one run, and the ledger."""

from __future__ import annotations

import itertools
import statistics

from ortlab import units
from ortlab.options.options import Options
from ortlab.records.runs import EXECUTED_BY_PARTS, Initialization, Ledger, Run, part_columns, step_parts
from ortlab.records.verdicts import cautions, fallen_share
from ortlab.render.density_page import density_table
from ortlab.render.execution_words import coverage_blocks, engine_words, extent, name_cell, title
from ortlab.render.memory_pages import phases_table
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row

ROWS_SHOWN = 50
"""Runs that the ledger's page shows: the latest ones."""

_RUN = Column("run", meaning="number, who executed it, and the switches that differ from the defaults")
TIMES = (
    Column("step", numeric=True, meaning="measured: median wall time of a warm step, start-up left out"),
    Column("forward", numeric=True, meaning="measured: median wall time inside the model's forward"),
    Column("backward", numeric=True, meaning="measured: median wall time inside backward() calls"),
    Column("optimizer", numeric=True, meaning="measured: median wall time inside optimizer.step()"),
)

_WAITED = Column("start-up", numeric=True, meaning="reported by ORT: export, graph building, sessions")
STEP_MEMORY = Column("step memory", numeric=True, meaning="measured: how far a step rises above its start")
LAST_LOSS = Column("last loss", numeric=True, meaning="measured: loss of the last step")
LISTED = (_RUN, Column("steps", numeric=True), TIMES[0], STEP_MEMORY, LAST_LOSS, *TIMES[1:], _WAITED)
"""Columns of a list of runs; `listed` gives the cells."""


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
        _memory_row(run),
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
    blocks.append(
        Folded("The process and the machine", blocks=(Table("", heads, tuple(_machine_rows(run))),))
    )
    return Page(f"Run {title(run)}", tuple(blocks))


def last_run_note(run: Run) -> Note:
    """Say in a line what a run has measured."""
    parts = [
        f"Last run {title(run)}: {units.duration(run.step_ms)} a step",
        f"{units.size(run.step_memory_bytes)} step memory" if run.step_memory_bytes is not None else "",
        f"loss {units.loss(run.losses[-1])}" if run.losses[-1] is not None else "",
    ]
    return Note(", ".join(filter(None, parts)) + ".", Mark.BAD if run.fell_back else Mark.PLAIN)


def ledger_page(ledger: Ledger, rows_shown: int = ROWS_SHOWN) -> Page:
    """List the latest runs."""
    if not len(ledger):
        return Page("Runs", (Note("No run yet. Run a step: %%ort_step, or lab.step(fn, n=20).", Mark.QUIET),))
    groups = _groups(ledger)
    shown = groups[-rows_shown:]
    runs = [run for group in shown for run in group]
    hidden = len(ledger) - len(runs)
    rows = tuple(_swept(group) if group[0].sweep else listed(group[0]) for group in shown)
    left_out = f"{units.many(hidden, 'earlier run')}: lab.runs.table() has all runs." if hidden else ""
    sweeps = dict.fromkeys(group[0].sweep for group in shown if group[0].sweep)
    marked = [
        Note(f"Sweep {number}: lab.sweeps[{number - 1}] shows its points.", Mark.QUIET) for number in sweeps
    ]
    return Page("Runs", (Table("", LISTED, rows, left_out), *_fallbacks(runs), *marked, sources(runs)))


def _groups(ledger: Ledger) -> list[list[Run]]:
    """Put runs of one sweep that follow each other together; every other run stands alone."""
    keyed = itertools.groupby(ledger, key=lambda run: (run.sweep, 0 if run.sweep else run.number))
    return [list(group) for _, group in keyed]


def listed(run: Run) -> tuple[Cell, ...]:
    """Say in one line what a run has measured, in the columns of `LISTED`."""
    whole, *parts = _listed_times(run)
    return row(
        name_cell(run),
        units.count(len(run.steps)),
        whole,
        units.size(run.step_memory_bytes),
        units.loss(run.losses[-1]),
        *parts,
        units.duration(run.initialization.total_ms) if run.initialization else "-",
    )


def _swept(runs: list[Run]) -> tuple[Cell, ...]:
    """Say in one line what a sweep has run: its own page has the points."""
    times = [run.step_ms for run in runs]
    sizes = [run.step_memory_bytes for run in runs if run.step_memory_bytes is not None]
    waited = sum(run.initialization.total_ms for run in runs if run.initialization)
    first, last = runs[0].number, runs[-1].number
    return row(
        Cell(f"sweep {runs[0].sweep}: #{first}" + (f" to #{last}" if last != first else ""), Mark.QUIET),
        units.count(sum(len(run.steps) for run in runs)),
        _range(units.duration(min(times)), units.duration(max(times))),
        _range(units.size(min(sizes)), units.size(max(sizes))) if sizes else units.MISSING,
        "-",
        *("-",) * (len(TIMES) - 1),
        units.duration(waited) if waited else "-",
    )


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


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
    """Give, in red, the reason of every fallback among `runs`, and then what else is to be known of each run."""
    fallen: list[Block] = [Note(f"#{run.number} {_fallback(run)}", Mark.BAD) for run in runs if run.fell_back]
    told: dict[Note, list[int]] = {}
    for run in runs:
        for note in _cautions(run):
            told.setdefault(note, []).append(run.number)
    return fallen + [Note(f"{_numbers(numbers)}: {note.text}", note.mark) for note, numbers in told.items()]


def _numbers(of: list[int]) -> str:
    """Name runs by their numbers: "#1", "#1, #2", "#1 to #26", or the first and how many more."""
    if len(of) <= 2:  # noqa: PLR2004 - two are named
        return ", ".join(f"#{number}" for number in of)
    if of == list(range(of[0], of[-1] + 1)):
        return f"#{of[0]} to #{of[-1]}"
    return f"#{of[0]} and {units.many(len(of) - 1, 'other run')}"


def _fallback(run: Run) -> str:
    return f"PYTORCH (fallback){fallen_share(run)}: {run.fallback_reason or 'no reason was recorded'}"


def _cautions(run: Run) -> list[Note]:
    """Say what is to be known of a run besides a fallback, which has a red line of its own."""
    return [Note(f"The run {words}.", Mark.WARN) for words in cautions(run)[run.fell_back :]]


def _times(run: Run) -> Table:
    whole = run.step_ms
    rows = [row("step", units.duration(whole), units.percent(1.0))]
    rows += [
        row(name, units.duration(ms), units.percent(ms / whole if whole else None))
        for name, ms in step_parts(run.warm_steps, whole).items()
    ]
    columns = (Column("part"), Column("time", numeric=True), Column("share", numeric=True))
    warm = units.count(len(run.warm_steps))
    caption = f"Time of a step: measured on {run.device}, median of {warm} warm steps, parts by their shares"
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


def _memory_row(run: Run) -> tuple[Cell, ...]:
    if run.step_memory_bytes is None:
        return row("step memory", units.MISSING, run.no_step_memory or "it was not measured")
    return row("step memory", units.size(run.step_memory_bytes), STEP_MEMORY.meaning)


def _machine_rows(run: Run) -> list[tuple[Cell, ...]]:
    """Say what is to be known of the process and the machine, which is never compared."""
    warm = run.warm_steps
    faults = [step.page_faults for step in warm if step.page_faults is not None]
    rows = [row("peak of the process", units.MISSING, "this platform cannot tell")]
    if run.memory is not None:
        source = f"measured, {run.memory.kind} of {run.memory.scope}, what other runs left included"
        rows = [
            row("peak of the process", units.size(run.memory.peak_bytes), source),
            row("its rise in the run", units.size(run.memory.rise_bytes), source),
        ]
    if faults:
        rows.append(
            row(
                "page faults a step", units.count(statistics.median(faults)), "measured, median of warm steps"
            )
        )
    if run.others_cores is not None:
        rows.append(
            row("other programs", f"{run.others_cores:.1f} cores", "measured, /proc/stat, on average")
        )
    return rows


def _changed(run: Run) -> str:
    names = run.options.changed(Options())
    return ", ".join(f"{name}={getattr(run.options, name)}" for name in names) or "none, all defaults"


def _listed_times(run: Run) -> list[str]:
    return [units.duration(ms) for ms in (run.step_ms, *part_columns(run.warm_steps, run.step_ms).values())]


def sources(runs: list[Run]) -> Note:
    """Say once, under a table, what its numbers are."""
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    lines = [f"Times: measured on {devices}, median of warm steps, start-up left out."]
    if any(run.step_memory_bytes is not None for run in runs):
        lines.append("Step memory: measured, how far a step rises above its start.")
    missing = dict.fromkeys(
        run.no_step_memory for run in runs if run.step_memory_bytes is None and run.no_step_memory
    )
    lines += [f"No step memory: {reason.rstrip('.')}." for reason in missing]
    return Note(" ".join(lines), Mark.QUIET)
