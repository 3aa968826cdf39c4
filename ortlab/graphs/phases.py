"""In which pass of a step each node of a graph runs: the forward, the backward, or there a second time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from ortlab.memory.recompute import COPY

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

Phase = Literal["forward", "backward", "recomputed"]

PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "recomputed")

YIELD: Final = "YieldOp"
"""The node between forward and backward: it hands the outputs to PyTorch, and takes their gradients."""


def phases(graph: GraphProto) -> list[Phase | None]:
    """Return the pass of each node, in order; None for the border itself.

    ORT lists what the outputs need before the border, and what needs a gradient from PyTorch behind it; a session saves
    its graph in the order in which it executes it. Copies of nodes that a plan recomputes may stand anywhere.
    """
    border = next((place for place, node in enumerate(graph.node) if node.op_type == YIELD), len(graph.node))
    found: list[Phase | None] = []
    for place, node in enumerate(graph.node):
        if place == border:
            found.append(None)
        elif is_copy(node):
            found.append("recomputed")
        else:
            found.append("forward" if place < border else "backward")
    return found


def is_copy(node: NodeProto) -> bool:
    """Say whether ORT's memory optimizer has put a node in, to compute in the backward what the forward had."""
    return any(name.endswith(COPY) for name in node.output)
