"""Which page a record gets: the one place that `text` and `html` ask."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

from ortlab.comparison import Comparison
from ortlab.doctor import Report
from ortlab.graphs.stages import Graph
from ortlab.memory.plan import MemoryPlan
from ortlab.option_list import OptionList
from ortlab.options import Options
from ortlab.render.lab_pages import graph_page, plan_page, report_page, status_page
from ortlab.render.option_list_page import option_list_page
from ortlab.render.option_pages import options_page
from ortlab.render.run_pages import comparison_page, ledger_page, run_page
from ortlab.runs import Ledger, Run
from ortlab.status import Status

if TYPE_CHECKING:
    from ortlab.render.page import Page


@singledispatch
def compose(record: object) -> Page:
    """Make the page of a record.

    Raises
    ------
    TypeError
        If there is no page for a record of this type.
    """
    known = ", ".join(sorted(kind.__name__ for kind in record_types()))
    message = f"There is no page for a {type(record).__name__}; records that have one: {known}."
    raise TypeError(message)


def record_types() -> tuple[type, ...]:
    """Types of the records that have a page."""
    return tuple(kind for kind in compose.registry if kind is not object)


compose.register(Run, run_page)
compose.register(Ledger, ledger_page)
compose.register(Comparison, comparison_page)
compose.register(Options, options_page)
compose.register(Status, status_page)
compose.register(MemoryPlan, plan_page)
compose.register(Graph, graph_page)
compose.register(Report, report_page)
compose.register(OptionList, option_list_page)
