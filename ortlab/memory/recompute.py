"""What recompute plans would do to a step: the trace that it would have with them.

ORT's memory optimizer goes through the places from the last one to the first. It copies their nodes, lets the backward
and earlier copies read the copies' results (``memory_optimizer.cc``, `CreateRecomputeGraph` and `ModifyGraph`), and
orders the graph so that a copy runs right before the first node that needs it (``graph.cc``,
`MemoryEfficientTopologicalSort`). The same is done here with the trace of a profiled step, in a few ms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ortlab.memory.recompute_places import RecomputePlace
    from ortlab.memory.trace import Trace, TracedNode

COPY: Final = "_recompute"
"""What ORT puts behind the names of a copied node and of its results (``memory_optimizer.cc``)."""


def with_places(trace: Trace, places: Iterable[RecomputePlace], plans: tuple[str, ...] = ()) -> Trace:
    """Return the trace that a step would have if some places were recomputed.

    `trace` is a step without plans, in the order that ORT gives to sessions with plans; `plans` is only noted in the
    result. Times and sizes of copies are predicted as those of the nodes that they repeat.
    """
    nodes = {node.name: node for node in trace.nodes}
    position = {node.name: number for number, node in enumerate(trace.nodes)}
    copies: dict[str, TracedNode] = {}
    copied: set[str] = set()
    replaced: set[str] = set()
    for place in sorted(places, key=lambda one: position[one.node], reverse=True):
        for name in place.nodes:
            if name not in copies:
                copies[name] = _copy(nodes[name], copied)
                copied.update(nodes[name].outputs)
        # All results: ORT looks at the graph twice, and then finds what an earlier copy reads of this node, too.
        replaced.update(nodes[place.node].outputs)
    replaced.discard("")
    again = [_reading_copies(node, replaced) for node in copies.values()]
    rest = [_reading_copies(node, replaced) if node.backward else node for node in trace.nodes]
    sizes = {
        output: trace.sizes.get(output.removesuffix(COPY), 0) for node in again for output in node.outputs
    }
    return replace(trace, nodes=tuple(_ordered(rest, again)), sizes={**trace.sizes, **sizes}, plans=plans)


def _copy(node: TracedNode, copied: set[str]) -> TracedNode:
    return replace(
        node,
        name=node.name + COPY,
        inputs=tuple(name + COPY if name in copied else name for name in node.inputs),
        outputs=tuple(name and name + COPY for name in node.outputs),
        backward=True,
        recomputes=node.name,
    )


def _reading_copies(node: TracedNode, replaced: set[str]) -> TracedNode:
    if replaced.isdisjoint(node.inputs):
        return node
    return replace(node, inputs=tuple(name + COPY if name in replaced else name for name in node.inputs))


def _ordered(nodes: Iterable[TracedNode], copies: Iterable[TracedNode]) -> list[TracedNode]:
    """Put each copy, and the copies that it needs, in front of the first node that needs it.

    ORT may run the branches of one node's copies in another order; the same results live meanwhile.
    """
    waiting = {output: node for node in copies for output in node.outputs if output}
    order: list[TracedNode] = []
    for node in nodes:
        ahead = [node]
        while ahead:  # a stack: copies may need one another through the whole depth of a model
            needed = next((waiting[name] for name in ahead[-1].inputs if name in waiting), None)
            if needed is None:
                order.append(ahead.pop())
            else:
                ahead.append(needed)
                for output in needed.outputs:
                    waiting.pop(output, None)
    return order
