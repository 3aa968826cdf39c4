"""What placing a graph costs the browser, from its edges, before the browser is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ortlab.graphs.viewer.order import predecessors

if TYPE_CHECKING:
    from onnx import NodeProto

PLACED_AT_ONCE: Final = (500, 6_000)
"""Nodes and span up to which a graph is drawn as it is: about a second."""

PLACED_GROUPED: Final = (1_000, 8_000)
"""Nodes and span of a graph of groups: up to two seconds. Longer edges are cut: those to backward, in a deep model."""

PLACED_WITH_PATIENCE: Final = (3_000, 40_000)
"""Nodes and span up to which a graph that is not to be grouped is drawn: some seconds. Longer edges are cut."""

PLACED_AT_ALL: Final = (10_000, 150_000)
"""Nodes and span above which a graph is refused.

Netron's layout puts a node of its own on every rank that an edge crosses, so that it is the span of the edges that
costs, more than the number of nodes: a training graph keeps activations over its whole length. Measured with netron
9.3.3: 2,016 nodes with a span of 6,000 are placed in 3 s, 432 with 48,000 in 7 s, 828 with 173,000 in 28 s, and 2,016
with a million end the browser tab. `bench/graph_view.py` measures graphs of real builds.
"""


@dataclass(frozen=True)
class Cost:
    """What a graph asks of the layout."""

    nodes: int  # that are drawn
    # Sum over the edges of how many places in the order of the nodes each of them crosses; several edges between the
    # same two nodes are drawn as one.
    span: int

    def within(self, limits: tuple[int, int]) -> bool:
        """Say whether it passes neither limit: that of nodes, that of span."""
        return self.nodes <= limits[0] and self.span <= limits[1]


def cost(nodes: Sequence[NodeProto]) -> Cost:
    """Return what the layout of nodes, in an order in which they can be computed, costs; one pass over the edges."""
    before = predecessors(nodes)
    return Cost(len(nodes), sum(at - other for at, needed in enumerate(before) for other in needed))
