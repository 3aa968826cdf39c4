"""A table of records in the browser: sorted, filtered and paged here, drawn there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import traitlets

from ortlab.notebook.widgets.browser import Part, Script, compact, compacted_style, packed
from ortlab.notebook.widgets.controls import Layout
from ortlab.render import html

if TYPE_CHECKING:
    from ortlab.notebook.widgets.controls import Looks

PAGE: Final = 50
"""Rows on one page: ten thousand at once would stop the browser."""

_FILE: Final = "record_table.js"

RULES: Final = compact("record_table.css")
"""Style rules of the table, beside those of every page."""

Record = TypeVar("Record")


@dataclass(frozen=True)
class Column(Generic[Record]):
    """One column."""

    name: str
    value: Callable[[Record], float | str | None]  # sorts the rows; None goes last in both directions
    words: Callable[[Record], str]  # what a cell says
    numeric: bool = False  # set flush right, and sorted from the largest at first
    meaning: str = ""  # what the number is and where it comes from, one sentence


@dataclass(frozen=True)
class Look:
    """How one row stands."""

    name: str  # what a screen reader calls the row's tick box and button
    ticked: bool | None = None  # None for a row without a box
    locked: str = ""  # why the box cannot be ticked; empty if it can
    count: tuple[int, int] | None = None  # how many are chosen, of how many; None where a part cannot be
    chosen: bool | None = None  # whether its details are shown; None for a row that cannot be chosen
    mark: str = ""  # a word before the name, which sets the row off
    code: str = ""  # a second line under the name, as users type it


@dataclass(frozen=True)
class Slider:
    """A number that the table is evaluated for: its key, its label, the value and the ends."""

    key: str
    label: str
    value: int
    low: int
    high: int


@dataclass(frozen=True)
class Picker:
    """A choice above the table: its label, the keys and words to choose from, and the key that is chosen."""

    label: str
    options: tuple[tuple[str, str], ...]
    value: str


@dataclass
class Intents:
    """What is called when the user wants something; the table itself changes nothing but its order."""

    tick: Callable[[str, bool], None] | None = None  # key of a row, whether its box shall be ticked
    count: Callable[[str, int], None] | None = None  # key of a row, how many of it are wanted
    choose: Callable[[str], None] | None = None  # key of the row whose details are wanted
    slide: Callable[[str, int], None] | None = None  # key of a slider, its value
    pick: Callable[[str], None] | None = None  # the key that was picked


@dataclass
class Content(Generic[Record]):
    """What the table shows."""

    records: Sequence[Record]  # one row each, in the order that the table has at first
    columns: Sequence[Column[Record]]  # the first names the row
    key: Callable[[Record], str]  # tells the rows apart
    look: Callable[[Record], Look]
    noun: tuple[str, str]  # such as ("plan", "plans")
    search: Callable[[Record], str] = lambda _: ""  # what the filter looks into, beside the row's name
    # Makes the cells of the last line, by name of the column, from the rows that pass the filter; no line if empty.
    totals: Callable[[Sequence[Record]], Mapping[str, str]] = lambda _: {}
    sliders: Sequence[Slider] = ()
    picker: Picker | None = None
    count_column: str = ""  # in which counts are chosen


class RecordTable(Part, Generic[Record]):
    """Rows of a record, a page at a time. All texts are made here; the browser draws them and sends intents back."""

    # `caption` tells screen readers what the rows are. In a panel, whose `looks` it gets, the style sheet holds the
    # rules of the table; without `looks` the table stands alone and brings its own.

    table = traitlets.Dict().tag(sync=True, to_json=packed)

    def __init__(self, caption: str, intents: Intents, looks: Looks | None = None) -> None:
        self._caption = caption
        self._intents = intents
        self._content: Content[Record] | None = None
        self._sorted_by = ""
        self._descending = False
        self._filter = ""
        self._first = 0
        self._drawn = 0
        if looks is None:
            super().__init__(_FILE, Script({_FILE: compacted_style(html.STYLE + RULES)}))
        else:
            super().__init__(_FILE, looks.script(_FILE), layout=Layout())
        self.on_msg(self._told)

    def show(self, content: Content[Record]) -> None:
        """Show other content; order, filter and page stay, as far as they still make sense."""
        self._content = content
        if self._sorted_by not in [column.name for column in content.columns]:
            self._sorted_by = ""
        self.draw()

    # ---- what the user wants ----------------------------------------------------------------------------------

    def sort(self, name: str) -> None:
        """Sort by a column, the other way round if it is sorted by that already."""
        column = self._column(name)
        if column is None:
            return
        self._descending = not self._descending if self._sorted_by == name else column.numeric
        self._sorted_by = name
        self._first = 0
        self.draw()

    def filter(self, words: str) -> None:
        """Show the rows that have all these words, in any case."""
        self._filter = words
        self._first = 0
        self.draw()

    def turn(self, by: int) -> None:
        """Turn pages forward, or back."""
        self._first = max(0, self._first + by * PAGE)
        self.draw()

    def _told(self, _widget: object, message: Any, _buffers: object) -> None:
        """Do what the browser asks for, draw again (a refused tick has to be taken back there, too), and answer."""
        acts: dict[str, Callable[..., None] | None] = {
            "sort": self.sort,
            "filter": self.filter,
            "turn": self.turn,
            "tick": self._intents.tick,
            "count": self._intents.count,
            "choose": self._intents.choose,
            "slide": self._intents.slide,
            "pick": self._intents.pick,
        }
        act = acts[message["do"]]
        try:
            if act is not None:
                act(*message["with"])
        finally:
            self.draw()
            if "asked" in message:
                self.send({"answered": message["asked"]})

    # ---- what is drawn ----------------------------------------------------------------------------------------

    def found(self) -> list[Record]:
        """Rows that pass the filter, in the order of the table."""
        if self._content is None:
            return []
        words = self._filter.casefold().split()
        kept = [one for one in self._content.records if self._has(one, words)]
        column = self._column(self._sorted_by)
        if column is None:
            return kept
        value = column.value
        known = [one for one in kept if value(one) is not None]
        known.sort(key=lambda one: _order(value(one)), reverse=self._descending)
        return known + [one for one in kept if value(one) is None]

    def draw(self) -> None:
        """Send the page to the browser, also if nothing has changed."""
        content = self._content
        if content is None:
            return
        found = self.found()
        self._first = min(self._first, max(0, (len(found) - 1) // PAGE * PAGE))
        page = found[self._first : self._first + PAGE]
        self._drawn += 1
        totals = content.totals(found)
        self.table = {
            "drawn": self._drawn,
            "caption": self._caption,
            "columns": [
                {"name": one.name, "meaning": one.meaning, "numeric": one.numeric} for one in content.columns
            ],
            "rows": [self._row(content, one) for one in page],
            "totals": [totals.get(one.name, "") for one in content.columns] if totals else [],
            "sorted": {"name": self._sorted_by, "descending": self._descending},
            "filter": self._filter,
            "noun": content.noun[1],
            "found": self._counted(content, len(found)),
            "pages": {"earlier": self._first > 0, "later": self._first + PAGE < len(found)},
            "sliders": [asdict(one) for one in content.sliders],
            "picker": None if content.picker is None else asdict(content.picker),
            "count_column": content.count_column,
        }

    def _row(self, content: Content[Record], record: Record) -> dict[str, Any]:
        cells = [column.words(record) for column in content.columns]
        return {"key": content.key(record), "cells": cells, **asdict(content.look(record))}

    def _counted(self, content: Content[Record], found: int) -> str:
        one, many = content.noun
        every = len(content.records)
        noun = one if every == 1 else many
        if found > PAGE:
            last = min(self._first + PAGE, found)
            shown = f"{self._first + 1:,} to {last:,} of {found:,} {many}"
            return shown if found == every else f"{shown} that fit; {every:,} in all"
        return f"{every:,} {noun}" if found == every else f"{found:,} of {every:,} {noun}"

    def _has(self, record: Record, words: Sequence[str]) -> bool:
        if not words or self._content is None:
            return True
        text = f"{self._content.columns[0].words(record)} {self._content.search(record)}".casefold()
        return all(word in text for word in words)

    def _column(self, name: str) -> Column[Record] | None:
        columns = self._content.columns if self._content is not None else ()
        return next((column for column in columns if column.name == name), None)

    def __repr__(self) -> str:
        return f"RecordTable({self._caption!r})"


def _order(value: float | str | None) -> Any:
    return value.casefold() if isinstance(value, str) else value
