"""Records as plain text, for terminals, logs and notebooks that show no HTML."""

from __future__ import annotations

import textwrap
import unicodedata

from ortlab import units
from ortlab.render.page import Block, Cell, Code, Column, Drawing, Folded, Frame, Mark, Note, Page, Table
from ortlab.render.pages import compose

_GAP = "  "
_NOTE_WIDTH = 100
"""Columns of a terminal that a note may fill; tables take what they need."""

_CELL_LIMIT = 100
"""Characters of a cell that are shown; a longer one loses its middle."""


def render(record: object) -> str:
    """Write a record (or a `Page`) as plain text.

    Parameters
    ----------
    record
        A `Run`, `Ledger`, `Comparison`, `MemoryPlan`, `Graph`, `Options`, `Status` or doctor's report.

    Raises
    ------
    TypeError
        If there is no page for a record of this type.
    """
    page = record if isinstance(record, Page) else compose(record)
    parts = [units.printable(page.title), *(_block(block) for block in page.blocks)]
    return "\n\n".join(part for part in parts if part)


def table(content: Table) -> str:
    """Write one table, its columns as wide as their widest cell."""
    heads = [units.printable(column.name) for column in content.columns]
    body = [
        [_cell(cell, column) for cell, column in zip(cells, content.columns, strict=True)]
        for cells in content.rows
    ]
    widths = [max(_width(line[i]) for line in [heads, *body]) for i in range(len(heads))]
    flush_right = [column.numeric for column in content.columns]
    lines = [units.printable(content.caption)] if content.caption else []
    if any(heads):
        lines += [_line(heads, widths, flush_right), _GAP.join("-" * width for width in widths)]
    lines += [_line(cells, widths, flush_right) for cells in body]
    if content.left_out:
        lines.append(units.printable(content.left_out))
    return "\n".join(lines)


def _cell(cell: Cell, column: Column) -> str:
    written = units.printable(cell.text)
    return written if column.whole else units.fold(written, _CELL_LIMIT)


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return table(block)
    if isinstance(block, Note):
        prefix = "! " if block.mark in {Mark.BAD, Mark.WARN} else ""
        wrapper = textwrap.TextWrapper(
            _NOTE_WIDTH, initial_indent=prefix, subsequent_indent=" " * len(prefix), break_on_hyphens=False
        )
        return "\n".join(wrapper.fill(units.printable(line)) for line in block.text.splitlines())
    if isinstance(block, (Drawing, Frame)):
        return f"Figure: {units.printable(block.description)}"
    if isinstance(block, Code):
        lines = (f"    {units.printable(line)}".rstrip() for line in block.source.splitlines())
        return "\n".join([f"{units.printable(block.caption)}:", *lines])
    return _folded(block)


def _folded(block: Folded) -> str:
    if block.repeats:
        return ""
    if block.instead:
        return f"{units.printable(block.title)}: {units.printable(block.instead)}"
    lines = [f"{units.printable(block.title)}:", *(units.printable(line) for line in block.text.splitlines())]
    return "\n".join([*lines, *(_block(one) for one in block.blocks)])


def _line(cells: list[str], widths: list[int], flush_right: list[bool]) -> str:
    padded = []
    for cell, width, right in zip(cells, widths, flush_right, strict=True):
        space = " " * (width - _width(cell))
        padded.append(space + cell if right else cell + space)
    return _GAP.join(padded).rstrip()


def _width(text: str) -> int:
    """Count terminal columns: East Asian wide characters and emoji take two, combining marks none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in {"W", "F"} for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)
