"""Where the values of an execution graph come from, which buffers outlive the forward, and when they are allocated.

A session saves its graph in the order in which it executes it, so what stands before the YieldOp, which hands the
outputs to PyTorch, is the forward, and what stands behind it the backward. Only the copies of nodes that are
recomputed, and what hands kept values to them, may stand anywhere; they run in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import onnx

from ortlab.engine.passes.training_graph import HIDING
from ortlab.graphs.nodes import YIELD, is_copy, is_holder
from ortlab.memory.trace import ONNX_VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ortlab.engine.execution import Execution


@dataclass
class Kept:
    """A buffer that the forward fills and the backward reads, or the caller gets."""

    root: str  # the result that fills it, or the graph's input that it is
    views: list[str] = field(default_factory=list)  # results over it, other than the root, that are read
    readers: list[str] = field(default_factory=list)  # backward nodes that read it
    returned: bool = False  # whether the YieldOp reads it


class ForwardOfGraph:
    """The forward part of a training session's execution graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        border = next(place for place, node in enumerate(graph.node) if node.op_type == YIELD)
        early = graph.node[:border]
        late = [node for node in early if is_copy(node) or is_holder(node)]
        self.nodes = [node for node in early if not is_copy(node) and not is_holder(node)]
        self._yield = graph.node[border]
        self._backward = [*late, *graph.node[border + 1 :]]
        self._inputs = {value.name for value in graph.input}

    @cached_property
    def made(self) -> dict[str, tuple[int, int]]:
        """By result: the place of its node among `nodes`, and which of the node's outputs it is."""
        return {
            name: (place, output)
            for place, node in enumerate(self.nodes)
            for output, name in enumerate(node.output)
            if name
        }

    def root(self, name: str) -> str:
        """Return the value whose buffer a value is: itself, unless it is a view."""
        while name in self.made:
            node = self.nodes[self.made[name][0]]
            if node.domain or node.op_type not in ONNX_VIEWS or node.output[0] != name:
                break
            name = node.input[0]
        return name

    def source(self, name: str) -> str:
        """Return the result that a result of the forward is, behind nodes that hand it on in its memory."""
        place, output = self.made[name]
        node = self.nodes[place]
        return self.source(node.input[output]) if node.op_type == HIDING else name

    def kept(self) -> tuple[Kept, ...]:
        """Return the buffers that outlive the forward, in the order of their first reader; constants are left out."""
        found: dict[str, Kept] = {}
        for node in (self._yield, *self._backward):
            for name in dict.fromkeys(node.input):
                root = self.root(name)
                if root not in self.made and root not in self._inputs:
                    continue
                one = found.setdefault(root, Kept(root))
                if name != root and name not in one.views:
                    one.views.append(name)
                if node is self._yield:
                    one.returned = True
                elif name_of(node) not in one.readers:
                    one.readers.append(name_of(node))
        return tuple(found.values())


def name_of(node: onnx.NodeProto) -> str:
    """Return the name of a node, or of its first result where ORT has given it none."""
    return node.name or next(filter(None, node.output), "")


_NEVER_IN_PLACE: Final = frozenset(
    "Concat ConcatTraining Conv FusedMatMul Gather GatherElements Gemm MatMul Shape Split Transpose".split()  # noqa: SIM905 - so many words are easier to read without quotes
)
"""Operators whose results cannot be written over what they are still read from."""


def earliest_places(execution: Execution, values: Iterable[str]) -> dict[str, int]:
    """Return for each kept value the place of the first node in whose turn its memory can have been allocated.

    An activation has memory of its own, from its node on, unless its operator works in place: ORT then lets it write
    into the buffer of an input that nobody reads any more (`MayInplace`; ``allocation_planner.cc``,
    `FindReusableInput`), also where buffers are otherwise not reused, as in ORTModule's sessions. Which operators may
    do so is not told, so that every one may that could: an activation's memory is from some node between the first of
    such a chain and its own.

    Places count from 0 in the order of execution. `values` are names of results that fill a buffer
    (`SavedActivation.value`); those that the forward does not make are left out.
    """
    graph = onnx.load_model_from_string(execution.serialized_graph("execution"))
    forward = ForwardOfGraph(graph)
    outliving = {one.root for one in forward.kept()}
    last_read = {forward.root(name): place for place, node in enumerate(forward.nodes) for name in node.input}
    dies = {root: place for root, place in last_read.items() if root not in outliving}
    return {value: _earliest(forward, dies, value) for value in values if value in forward.made}


def _earliest(forward: ForwardOfGraph, dies: Mapping[str, int], value: str) -> int:
    """Follow the chain of nodes that can have worked in place; `dies` has the last reader of each buffer."""
    earliest = place = forward.made[value][0]
    waiting, seen = [place], {value}
    while waiting:
        place = waiting.pop()
        earliest = min(earliest, place)
        node = forward.nodes[place]
        if node.op_type in _NEVER_IN_PLACE:
            continue
        for name in node.input:
            root = forward.root(name)
            if root in forward.made and root not in seen and dies.get(root) == place:
                seen.add(root)
                waiting.append(forward.made[root][0])
    return earliest
