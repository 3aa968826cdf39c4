"""A page: tables and notes with their words already chosen, which `text` and `html` only lay out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Mark(Enum):
    """How a cell or a note wants to be read; a renderer may add colour, never meaning that the words lack."""

    PLAIN = "plain"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    QUIET = "quiet"


@dataclass(frozen=True)
class Cell:
    """One cell: its text, and how it wants to be read."""

    text: str
    mark: Mark = Mark.PLAIN


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes
    ----------
    name
        The heading; units stand in the cells.
    numeric
        Whether the cells are numbers, which are set flush right.
    meaning
        What the number is and where it comes from, one sentence (a tooltip in HTML).
    """

    name: str
    numeric: bool = False
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under headings; the first cell of a row is its heading.

    Attributes
    ----------
    caption
        What the rows are.
    columns
        The headings.
    rows
        Cells, as many per row as there are columns.
    left_out
        Rows that exist and are not shown.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: str = ""

    def __post_init__(self) -> None:
        """Refuse ragged rows here, where the traceback names the culprit."""
        for row in self.rows:
            if len(row) != len(self.columns):
                message = f"{self.caption!r}: a row of {len(row)} cells under {len(self.columns)} headings"
                raise ValueError(message)


@dataclass(frozen=True)
class Note:
    """A sentence or two; line breaks are kept."""

    text: str
    mark: Mark = Mark.PLAIN


@dataclass(frozen=True)
class Folded:
    """A long text that HTML keeps folded under its title (a log, a report); text shows it whole."""

    title: str
    text: str


Block = Table | Note | Folded


@dataclass(frozen=True)
class Page:
    """What a record has to say: a title and blocks, in reading order."""

    title: str
    blocks: tuple[Block, ...]


def row(*cells: str | Cell) -> tuple[Cell, ...]:
    """Make a row of cells, plain strings being plain cells."""
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)
