"""The order in which nodes are computed, and runs of nodes of one place in it."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final

from ortlab.errors import BuildError

if TYPE_CHECKING:
    from onnx import NodeProto

_GRAPHS: Final = (5, 10)
"""`AttributeProto.GRAPH` and `GRAPHS`, without the import of onnx."""


def reads(node: NodeProto) -> set[str]:
    """Return the names of the values that a node reads, those that the graphs in its attributes read included."""
    names = {name for name in node.input if name}
    for attribute in node.attribute:
        if attribute.type in _GRAPHS:
            for graph in (attribute.g, *attribute.graphs):
                for inner in graph.node:
                    names |= reads(inner)
    return names


def predecessors(nodes: Sequence[NodeProto]) -> list[list[int]]:
    """Return, for each node, which nodes make what it reads."""
    producers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    return [
        sorted({producers[name] for name in reads(node) if name in producers} - {at})
        for at, node in enumerate(nodes)
    ]


def in_order(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Return the nodes with each after those that make what it reads, otherwise in their own order.

    ONNX asks for that; the graphs that ORT writes with recompute plans hold recomputed nodes at their end. Raises
    BuildError where nodes wait for each other in a circle.
    """
    before = predecessors(nodes)
    state = [0] * len(nodes)  # 0 not seen, 1 waits for others, 2 done
    done: list[NodeProto] = []
    for first in range(len(nodes)):
        waiting = [first]
        while waiting:
            at = waiting[-1]
            if state[at] == 0:
                state[at] = 1
                for needed in reversed(before[at]):
                    if state[needed] == 1:
                        raise BuildError(
                            "The graph cannot be drawn.",
                            why=f"The node {nodes[needed].name[:200]} needs what is made of its own result.",
                            fix="Read it from the file that ORT wrote, or export the model again.",
                        )
                    if state[needed] == 0:
                        waiting.append(needed)
            else:
                waiting.pop()
                if state[at] == 1:
                    state[at] = 2
                    done.append(nodes[at])
    return done


def in_backward(nodes: Sequence[NodeProto]) -> list[bool]:
    """Return for each node whether it is part of backward: by its name, or because it needs what `YieldOp` hands over.

    Recomputed nodes are part of backward: they run there.
    """
    late: list[bool] = []
    for node, needed in zip(nodes, predecessors(nodes), strict=True):
        named = (
            "_Grad/" in node.name
            or node.name.startswith("AccumulateGrad")
            or node.name.endswith("_recompute")
        )
        late.append(named or any(late[at] or nodes[at].op_type == "YieldOp" for at in needed))
    return late


def runs(
    before: Sequence[Sequence[int]], places: Sequence[Hashable], first: Sequence[bool]
) -> list[list[int]]:
    """Part nodes into runs of one place, so that the runs depend on each other without circles.

    Of the nodes that could come next, one of the present place is taken; where there is none, the earliest. `before`
    holds for each node what it depends on, in an order in which the nodes can be computed. Nodes that are `first` go
    before all others as long as one of them can: a forward is not parted by what a backward could compute early.
    """
    waiting = _Waiting(before, places, first)
    parted: list[list[int]] = []
    while (at := waiting.earliest()) is not None:
        run: list[int] = []
        while at is not None:
            run.append(at)
            at = waiting.next_in(places[run[0]])
        parted.append(run)
    return parted


class _Waiting:
    """The nodes that could come next, in all and by place."""

    def __init__(
        self, before: Sequence[Sequence[int]], places: Sequence[Hashable], first: Sequence[bool]
    ) -> None:
        self._places = places
        self._first = first
        self._missing = [len(needed) for needed in before]
        self._after: list[list[int]] = [[] for _ in before]
        self._taken = [False] * len(before)
        self._ready: dict[Hashable, list[int]] = {}
        self._everywhere: list[tuple[bool, int]] = []
        for at, needed in enumerate(before):
            for other in needed:
                self._after[other].append(at)
        for at, missing in enumerate(self._missing):
            if not missing:
                self._offer(at)

    def earliest(self) -> int | None:
        """Take the first of all; None if none is left."""
        while self._everywhere:
            _, at = heapq.heappop(self._everywhere)
            if not self._taken[at]:
                return self._take(at)
        return None

    def next_in(self, place: Hashable) -> int | None:
        """Take the first of a place; None if none of it could come next."""
        here = self._ready[place]
        while here:
            at = heapq.heappop(here)
            if not self._taken[at]:
                return self._take(at)
        return None

    def _take(self, at: int) -> int:
        self._taken[at] = True
        for follower in self._after[at]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._offer(follower)
        return at

    def _offer(self, at: int) -> None:
        heapq.heappush(self._ready.setdefault(self._places[at], []), at)
        heapq.heappush(self._everywhere, (not self._first[at], at))
