"""What ORT's memory optimizer reports about a training session: activations kept for backward, plans to recompute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PROBE_ANYWHERE = "1:0"
"""Look for subgraphs anywhere; ORT's default."""


@dataclass(frozen=True)
class MemoryReport:
    """The answer of `get_serialized_ortmodule_memory_stat` (row F9), for a session without any plan applied."""

    insight: str  # ORT's MemoryInsight table
    # By plan ("Gelu+:1:-1"): the predicted saving in bytes, summed over its places, in terms of symbolic dimensions;
    # and the number of places.
    savings: Mapping[str, tuple[str, int]]
    symbols: Mapping[str, int]  # sizes of the symbolic dimensions in the batch that the graph was built with
    # For each symbol that counts labels which are not ignored: the number of all labels, a formula (row T16).
    label_totals: Mapping[str, str] = field(default_factory=dict)
