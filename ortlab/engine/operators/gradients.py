"""Gradients of the operators that torch executes, as ONNX Runtime is told them.

A gradient is a list of nodes ``(operator, inputs, outputs, attributes)``, in the notation of
``ortmodule/_custom_gradient_registry.py`` of 1.19.2: ``GO(i)`` is the gradient of the i-th output, ``I(i)`` and
``O(i)`` are the inputs and outputs of the operator, ``GI(i)`` is the gradient of the i-th input. Those of the operators
that `ortlab.engine.operators.symbolics` leaves to torch stand in a table, which ORTModule hands to its gradient builder
each time a model is wrapped. Those of a `TorchCall` are made for each graph, when it is known what needs one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.operators.torch_calls import (
    BOOLEAN,
    NUMBER,
    NUMBERS,
    TENSOR,
    VALUE,
    gradient_name,
    is_torch_call,
    parsed,
)
from ortlab.engine.passes.graph_edits import ATEN, GraphFacts, aten_operator
from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

    from ortlab.engine.operators.torch_calls import TorchCall

_Node = tuple[Any, ...]


def _backward(operator: str, inputs: str, outputs: str = "GI(0)") -> _Node:
    """Return a node that calls an operator of torch; names are separated by spaces, "-" is an output left out."""
    names = ["" if name == "-" else name for name in outputs.split()]
    return (("ATen", ATEN), inputs.split(), names, {"operator": {"value": operator, "dtype": "string"}})


def _constant(name: str, value: object, dtype: str = "bool") -> _Node:
    return ("Constant", [], [name], {"value": {"value": value, "dtype": dtype, "is_tensor": True}})


_ALL_THREE: Final = _constant("output_mask", [True, True, True])
_OF_THREE: Final = "GI(0) GI(1) GI(2)"
_OF_OUTPUT: Final = ("Identity", ["GO(0)"], ["GI(0)"])
"""What is added to keeps its gradient; the summands gather theirs from where they went."""

_GRADIENTS: Final[dict[str, tuple[tuple[int, ...], list[_Node]]]] = {
    # Takes grad, self, beta, threshold.
    "softplus": ((1, 2), [_backward("softplus_backward", "GO(0) I(0) I(1) I(2)")]),
    # Takes grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask.
    "convolution": (
        (3, 4, 5, 6, 7, 8),
        [
            ("Shape", ["I(2)"], ["bias_sizes"]),
            _ALL_THREE,
            _backward(
                "convolution_backward",
                "GO(0) I(0) I(1) bias_sizes I(3) I(4) I(5) I(6) I(7) I(8) output_mask",
                _OF_THREE,
            ),
        ],
    ),
    # Takes grad, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, mask.
    "native_batch_norm": (
        (3, 4, 5, 6, 7),
        [
            _ALL_THREE,
            _backward(
                "native_batch_norm_backward",
                "GO(0) I(0) I(1) I(3) I(4) O(1) O(2) I(5) I(7) output_mask",
                _OF_THREE,
            ),
        ],
    ),
    "ortlab::instance_norm": (
        (3, 4, 5, 6),
        [_backward("ortlab::instance_norm_backward", "GO(0) I(0) I(1) O(1) O(2) I(6)", _OF_THREE)],
    ),
    # Takes grad, self, kernel_size, stride, padding, dilation, ceil_mode, indices.
    "max_pool3d_with_indices": (
        (1, 2, 3, 4, 5),
        [_backward("max_pool3d_with_indices_backward", "GO(0) I(0) I(1) I(2) I(3) I(4) I(5) O(1)")],
    ),
    # Takes grad, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override.
    "avg_pool3d": (
        (1, 2, 3, 4, 5, 6),
        [_backward("avg_pool3d_backward", "GO(0) I(0) I(1) I(2) I(3) I(4) I(5) I(6)")],
    ),
    # Takes grad, self.
    "_adaptive_avg_pool3d": ((1,), [_backward("_adaptive_avg_pool3d_backward", "GO(0) I(0)")]),
    "scatter_add": (
        (1, 2),
        [
            _OF_OUTPUT,
            _constant("sparse_grad", value=False),
            _backward("gather", "GO(0) I(1) I(2) sparse_grad", "GI(3)"),
        ],
    ),
    "ortlab::grouped_linear": (
        (2,),
        [_backward("ortlab::grouped_linear_backward", "GO(0) I(0) I(1) I(2)", "GI(0) GI(1)")],
    ),
    "index_add": ((1, 2, 4), [_OF_OUTPUT, _backward("index_select", "GO(0) I(1) I(2)", "GI(3)")]),
    "ortlab::index_add_to": ((1, 2, 3), [_backward("index_select", "GO(0) I(2) I(3)")]),
    "ortlab::scatter_add_to": (
        (1, 2, 3),
        [_constant("sparse_grad", value=False), _backward("gather", "GO(0) I(2) I(3) sparse_grad")],
    ),
    # Takes grad, log_probabilities, target, weight, reduction, ignore_index, total.
    "ortlab::cross_entropy": (
        (1, 2, 3, 4),
        [_backward("ortlab::cross_entropy_backward", "GO(0) O(1) I(1) I(2) I(3) I(4) O(2)")],
    ),
    # Takes grad and what the forward has left: the gradients of hidden states, weight and bias.
    "ortlab::chunked_cross_entropy": (
        (3, 4, 5),
        [_backward("ortlab::chunked_cross_entropy_backward", "GO(0) O(1) O(2) O(3)", _OF_THREE)],
    ),
    # The layers of `ortlab.engine.operators.recurrent`: gradients of the results, inputs, results.
    "ortlab::lstm_layer": (
        (7,),
        [
            _backward(
                "ortlab::lstm_layer_backward",
                "GO(0) GO(1) GO(2) I(0) I(1) I(2) I(3) I(4) I(5) I(6) I(7) O(0) O(1) O(2) O(3)",
                "GI(0) GI(1) GI(2) GI(3) GI(4) GI(5) GI(6)",
            )
        ],
    ),
    "ortlab::gru_layer": (
        (6,),
        [
            _backward(
                "ortlab::gru_layer_backward",
                "GO(0) GO(1) I(0) I(1) I(2) I(5) I(6) O(0) O(2)",
                "GI(0) GI(1) GI(2) GI(3) GI(4) GI(5)",
            )
        ],
    ),
    "ortlab::rnn_layer": (
        (6, 7),
        [
            _backward(
                "ortlab::rnn_layer_backward",
                "GO(0) GO(1) I(0) I(1) I(2) I(5) I(6) I(7) O(0)",
                "GI(0) GI(1) GI(2) GI(3) GI(4) GI(5)",
            )
        ],
    ),
    "ortlab::attention": (
        (3, 4, 5),
        [_backward("ortlab::attention_backward", "GO(0) I(0) I(1) I(2) O(0) O(1) O(2) I(4)", _OF_THREE)],
    ),
    # Takes grad, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale.
    "_scaled_dot_product_flash_attention_for_cpu": (
        (3, 4, 5, 6),
        [
            _backward(
                "_scaled_dot_product_flash_attention_for_cpu_backward",
                "GO(0) I(0) I(1) I(2) O(0) O(1) I(3) I(4) I(5) I(6)",
                _OF_THREE,
            )
        ],
    ),
    # Takes grad, query, key, value, attn_bias, out, logsumexp, seed, offset, dropout_p, mask, is_causal, scale.
    "_scaled_dot_product_efficient_attention": (
        (3, 4, 5, 6, 7),
        [
            _constant("grad_input_mask", [True, True, True, False]),
            _backward(
                "_scaled_dot_product_efficient_attention_backward",
                "GO(0) I(0) I(1) I(2) I(3) O(0) O(1) O(2) O(3) I(5) grad_input_mask I(6) I(7)",
                f"{_OF_THREE} -",
            ),
        ],
    ),
}
"""By operator: the inputs that have no gradient, and the nodes that compute those of the others."""


def install() -> None:
    """Put the gradients of this module into ORTModule's table. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    for operator, (constants, nodes) in _GRADIENTS.items():
        # The key of an ATen operator is its name and its overload; these have only the default one.
        CustomGradientRegistry.register(ATEN, "ATen", (operator, ""), lambda nodes=nodes: nodes)
        CustomGradientRegistry.register_custom_stop_gradient_edges(constants, ATEN, "ATen", operator, "")
    replace(GraphExecutionManager, "_initialize_graph_builder", _define_first)


# --- of a `TorchCall` ---------------------------------------------------------------------------------------------


def _define_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Define a graph's gradients when its builder starts: its export may come from another process's file."""

    def initialize_graph_builder(self: Any, info: Any) -> Any:
        define_call_gradients(info._post_export_processed_model)
        return original(self, info)

    return initialize_graph_builder


def note_call_gradients(model: onnx.ModelProto) -> None:
    """Write into each `TorchCall` of a graph which of its inputs need a gradient and which outputs get one."""
    # ORT looks a gradient up by the operator and its overload, which for these holds the whole call. So calls that
    # differ in these needs alone must have different texts.
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
            set_call(node, call.trained(needing, giving))


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
        key = f"{ATEN}::ATen::{operator}::{text}"
        nodes = _of_selected(operator, call) or [_by_autograd(operator, call, text, node)]
        state.register_gradient_definition(key, _to_gradient_definition(nodes))
        without = set(range(len(node.input))) - set(call.gradient_of)
        state.register_custom_stop_gradient_edges(key, without)


def _by_autograd(operator: str, call: TorchCall, text: str, node: onnx.NodeProto) -> _Node:
    """Return a node that runs a call once more, and asks torch for the gradient."""
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
    return (("ATen", ATEN), inputs, outputs, attributes)


_ALWAYS: Final = None
_SELECTING: Final = {
    ("kthvalue", "default"): (2, 3),
    ("max", "dim"): (1, 2),
    ("median", "dim"): (1, 2),
    ("min", "dim"): (1, 2),
    ("mode", "default"): (1, 2),
    ("nanmedian", "dim"): (1, 2),
    ("sort", "default"): (1, _ALWAYS),
    ("sort", "stable"): (2, _ALWAYS),
    ("topk", "default"): (2, _ALWAYS),
}
"""Operators that return entries and their places, by name and overload: which of their arguments is the dimension, and
which says whether it is kept."""
_DEFAULTS: Final = (-1, False)  # of both, in each of them


def _of_selected(operator: str, call: TorchCall) -> list[_Node]:
    """Return the nodes that put a gradient to where entries were taken from, for the operators that tell; else none."""
    places = _SELECTING.get((operator.removeprefix("aten::"), call.overload))
    if places is None or call.gradient_of != (0,) or call.gradients_from != (0,):
        return []
    given = dict[int | None, tuple[Any, ...]](enumerate(call.arguments))
    said = [given.get(place, (VALUE, default)) for place, default in zip(places, _DEFAULTS, strict=True)]
    if call.arguments[0] != (TENSOR,) or any(kind != VALUE for kind, *_ in said):
        return []
    (_, dim), (_, keeps) = said
    return [
        ("Shape", ["I(0)"], ["sizes"]),
        _constant("dim", dim, "int"),
        _constant("keeps", value=keeps or places[1] is _ALWAYS),
        _backward("value_selecting_reduction_backward", "GO(0) dim O(1) sizes keeps"),
    ]


def call_text(node: onnx.NodeProto) -> str:
    """Return the `TorchCall` of a node as text, "" for any other node."""
    if not aten_operator(node):
        return ""
    attribute = _attribute(node, "overload_name")
    text = attribute.s.decode() if attribute is not None else ""
    return text if is_torch_call(text) else ""


def set_call(node: onnx.NodeProto, call: TorchCall) -> None:
    """Let a node that makes a `TorchCall` make another one."""
    _attribute(node, "overload_name").s = call.text.encode()


def _attribute(node: onnx.NodeProto, name: str) -> Any:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)
