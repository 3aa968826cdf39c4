"""A page: tables and notes with their words already chosen, which `text` and `html` only lay out."""

from __future__ import annotations

from collections.abc import Callable
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
    """One cell.

    Attributes
    ----------
    text
        What it says.
    mark
        How it wants to be read.
    more
        A text of many lines that HTML keeps folded under `text`; plain text leaves it out.
    """

    text: str
    mark: Mark = Mark.PLAIN
    more: str = ""


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
    whole
        Whether the cells are shown to their end however long they are; otherwise a long one loses its middle.
    """

    name: str
    numeric: bool = False
    meaning: str = ""
    whole: bool = False


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
    sorts
        Whether the page in HTML sorts it by a click on a heading, where scripts run.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: str = ""
    sorts: bool = False

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
    """A long text, or tables and notes, that HTML keeps folded under a title; text shows all of it.

    Attributes
    ----------
    title
        What is in there.
    text
        The text (a log, a report).
    blocks
        Tables and notes, below the text.
    is_open
        Whether HTML shows it unfolded at first.
    repeats
        Whether it shows again what stands elsewhere, in another order; text leaves it out then.
    """

    title: str
    text: str = ""
    blocks: tuple[Table | Note, ...] = ()
    is_open: bool = False
    repeats: bool = False


@dataclass(frozen=True)
class Code:
    """Python code, shown whole and as it stands; HTML colours its words.

    Attributes
    ----------
    caption
        What it is.
    source
        The code.
    """

    caption: str
    source: str


@dataclass(frozen=True)
class Drawing:
    """A figure, drawn when it is shown; text says what it shows and how to get it.

    Attributes
    ----------
    description
        What it shows, one sentence.
    svg
        Draws it as an ``<svg>`` element, in colours that can be read on a light page and on a dark one.
    """

    description: str
    svg: Callable[[], str]


@dataclass(frozen=True)
class Frame:
    """An element that lives in a page of HTML; text says what it shows.

    Attributes
    ----------
    description
        What it shows, a few words.
    html
        Writes it.
    """

    description: str
    html: Callable[[], str]


Block = Table | Note | Folded | Drawing | Frame | Code


@dataclass(frozen=True)
class Page:
    """What a record has to say: a title and blocks, in reading order."""

    title: str
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        """Refuse what is no block here, where the traceback names the culprit.

        mypy finds most of them; in `*((one,) if there else ())` it takes `one` for anything, so write lists there.
        """
        held: tuple[object, ...] = self.blocks
        for block in held:
            if not isinstance(block, Block):
                message = f"{self.title!r}: {block!r} is not a block of a page"
                raise TypeError(message)


def row(*cells: str | Cell) -> tuple[Cell, ...]:
    """Make a row of cells, plain strings being plain cells."""
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)


def printable(text: str) -> str:
    r"""Return `text` with control characters written out, so that a name cannot break a table or a terminal.

    A line break becomes a space, and an escape sequence its Python escape: "\\x1b[31m".
    """
    flat = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in flat)
