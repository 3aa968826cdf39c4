"""The nodes around one node."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.graphs.viewer.order import predecessors, reads

if TYPE_CHECKING:
    from onnx import ModelProto

MOST: Final = 400
"""How many nodes a neighbourhood has at most."""


def neighbourhood(model: ModelProto, around: str, hops: int) -> tuple[ModelProto, int]:
    """Return a copy of a graph with the nodes around one, and how many hops they are away at most.

    It reaches less far than asked for if it would have more than `MOST` nodes. What the nodes read from outside are
    the inputs of the copy, and what is read outside its outputs.

    Parameters
    ----------
    model
        A lean graph, whose nodes are in an order in which they can be computed.
    around
        Name of the node.
    hops
        How many edges away, in both directions.

    Raises
    ------
    OptionError
        If there is no such node, or `hops` is negative.
    """
    import onnx

    nodes = model.graph.node
    numbers = {node.name: at for at, node in enumerate(nodes)}
    if around not in numbers:
        near = difflib.get_close_matches(around, numbers, n=3, cutoff=0.3)
        raise OptionError(
            f"The graph has no node {around[:200]!r}.",
            fix=f"Near it are: {', '.join(near)}."
            if near
            else "The names stand in [node.name for node in graph.model.graph.node].",
        )
    if hops < 0:
        raise OptionError(f"A neighbourhood reaches 0 hops or more, not {hops}.")
    near_to: list[set[int]] = [set(needed) for needed in predecessors(nodes)]
    for at, needed in enumerate([*map(tuple, near_to)]):
        for other in needed:
            near_to[other].add(at)
    found, edge, reached = {numbers[around]}, {numbers[around]}, 0
    while reached < hops and edge:
        edge = {other for at in edge for other in near_to[at]} - found
        if len(found) + len(edge) > MOST:
            break
        found |= edge
        reached += 1
    inside = [nodes[at] for at in sorted(found)]
    outside = {name for at, node in enumerate(nodes) if at not in found for name in reads(node)}
    outside |= {value.name for value in model.graph.output}
    made = {name for node in inside for name in node.output if name}
    read = (
        {name for node in inside for name in reads(node)}
        - made
        - {tensor.name for tensor in model.graph.initializer}
    )
    types = {
        value.name: value for value in [*model.graph.input, *model.graph.value_info, *model.graph.output]
    }
    part = onnx.ModelProto()
    part.CopyFrom(model)
    for repeated in (part.graph.node, part.graph.input, part.graph.output):
        del repeated[:]
    part.graph.node.extend(inside)
    for name in sorted(read):
        part.graph.input.append(types.get(name, onnx.ValueInfoProto(name=name)))
    for name in sorted(made & outside):
        part.graph.output.append(types.get(name, onnx.ValueInfoProto(name=name)))
    return part, reached if edge or reached == hops else hops
