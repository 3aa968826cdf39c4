"""The page of a self-test: what held, what did not, what was not run and why, on which machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.records.selftest import SelfTest

_MARKS: Final = {
    "held": Mark.GOOD,
    "did not hold": Mark.BAD,
    "failed": Mark.BAD,
    "stated": Mark.PLAIN,
    "not run": Mark.QUIET,
}
_MS_PER_S: Final = 1000
_COLUMNS: Final = (Column("what"), Column("outcome"), Column("found", whole=True))


def verdict(test: SelfTest) -> str:
    """Say in a line how it ended, how many findings of each outcome there are, and how long it took."""
    counted = {name: sum(one.outcome == name for one in test.findings) for name in _MARKS}
    words = ", ".join(f"{number} {name}" for name, number in counted.items() if number) or "nothing was run"
    end = (
        "Interrupted"
        if test.interrupted
        else "All that was tried holds"
        if test.ok
        else "Not all of it holds"
    )
    took = units.duration(sum(test.seconds.values()) * _MS_PER_S)
    return f"{end}: {words}; {took}."


def selftest_page(test: SelfTest) -> Page:
    """Give each part a table, after the verdict and what is against it, and the machine at the end."""
    blocks: list[Block] = [Note(verdict(test), Mark.GOOD if test.ok else Mark.BAD)]
    blocks += [
        Note(f"{one.part}, {one.name}: {one.outcome}: {one.said}", Mark.BAD)
        for one in test.findings
        if _MARKS[one.outcome] is Mark.BAD
    ]
    if test.interrupted:
        blocks.append(Note("It was ended before its last part: what is not named was not run.", Mark.BAD))
    for part in dict.fromkeys(one.part for one in test.findings):
        rows = tuple(
            row(one.name, Cell(one.outcome, _MARKS[one.outcome]), one.said)
            for one in test.findings
            if one.part == part
        )
        took = f", {units.duration(test.seconds[part] * _MS_PER_S)}" if part in test.seconds else ""
        blocks.append(Table(f"{part}{took}", _COLUMNS, rows))
    facts = tuple(row(name, value) for name, value in {"started": test.started_at, **test.machine}.items())
    blocks.append(Table("machine", (Column(""), Column("", whole=True)), facts))
    return Page(f"Self-test on {test.device}", tuple(blocks))
