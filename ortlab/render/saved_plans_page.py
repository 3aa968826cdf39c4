"""The page of plans that were read from a file or a log: what it said, and what of it holds for the present model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.memory.saved_plans import SavedPlan, SavedPlans

Shown = tuple[Column, Callable[["SavedPlan"], "str | Cell"]]

ROWS_SHOWN: Final = 200
"""Plans that a page shows."""

_WHAT: Final = {
    "2022": "the release of 2022 (Gelu:1)",
    "2023": "releases of 2023 (Gelu+:1:-1)",
    "2024": "releases since 2024, 1.19.2 among them (a JSON list)",
}


def saved_plans_page(saved: SavedPlans) -> Page:
    """List the plans of a file or a log, in its order."""
    title = f"Recompute plans of {saved.source}, as in {_WHAT[saved.dialect]}"
    blocks: list[Block] = [] if saved.complete else [Note(_cut(saved), Mark.BAD)]
    if saved.rows:
        blocks.append(_table(saved))
    else:
        blocks.append(Note("It names no plan.", Mark.QUIET))
    blocks += _notes(saved)
    if saved.log is not None:
        blocks.append(Folded("Its tables, written again", saved.tables(), repeats=True))
    return Page(title, tuple(blocks))


def _cut(saved: SavedPlans) -> str:
    log = saved.log
    found = [] if log is None else [(len(log.alleviations), "summary of 2022", "summaries of 2022")]
    if log is not None:
        found += [
            (
                len(log.matrix.features) + len(log.matrix.plans),
                "line of the features",
                "lines of the features",
            ),
            (len(log.insight.rows), "row of MemoryInsight", "rows of MemoryInsight"),
        ]
    read = ", ".join(
        f"{units.count(number)} {one if number == 1 else more}" for number, one, more in found if number
    )
    return f"This log is cut off: the end of a table is missing. What was there was read: {read}."


def _table(saved: SavedPlans) -> Table:
    columns = _columns(saved)
    shown = saved.rows[:ROWS_SHOWN]
    rows = tuple(row(*(write(one) for _, write in columns)) for one in shown)
    hidden = len(saved.rows) - len(shown)
    left_out = f"{units.count(hidden)} more: .table() has them." if hidden else ""
    return Table("", tuple(column for column, _ in columns), rows, left_out)


def _columns(saved: SavedPlans) -> list[Shown]:
    columns: list[Shown] = [
        (Column("plan", meaning="as memory_plan takes it today"), lambda one: one.config),
        (Column("on", meaning="whether it was on"), _on),
    ]
    if any(one.places is not None for one in saved.rows):
        places = Column("places", numeric=True, meaning="occurrences, by the log")
        columns.append((places, lambda one: units.count(one.places)))
    if any(_bytes(one) is not None for one in saved.rows):
        saves = Column(
            "saves", numeric=True, meaning="predicted by ORT for the log's own batch, not measured"
        )
        columns.append((saves, lambda one: units.size(_bytes(one))))
    if any(_bytes(one) is None and one.shapes for one in saved.rows):
        columns.append((Column("need not be kept", meaning="by the log"), lambda one: "; ".join(one.shapes)))
    if any(one.present is not None for one in saved.rows):
        columns.append((Column("this model", meaning="whether the present model has it"), _present))
    if any(one.sentence for one in saved.rows):
        columns.append((Column("what it does"), lambda one: one.sentence))
    return columns


def _bytes(one: SavedPlan) -> float | None:
    return one.printed_bytes if one.printed_bytes is not None else one.saving_bytes


def _present(one: SavedPlan) -> Cell:
    return Cell("has it", Mark.GOOD) if one.present else Cell("has it not", Mark.WARN)


def _on(one: SavedPlan) -> Cell:
    if not one.on:
        return Cell("-", Mark.QUIET)
    if one.applied is None or one.requested is None:
        return Cell("yes")
    asked = "all" if one.requested < 0 else units.count(one.requested)
    return Cell(f"yes, applied {units.count(one.applied)} (asked for {asked})")


def _notes(saved: SavedPlans) -> list[Note]:
    notes = []
    if saved.symbols:
        sizes = ", ".join(f"{name} = {size:,}" for name, size in saved.symbols.items())
        notes.append(Note(f"Predicted by ORT for the log's own batch ({sizes}), not measured.", Mark.QUIET))
    wrong = [
        one
        for one in saved.rows
        if one.printed_bytes is not None
        and one.saving_bytes is not None
        and one.printed_bytes != one.saving_bytes
    ]
    notes += [
        Note(
            f"{one.config}: the log says {units.count(one.printed_bytes)} B, and its own formula comes to "
            f"{units.count(one.saving_bytes)} B.",
            Mark.WARN,
        )
        for one in wrong
    ]
    absent = [one for one in saved.rows if one.present is False]
    if absent:
        number = f"{units.count(len(absent))} of {units.count(len(saved.rows))}"
        lines = [one.config + (f" (near: {', '.join(one.near)})" if one.near else "") for one in absent]
        notes.append(Note(f"This model does not have {number}: {'; '.join(lines)}.", Mark.WARN))
    if saved.present:
        notes.append(Note(f"To switch on what it has: lab.set(memory_plan={list(saved.present)})"))
    elif not any(one.present is not None for one in saved.rows) and saved.rows:
        notes.append(Note("Not held against a model: saved.against(lab.plan()) does that.", Mark.QUIET))
    return notes
