"""The page of a profiled step: which operators take the time, and what the step needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.memory.trace import lifetimes
from ortlab.render.page import Column, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.memory.trace import Trace

OPERATORS_SHOWN: Final = 20
"""Rows of operators that a page shows: those that take the most time."""


def trace_page(trace: Trace) -> Page:
    """List operators by time, forward, backward and recomputed apart."""
    table = trace.table()
    total = sum(node.ms for node in trace.nodes)
    columns = (
        Column("operator"),
        Column("pass"),
        *(Column(name, numeric=True) for name in ("nodes", "time", "share", "results")),
    )
    rows = tuple(
        row(
            one["operator"],
            one["pass"],
            units.count(one["nodes"]),
            units.duration(one["time [ms]"]),
            units.percent(one["time [ms]"] / total if total else 0.0),
            units.size(one["results [bytes]"]),
        )
        for one in table.head(OPERATORS_SHOWN).to_dict("records")
    )
    more = len(table) - len(rows)
    left_out = f"{units.count(more)} more rows: trace.table() has them." if more else ""
    again = f", {units.duration(trace.recomputed_ms)} of it a second time" if trace.recomputed_ms else ""
    found = lifetimes(trace)
    at = trace.nodes[found.peak_at]
    sentences = (
        f"Kernels took {units.duration(trace.forward_ms)} in the forward and {units.duration(trace.backward_ms)} in "
        f"the backward{again}. Measured with ONNX Runtime's profiler, which slows the step; each kernel's time is the "
        f"shortest of {units.count(trace.steps)} steps."
    )
    memory = (
        f"Buffers of {units.size(found.peak)} are alive at the peak, in the {'backward' if at.backward else 'forward'} "
        f"where {at.operator} runs: simulated from measured sizes. {units.size(sum(one.size for one in found.kept))} "
        "are kept from the forward for the backward."
    )
    return Page(
        "Profile of a step",
        (
            Note(sentences),
            Table("Operators by time", columns, rows, left_out=left_out),
            Note(memory),
        ),
    )
