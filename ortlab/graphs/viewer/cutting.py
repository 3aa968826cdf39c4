"""Edges that cross much of a graph, cut: the reader shows the name of what it reads instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab.graphs.viewer.body import DOMAIN

if TYPE_CHECKING:
    from onnx import ModelProto

STUB: Final = "… "
"""What the name of a value that is read from far away begins with."""


def without_long_edges(model: ModelProto, span: int) -> tuple[ModelProto, int]:
    """Return a copy of a graph whose longest edges are cut so that `span` is kept to, and how many were cut.

    Parameters
    ----------
    model
        A lean graph, whose nodes are in an order in which they can be computed.
    span
        Sum of the lengths of the edges that stay, as in `preflight.Cost`.
    """
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
                # The head of a node says what it reads from far away; that of a group would be long, its side bar does.
                if name not in stubs and node.domain != DOMAIN:
                    stubs.add(name)
                    stub = copy.graph.initializer.add(name=STUB + name, data_type=onnx.TensorProto.FLOAT)
                    if name in shapes:
                        tensor = shapes[name].type.tensor_type
                        stub.data_type = tensor.elem_type
                        stub.dims.extend(size.dim_value for size in tensor.shape.dim)
    return copy, cut
