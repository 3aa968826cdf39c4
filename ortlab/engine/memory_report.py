"""What ORT's memory optimizer reports about a training session: activations kept for backward, plans to recompute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RECOMPUTE = 1
RECOMPUTE_WITH_COMPROMISE = 2

PROBE_ANYWHERE = "1:0"
"""Look for subgraphs anywhere; ORT's default."""

PROBE_WITHIN_LAYERS = "1:1"
"""Look for subgraphs that do not cross a transformer layer's boundary; what memory levels 1 and 2 use."""


@dataclass(frozen=True)
class MemoryReport:
    """The answer of `get_serialized_ortmodule_memory_stat` (row F9), for a session without any plan applied.

    Attributes
    ----------
    insight
        ORT's MemoryInsight table, as text.
    savings
        Plan configuration ("Gelu+:1:-1") to the predicted saving, as a sum over occurrences in terms of symbolic
        dimensions, in bytes, and the number of occurrences.
    symbols
        Values of the symbolic dimensions in the batch that the graph was built with.
    """

    insight: str
    savings: Mapping[str, tuple[str, int]]
    symbols: Mapping[str, int]


def plans_of_level(report: MemoryReport, level: int) -> list[str]:
    """Return the plans that memory level 1 or 2 stands for, as entries of the JSON file that ORT reads.

    ORTModule's `MemoryObserver.find_memory_optimization_opportunity` does the same: level 1 takes the parts of each
    plan that recompute without compromise, level 2 those with compromise too.

    Parameters
    ----------
    report
        The report of a probe within layers.
    level
        1 or 2.
    """
    allowed = {RECOMPUTE} if level == 1 else {RECOMPUTE, RECOMPUTE_WITH_COMPROMISE}
    entries = []
    for config in report.savings:
        parts = [part for part in config.split(",") if int(part.split(":")[1]) in allowed]
        if parts:
            entries.append(",".join(parts))
    return entries
