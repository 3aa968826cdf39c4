"""A page: tables and notes with their words already chosen, which `text` and `html` only lay out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ortlab import units


class Mark(Enum):
    """How a cell or a note wants to be read; a renderer may add colour, never meaning that the words lack."""

    PLAIN = "plain"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    QUIET = "quiet"


@dataclass(frozen=True)
class Cell:
    """One cell."""

    text: str
    mark: Mark = Mark.PLAIN
    more: str = ""  # many lines, which HTML folds under `text`; plain text leaves them out


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str  # units stand in the cells
    numeric: bool = False  # set flush right
    meaning: str = ""  # what the number is and where it comes from, one sentence: a tooltip in HTML
    whole: bool = False  # shows each cell to its end; otherwise a long one loses its middle


@dataclass(frozen=True)
class Table:
    """Rows under headings; the first cell of a row is its heading."""

    caption: str  # what the rows are
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: str = ""  # says which rows exist and are not shown
    sorts: bool = False  # in HTML, by a click on a heading, where scripts run

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
    """A long text, or tables and notes, that HTML keeps folded under a title; text shows it, or says where it is."""

    title: str
    text: str = ""
    blocks: tuple[Table | Note, ...] = ()  # below the text
    is_open: bool = False  # whether HTML unfolds it at first
    repeats: bool = False  # shows again, in another order, what stands elsewhere; text leaves it out then
    instead: str = ""  # what text says in place of `text`, where that would push away what stands above


@dataclass(frozen=True)
class Code:
    """Python code, shown whole and as it stands; HTML colours its words."""

    caption: str
    source: str


@dataclass(frozen=True)
class Drawing:
    """A figure, drawn when it is shown; text says what it shows and how to get it."""

    description: str  # one sentence
    svg: Callable[[], str]  # an <svg> element, in colours that can be read on light and dark pages


@dataclass(frozen=True)
class Frame:
    """An element that lives in a page of HTML; text says what it shows."""

    description: str  # a few words
    html: Callable[[], str]


Block = Table | Note | Folded | Drawing | Frame | Code


@dataclass(frozen=True)
class Page:
    """What a record has to say: a title and blocks, in reading order."""

    title: str
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        """Refuse what is no block here, where the traceback names the culprit."""
        # mypy finds most of them; in `*((one,) if there else ())` it takes `one` for anything, so write lists there.
        held: tuple[object, ...] = self.blocks
        for block in held:
            if not isinstance(block, Block):
                message = f"{self.title!r}: {block!r} is not a block of a page"
                raise TypeError(message)


def row(*cells: str | Cell) -> tuple[Cell, ...]:
    """Make a row of cells, plain strings being plain cells."""
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)


def left_out(number: int, words: str) -> str:
    """Say what a table does not show, "12 more: run.table() has them."; nothing where it shows all."""
    return f"{units.count(number)} {words}" if number else ""
