"""The page of an option list: each switch's value, what it does, and why it cannot act here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.render.option_pages import value_text
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.options.catalogue import OptionList

_COLUMNS = (Column("option"), Column("value"), Column("choices"), Column("what it does"))


def option_list_page(chosen: OptionList) -> Page:
    """List the switches with their help; one that cannot act here is followed by the reason."""
    rows = []
    reasons: list[Block] = []
    for one in chosen.switches:
        value = getattr(chosen.options, one.name)
        shown = value_text(value)
        if value != one.default:
            shown += f" (default {value_text(one.default)})"
        missing = chosen.missing(one.name)
        mark = Mark.QUIET if missing else Mark.WARN if value != one.default else Mark.PLAIN
        choices = "on, off" if one.type is bool else ", ".join(map(str, one.choices))
        rows.append(row(one.name, Cell(shown, mark), choices, one.help))
        if missing:
            reasons.append(Note(missing, Mark.QUIET))
    return Page("Options", (Table("", _COLUMNS, tuple(rows)), *reasons))
