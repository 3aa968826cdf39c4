"""The page of what was found of a model's own autograd Functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab import units
from ortlab.render.page import Cell, Column, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.parity.function_check import FunctionReport

_MARKS = {"agrees": Mark.GOOD, "differs": Mark.BAD, "not checked": Mark.WARN}


def function_page(report: FunctionReport) -> Page:
    """List the Functions, and say what a difference means."""
    heading = f"Autograd Functions of {report.model}"
    if not report.checks:
        return Page(heading, (Note("Its forward calls none.", Mark.QUIET),))
    rows = tuple(
        row(one.name, units.count(one.calls), Cell(one.state, _MARKS[one.state]), one.found or "-")
        for one in report.checks
    )
    columns = (
        Column("function"),
        Column("calls", numeric=True, meaning="in one forward of the model"),
        Column("backward", meaning="measured: against finite differences of the forward, in float64"),
        Column("what was found"),
    )
    note = Note(
        "Each Function ran alone, on the first inputs it got. PyTorch and ONNX Runtime run the same backward: one that "
        "differs trains alike with both, and wrongly, unless it is meant, as in a straight-through estimator.",
        Mark.QUIET if report.ok else Mark.BAD,
    )
    return Page(heading, (Table("", columns, rows), note))
