"""The module of each node, for putting together what belongs together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortlab.graphs.stages import Graph


def modules_of(graph: Graph) -> dict[str, str]:
    """Return the path of the module of those nodes of which it is known, by the name under which they are drawn."""
    return {name: origin.module for name, origin in graph.origins.items() if origin.is_known}
