"""A graph as it is drawn: structure, shapes and small constants, without weights, and with a name for every node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab.graphs.scopes import node_names
from ortlab.graphs.stripping import stripped
from ortlab.graphs.viewer.order import in_order

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, ValueInfoProto

KEPT_BYTES: Final = 256
"""Values of a constant up to this size are shown; of larger ones the shape and the type are."""

_NEWEST_IR: Final = 10


def lean(model: ModelProto) -> ModelProto:
    """Return a copy as it is drawn; the model itself stays as it is.

    The nodes stand in an order in which they can be computed, and have unique names. Parameters are constants without
    values, which netron shows in the nodes that use them, as it shows those of an inference graph; their gradients are
    no outputs, so that two nodes for each parameter are not drawn.
    """
    import onnx

    copy, _ = stripped(model, KEPT_BYTES)
    # Netron knows an ONNX file by its first bytes: a version of the format up to 10, and a producer with a plain name.
    copy.ir_version = min(model.ir_version, _NEWEST_IR) or _NEWEST_IR
    copy.producer_name = "ortlab"
    for tensor in copy.graph.initializer:  # a small one may name a file, which the page has not
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    for name, node in zip(node_names(model.graph), copy.graph.node, strict=True):
        node.name = name
    ordered = in_order(copy.graph.node)
    del copy.graph.node[:]
    copy.graph.node.extend(ordered)
    _fold_parameters(copy.graph)
    return copy


def is_parameter(value: ValueInfoProto) -> bool:
    """Whether an input is a parameter or a buffer: it has a module's path for a name, and a shape without symbols."""
    sizes = value.type.tensor_type.shape.dim
    return "." in value.name and not any(size.dim_param for size in sizes)


def _fold_parameters(graph: GraphProto) -> None:
    parameters = [value for value in graph.input if is_parameter(value)]
    names = {value.name for value in parameters}
    batch = [value for value in graph.input if value.name not in names]
    results = [value for value in graph.output if value.name.removesuffix("_grad") not in names]
    del graph.input[:], graph.output[:]
    graph.input.extend(batch)
    graph.output.extend(results)
    held = {tensor.name for tensor in graph.initializer}
    for value in parameters:
        if value.name not in held:
            tensor = value.type.tensor_type
            sizes = [size.dim_value for size in tensor.shape.dim]
            graph.initializer.add(name=value.name, data_type=tensor.elem_type, dims=sizes)
