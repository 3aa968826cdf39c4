"""Tell ONNX Runtime the gradient of each call that torch executes, when it is known what needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.operators.torch_calls import BOOLEAN, NUMBER, NUMBERS, gradient_name, is_torch_call, parsed
from ortlab.engine.passes.graph_edits import GraphFacts, aten_operator
from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

_ATEN: Final = ("ATen", "org.pytorch.aten")


def install() -> None:
    """Define the gradients before each graph builder starts. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    replace(GraphExecutionManager, "_initialize_graph_builder", _define_first)


def _define_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Define a graph's gradients when its builder starts: its export may come from another process's file."""

    def initialize_graph_builder(self: Any, info: Any) -> Any:
        define_call_gradients(info._post_export_processed_model)
        return original(self, info)

    return initialize_graph_builder


def note_call_gradients(model: onnx.ModelProto) -> None:
    """Write into each `TorchCall` of a graph which of its inputs need a gradient and which outputs get one.

    ORT looks a gradient up by the operator and its overload, which for these holds the whole call. So calls that differ
    in these needs alone must have different texts.
    """
    facts = GraphFacts(model)
    for node in model.graph.node:
        text = call_text(node)
        if not text:
            continue
        call = parsed(text)
        needing = [
            index
            for index, name in enumerate(node.input)
            if name in facts.differentiable and call.kinds[index] not in {NUMBER, NUMBERS, BOOLEAN}
        ]
        giving = [
            index
            for index, name in enumerate(node.output)
            if name in facts.leading_out and name in facts.differentiable
        ]
        if needing and giving:
            _attribute(node, "overload_name").s = call.trained(needing, giving).text.encode()


def define_call_gradients(model: onnx.ModelProto) -> None:
    """Register with ORT the gradient of each `TorchCall` of a graph that needs one."""
    from onnxruntime.capi import _pybind_state as state
    from onnxruntime.training.ortmodule._custom_gradient_registry import _to_gradient_definition

    for node in model.graph.node:
        text = call_text(node)
        call = parsed(text) if text else None
        if call is None or not call.gradient_of:
            continue
        operator = aten_operator(node)
        inputs = [f"GO({index})" for index in call.gradients_from]
        inputs += [f"I({index})" for index in range(len(node.input))]
        if call.random:
            inputs.append(f"O({len(node.output) - 1})")
        # GetExternalGradient asks of the n-th output whether the n-th input needs a gradient, whatever index it names.
        outputs = [f"GI({index})" for index in range(max(call.gradient_of) + 1)]
        attributes = {
            "operator": {"value": gradient_name(operator), "dtype": "string"},
            "overload_name": {"value": text, "dtype": "string"},
        }
        key = "::".join((_ATEN[1], _ATEN[0], operator, text))
        definition = _to_gradient_definition([(_ATEN, inputs, outputs, attributes)])
        state.register_gradient_definition(key, definition)
        without = set(range(len(node.input))) - set(call.gradient_of)
        state.register_custom_stop_gradient_edges(key, without)


def call_text(node: onnx.NodeProto) -> str:
    """Return the `TorchCall` of a node as text, "" for any other node."""
    if not aten_operator(node):
        return ""
    attribute = _attribute(node, "overload_name")
    text = attribute.s.decode() if attribute is not None else ""
    return text if is_torch_call(text) else ""


def _attribute(node: onnx.NodeProto, name: str) -> Any:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)
