"""Where the memory optimizer of 1.19.2 would recompute: read from what it says while it looks."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from ortlab.engine.kept_values import name_of
from ortlab.errors import BuildError
from ortlab.memory import insight
from ortlab.memory.recompute import RecomputePlace, RecomputePlaces

if TYPE_CHECKING:
    import onnx

    from ortlab.engine.logs.runtime_log import Line

_ATTENTION: Final = frozenset({"Softmax", "BiasSoftmax", "BiasSoftmaxDropout"})

_NORMS: Final = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})

_ON_THE_WAY: Final = _NORMS | {"Dropout", "BitmaskDropout", "Cast"}
"""What may stand between the end of a layer and the value that goes into the next one."""

_CANDIDATE: Final = re.compile(
    r"Find candidate output named \[(?P<output>.+)\] of Node (?P<node>.*)\([^()]*\)$"
)

_COMPROMISED: Final = re.compile(r"Searching Node .* for compromised recompute$")

_LOOKS: Final = re.compile(r"Enter SelectRecomputeSubgraph for Node (?P<node>.*)\((?P<operator>[^()]*)\)$")

_FOUND: Final = re.compile(
    r"Node (?P<node>.*?)\((?P<operator>[^()]*)\) can be recomputed(?: with its precedent nodes: (?P<before>.*))?$"
)

_BEFORE: Final = re.compile(r"\(name:(?P<name>.*?), type:(?P<operator>[^()]*)\)")


class _Found(NamedTuple):
    cluster: str
    strategy: int
    node: str
    nodes: tuple[str, ...]


def find_places(lines: Sequence[Line], graph: onnx.GraphProto) -> RecomputePlaces:
    """Read the places from ORT's messages; they come in the order of the forward.

    `lines` are what it said at VERBOSE while it was asked for its plans anywhere in `graph` (``recompute_analysis.cc``,
    ``CheckNodeForRecompute``): node by node from the graph's end to its start.
    """
    makers = {output: node for node in graph.node for output in node.output if output}
    outputs: dict[str, list[str]] = {}
    for line in lines:
        if match := _CANDIDATE.match(line.text):
            maker = makers.get(match["output"])
            outputs.setdefault(name_of(maker) if maker else match["node"], []).append(match["output"])
    nameless = _Nameless(graph, outputs)
    found: list[_Found] = []
    node, strategy, compromises = "", 1, False
    for line in lines:
        if _COMPROMISED.match(line.text):
            compromises = True
        elif match := _LOOKS.match(line.text):
            if not compromises:
                node = match["node"] or nameless.next(match["operator"])
            strategy, compromises = 2 if compromises else 1, False
        elif match := _FOUND.match(line.text):
            before = _BEFORE.findall(match["before"] or "")
            nodes = [*before, (match["node"], match["operator"])]
            found.append(
                _Found(
                    cluster="".join(f"{operator}+" for _, operator in nodes),
                    strategy=strategy,
                    node=node,
                    nodes=tuple(name for name, _ in nodes),
                )
            )
    order = {output: number for node in graph.node for number, output in enumerate(node.output)}
    stashed = {output for several in outputs.values() for output in several}
    layers = boundaries(graph, stashed)
    places = tuple(
        RecomputePlace(
            *one,
            outputs=tuple(sorted(outputs.get(one.node, ()), key=lambda output: order.get(output, 0))),
            boundary=not layers.isdisjoint(outputs.get(one.node, ())),
        )
        for one in reversed(found)
    )
    return RecomputePlaces(
        places, tuple(output for node in graph.node for output in node.output if output in layers)
    )


class _Nameless:
    """The nodes without a name whose results are kept: those of a function that ORT has put in place of a node.

    ORT tells them apart by their operator only, and looks at the last one first.
    """

    def __init__(self, graph: onnx.GraphProto, outputs: Mapping[str, Sequence[str]]) -> None:
        self._left: dict[str, list[str]] = {}
        for node in graph.node:
            if not node.name and name_of(node) in outputs:
                self._left.setdefault(node.op_type, []).append(name_of(node))

    def next(self, operator: str) -> str:
        """Return what the next node of an operator that ORT looks at is known as; empty if none is left."""
        left = self._left.get(operator)
        return left.pop() if left else ""


def check_places(places: RecomputePlaces, report: str) -> None:
    """Raise BuildError unless the places found are those that ORT counts in `report`, its MemoryInsight table."""
    counted: Counter[tuple[str, int]] = Counter()
    for row in insight.read(report).rows:
        counted.update({(option.cluster, option.strategy): row.places for option in row.options})
    found = Counter((place.cluster, place.strategy) for place in places.places)
    if found != counted:
        cluster, strategy = next(iter((counted - found) + (found - counted)))
        raise BuildError(
            "The places of this model's recompute plans cannot be told.",
            why=f"ONNX Runtime counts {counted[cluster, strategy]} places of {cluster}:{strategy} and names "
            f"{found[cluster, strategy]} of them; its messages can be read on Linux only.",
            fix="Use memory_level=0 and plans for all places, as in Gelu+:1:-1.",
        )


def boundaries(graph: onnx.GraphProto, stashed: Collection[str]) -> frozenset[str]:
    """Return the values that transformer layers hand to each other, among those that backward needs (`stashed`).

    They are enough to recompute a layer from: one for each attention whose residual is found. Where a layer
    normalisation comes last, it is the normalisation's input, so that its result is recomputed, too. `graph` is a
    training graph, as it is executed.
    """
    forward = _forward(graph)
    producers = {output: node for node in forward for output in node.output if output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in forward:
        for value in node.input:
            readers.setdefault(value, []).append(node)
    order = {id(node): number for number, node in enumerate(forward)}
    found = set[str]()
    for node in forward:
        if node.op_type in _ATTENTION:
            residual = _residual(node, producers, readers, order)
            found.update(_worth_keeping(residual, producers, stashed))
    return frozenset(found)


def _forward(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes before the one that hands the outputs to PyTorch, in their order."""
    nodes = list(graph.node)
    end = next((number for number, node in enumerate(nodes) if node.op_type == "YieldOp"), len(nodes))
    return nodes[:end]


def _residual(
    attention: onnx.NodeProto,
    producers: Mapping[str, onnx.NodeProto],
    readers: Mapping[str, list[onnx.NodeProto]],
    order: Mapping[int, int],
) -> str:
    """Return the value that an attention is made of and that is added to its result; empty if there is none."""
    above = _ancestors(attention, producers)
    waiting = deque(node for value in attention.output for node in readers.get(value, ()))
    below = set(attention.output)
    additions = []
    seen = set[int]()
    while waiting:
        node = waiting.popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type == "Add" and any(value in above for value in node.input):
            additions.append(node)
            continue
        below.update(node.output)
        waiting.extend(reader for value in node.output for reader in readers.get(value, ()))
    if not additions:
        return ""
    first = min(additions, key=lambda node: order[id(node)])
    return next((value for value in first.input if value in above and value in producers), "")


def _ancestors(node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto]) -> frozenset[str]:
    found = set[str]()
    waiting = [value for value in node.input if value]
    while waiting:
        value = waiting.pop()
        if value in found:
            continue
        found.add(value)
        if value in producers:
            waiting.extend(one for one in producers[value].input if one)
    return frozenset(found)


def _worth_keeping(
    residual: str, producers: Mapping[str, onnx.NodeProto], stashed: Collection[str]
) -> list[str]:
    """Return the saved value that the residual is cheaply made of, or the residual, or nothing."""
    chosen = [residual] if residual in stashed else []
    value = residual
    while value in producers and producers[value].op_type in _ON_THE_WAY:
        normalises = producers[value].op_type in _NORMS
        value = producers[value].input[0]
        if normalises:
            return [value] if value in stashed else chosen
    return chosen
