"""What is drawn of a graph: all of it if the browser can place it, otherwise groups, a part, or fewer edges."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.graphs.viewer.grouping import DOMAIN, Group, grouped, in_backward, predecessors, reads

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from ortlab.graphs.stages import Graph

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


MOST: Final = 400
"""How many nodes a neighbourhood has at most."""

STUB: Final = "… "
"""What the name of a value that is read from far away begins with."""

GROUPINGS: Final = ("auto", "module", "none")


@dataclass(frozen=True)
class Reduction:
    """What is drawn of a graph."""

    model: ModelProto = field(repr=False)  # as it is drawn
    groups: tuple[Group, ...] = field(default=(), repr=False)
    words: str = ""  # what was reduced; empty if nothing was
    refused: str = ""  # why nothing can be drawn; empty if something can


def reduced(graph: Graph, model: ModelProto, *, around: str, hops: int, group: str) -> Reduction:
    """Reduce `model`, the lean copy of a graph, until the browser can place it; the rest is as in `document`."""
    said = []
    count = len(model.graph.node)
    groups: tuple[Group, ...] = ()
    if around:
        model, reached = neighbourhood(model, around, hops)
        inside = len(model.graph.node)
        away = f"{reached} hop{'' if reached == 1 else 's'}"
        said.append(f"{inside:,} of {count:,} nodes are drawn: those within {away} of {around[:80]}")
        if reached < hops:
            said.append(f"{hops} hops would be too many nodes")
    before = cost(model.graph.node)
    if group == "module" or (group == "auto" and not before.within(PLACED_AT_ONCE)):
        nodes = model.graph.node
        model, found = grouped(model, modules_of(graph), in_backward(nodes))
        groups = tuple(found)
        inside = sum(len(each.nodes) for each in groups)
        said.append(
            f"{len(groups):,} groups by module hold {inside:,} of the {before.nodes:,} nodes; "
            "ƒ in the head of a group opens it"
        )
    limits = PLACED_GROUPED if groups else PLACED_WITH_PATIENCE
    after = cost(model.graph.node)
    if after.nodes <= PLACED_AT_ALL[0] and after.span > limits[1]:
        model, cut = without_long_edges(model, limits[1])
        said.append(f"{cut:,} long edges are cut: their readers name what they read")
        after = cost(model.graph.node)
    words = ". ".join(said) + "." if said else ""
    if not after.within(PLACED_AT_ALL):
        how = 'Draw it grouped, group="module", or a part of it, around="the name of a node".'
        why = (
            f"{after.nodes:,} nodes with edges over {after.span:,} places are more than a browser can place."
        )
        return Reduction(model, words=words, refused=f"{why} {how}")
    return Reduction(model, groups, words)


def modules_of(graph: Graph) -> dict[str, str]:
    """Return the module's path of each node whose module is known, by the name under which the node is drawn."""
    return {name: origin.module for name, origin in graph.origins.items() if origin.is_known}


def without_long_edges(model: ModelProto, span: int) -> tuple[ModelProto, int]:
    """Return a copy of a graph whose longest edges are cut so that `span` is kept to, and how many were cut."""
    # The graph is a lean one, whose nodes are in an order in which they can be computed. `span` is the sum of the
    # lengths of the edges that stay, as in `Cost`.
    import onnx

    nodes = model.graph.node
    producers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    lengths = sorted(
        {(at, producers[name]) for at, node in enumerate(nodes) for name in node.input if name in producers},
        key=lambda edge: edge[0] - edge[1],
    )
    kept = set()
    left = span
    for at, producer in lengths:
        left -= at - producer
        if left < 0:
            break
        kept.add((at, producer))
    shapes = {value.name: value for value in [*model.graph.value_info, *model.graph.output]}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    stubs: set[str] = set()
    cut = 0
    for at, node in enumerate(copy.graph.node):
        for position, name in enumerate(node.input):
            if name in producers and (at, producers[name]) not in kept:
                cut += 1
                node.input[position] = STUB + name
                # The head of a node says what it reads from far away. That of a group would be long: there the side
                # bar says it.
                if name not in stubs and node.domain != DOMAIN:
                    stubs.add(name)
                    stub = copy.graph.initializer.add(name=STUB + name, data_type=onnx.TensorProto.FLOAT)
                    if name in shapes:
                        tensor = shapes[name].type.tensor_type
                        stub.data_type = tensor.elem_type
                        stub.dims.extend(size.dim_value for size in tensor.shape.dim)
    return copy, cut


def neighbourhood(model: ModelProto, around: str, hops: int) -> tuple[ModelProto, int]:
    """Return a copy of a graph with the nodes around one, and how many hops they are away at most."""
    # A hop follows an edge in either direction. The copy reaches less far than asked for if it would have more than
    # `MOST` nodes. What the nodes read from outside are the inputs of the copy, and what is read outside its outputs.
    # The graph is a lean one, whose nodes are in an order in which they can be computed.
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
