"""The page of a self-test: what held, what did not, what was not run and why, on which machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.selftest.record import SelfTest

_MARKS: Final = {
    "held": Mark.GOOD,
    "did not hold": Mark.BAD,
    "failed": Mark.BAD,
    "stated": Mark.PLAIN,
    "not run": Mark.QUIET,
}
_COLUMNS: Final = (Column("what"), Column("outcome"), Column("found", whole=True))


def selftest_page(test: SelfTest) -> Page:
    """Give each part a table, after the verdict, and the machine at the end."""
    counted = {name: sum(one.outcome == name for one in test.findings) for name in _MARKS}
    words = ", ".join(f"{number} {name}" for name, number in counted.items() if number)
    blocks: list[Block] = [Note(f"{words}.", Mark.GOOD if test.ok else Mark.BAD)]
    if test.interrupted:
        blocks.append(Note("It was interrupted: what comes after the last line was not run.", Mark.BAD))
    for part in dict.fromkeys(one.part for one in test.findings):
        rows = tuple(
            row(one.name, Cell(one.outcome, _MARKS[one.outcome]), one.said)
            for one in test.findings
            if one.part == part
        )
        took = f", {test.seconds[part]:g} s" if part in test.seconds else ""
        blocks.append(Table(f"{part}{took}", _COLUMNS, rows))
    facts = tuple(row(name, value) for name, value in {"started": test.started_at, **test.machine}.items())
    blocks.append(Table("machine", (Column(""), Column("", whole=True)), facts))
    return Page(f"Self-test on {test.device}", tuple(blocks))
