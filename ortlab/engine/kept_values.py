"""Where the values of an execution graph come from, and which buffers the backward finds there from the forward.

A session saves its graph in the order in which it executes it, so what stands before the YieldOp, which hands the
outputs to PyTorch, is the forward, and what stands behind it the backward. Only the copies of nodes that a plan
recomputes may stand anywhere; they run in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ortlab.graphs.nodes import YIELD, is_copy
from ortlab.memory.trace import ONNX_VIEWS

if TYPE_CHECKING:
    import onnx


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
        self.nodes = [node for node in graph.node[:border] if not is_copy(node)]
        self._yield = graph.node[border]
        self._backward = [node for node in graph.node[:border] if is_copy(node)] + list(
            graph.node[border + 1 :]
        )
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
