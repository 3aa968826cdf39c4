"""Keep outputs of a graph that no input has a part in, such as a mask, a number or a table of positions.

ONNX Runtime folds constants before it builds a gradient, and what is folded into an output has no node any more: the
constructor of GradientGraphBuilder in 1.19.2 (``gradient_graph_builder.cc``) then stops with "couldn't find the
producer node, and it's not a graph input". A copy that torch makes is not folded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from onnx import TensorProto, helper

from ortlab.engine.passes.graph_edits import ATEN, GraphAdditions
from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

_COPY: Final = "clone"


def install() -> None:
    """Run the pass of this module on each export. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_infer_shapes", _run_first)


def _run_first(original: Callable[[onnx.ModelProto], onnx.ModelProto]) -> Callable[..., onnx.ModelProto]:
    def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
        keep_constant_outputs(model)
        return original(model)

    return infer_shapes


def keep_constant_outputs(model: onnx.ModelProto) -> bool:
    """Let torch copy each output that is computed from constants alone; say whether the model changed."""
    graph = model.graph
    variable = {value.name for value in graph.input}
    for node in graph.node:
        if (
            node.domain
            or not variable.isdisjoint(node.input)
            or any(one.HasField("g") for one in node.attribute)
        ):
            variable.update(node.output)
    types = {value.name: value.type for value in graph.output}
    additions = GraphAdditions(model)
    for node in [
        node for node in graph.node if node.op_type == "Identity" and node.output[0] not in variable
    ]:
        if node.output[0] in types:
            _copy(model, additions, node, types[node.output[0]])
    return additions.apply()


def _copy(
    model: onnx.ModelProto, additions: GraphAdditions, node: onnx.NodeProto, kind: onnx.TypeProto
) -> None:
    """Let torch copy what a node passes on; booleans cross as bytes (see `torch_calls`)."""
    (source,), (output,) = node.input, node.output
    copied, element_type = f"{output}_copy", kind.tensor_type.elem_type
    is_boolean = element_type == TensorProto.BOOL
    if is_boolean:
        source = additions.node(node, "Cast", [source], f"{output}_bytes", to=TensorProto.UINT8)
    additions.node(node, "ATen", [source], copied, domain=ATEN, operator=_COPY)
    if is_boolean:
        additions.node(node, "Cast", [copied], output, to=TensorProto.BOOL)
        additions.drop(node)
    else:
        node.input[0] = copied
    # ORT has to be told the type of an ATen node's output.
    shape = [size.dim_value if size.HasField("dim_value") else None for size in kind.tensor_type.shape.dim]
    carried = TensorProto.UINT8 if is_boolean else element_type
    model.graph.value_info.append(helper.make_tensor_value_info(copied, carried, shape))
