"""Who executes a model, in words: engines, and the parts of a model that ONNX Runtime executes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab import units
from ortlab.records.runs import names
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Table, row

if TYPE_CHECKING:
    from ortlab.records.runs import Coverage, Part, Run

ENGINE_NAMES = {
    "ort": "ONNX Runtime",
    "eager": "PyTorch eager",
    "checkpoint": "PyTorch, layers checkpointed",
    "compile": "torch.compile",
}
"""What the engines are called in sentences; `engine_words` says what one is told, too."""


def engine_words(engine: str) -> str:
    """Name an engine in a sentence: "torch.compile with activation memory budget 0.5"."""
    kind, _, told = engine.partition(":")
    name = ENGINE_NAMES.get(kind, kind)
    if not told:
        return name
    if kind == "checkpoint":
        return f"PyTorch, {told.replace('+', ', ')} checkpointed"
    return f"{name} with activation memory budget {told}"


def title(run: Run) -> str:
    """Name a run for tables; one that PyTorch executed for ORT says so in capitals."""
    return run.title.replace("PyTorch (fallback", "PYTORCH (fallback")


def name_cell(run: Run) -> Cell:
    """Name a run in a cell, red where PyTorch executed it for ORT."""
    return Cell(title(run), Mark.BAD if run.fell_back else Mark.PLAIN)


# ---- parts of a model -----------------------------------------------------------------------------------------------


ROWS_SHOWN = 30
"""Parts that a table shows."""

ROWS_UNFOLDED = 6
"""Parts up to which the table stands open."""


def badge(coverage: Coverage) -> str:
    """Say in three words how many parts ONNX Runtime executed; before the first call, how many there are."""
    total = len(coverage.parts)
    parts = "PART" if total == 1 else "PARTS"
    if not coverage.called:
        return f"ORT: {units.count(total)} {parts}"
    return f"ORT: {units.count(len(coverage.executed))} of {units.count(total)} {parts}"


def extent(coverage: Coverage) -> str:
    """Name the parts that ONNX Runtime executed, how many of all that is, and their share of the parameters."""
    # "encoder, pooler (2 of 3 parts, 91.0 % of the parameters)"; before the first call, all parts.
    total = len(coverage.parts)
    share = f"{units.percent(coverage.share)} of the parameters"
    noun = "part" if total == 1 else "parts"
    if not coverage.called:
        return f"{names(part.path for part in coverage.parts)} ({units.count(total)} {noun}, {share})"
    done = coverage.executed
    return f"{names(done)} ({units.count(len(done))} of {units.count(total)} {noun}, {share})"


def uncalled_note(coverage: Coverage) -> Note | None:
    """Say which parts were not called; None if all were, or none yet."""
    if not coverage.called or not coverage.uncalled:
        return None
    was = "was" if len(coverage.uncalled) == 1 else "were"
    return Note(f"{names(coverage.uncalled)} {was} not called, so nothing ran there.", Mark.WARN)


def parts_table(coverage: Coverage) -> Table:
    """List the wrapped parts with their share of the parameters, how often each was called, and who ran it."""
    columns = (
        Column("part", meaning="path in the model, as named_modules() gives it"),
        Column("class"),
        Column("parameters", numeric=True, meaning="numbers in its parameters"),
        Column("share", numeric=True, meaning="of the numbers in all parameters of the model"),
        Column("calls", numeric=True, meaning="counted"),
        Column("executed by", meaning="recorded at each call"),
    )
    shown = coverage.parts[:ROWS_SHOWN]
    rows = tuple(
        row(
            part.path,
            part.kind,
            units.count(part.parameters),
            units.percent(part.parameters / coverage.parameters if coverage.parameters else None),
            units.count(part.calls),
            _who(part),
        )
        for part in shown
    )
    hidden = len(coverage.parts) - len(shown)
    left_out = f"{units.count(hidden)} more parts." if hidden else ""
    return Table("Parts on ONNX Runtime; PyTorch executes the rest", columns, rows, left_out)


def coverage_blocks(coverage: Coverage) -> tuple[Block, ...]:
    """Return the table of parts and what is to be said of it; nothing where the whole model is wrapped."""
    if not coverage:
        return ()
    uncalled = uncalled_note(coverage)
    table: Block = parts_table(coverage)
    if len(coverage.parts) > ROWS_UNFOLDED:
        table = Folded(f"The {units.count(len(coverage.parts))} parts", blocks=(parts_table(coverage),))
    return (*([uncalled] if uncalled else []), table)


def _who(part: Part) -> Cell:
    if not part.calls:
        return Cell("not called", Mark.QUIET)
    if part.executed:
        return Cell("ONNX Runtime", Mark.GOOD)
    of = f"{units.count(part.calls - part.on_ort)} of {units.count(part.calls)} calls"
    return Cell(f"PYTORCH (fallback), {of}", Mark.BAD)
