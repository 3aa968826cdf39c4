"""Which nodes of a training graph PyTorch computes on the CPU because ONNX Runtime's own lose digits there.

ReduceSum and ReduceMean of 1.19.2 add one row after the other into a float32 (``core/providers/cpu/reduction``), so the
gradient of a bias is wrong by as many roundings as there are rows, five to ten times as much as PyTorch's sum, which
adds in a cascade. Tanh is an approximation that is five times less exact, Erf makes 1 of NaN, Sqrt NaN of infinity,
and the gradient of a quotient divides by the square of the divisor. The products of Gemm and Conv are added in another
order than PyTorch's, which is no worse; but batch normalisations of small batches behind them make a hundred times as
much of each difference, so a network of both trains like PyTorch only where every digit is the same.

What ORT can recompute to save memory (``memory_optimizer/recompute_analysis.cc``, GetAllowedRecomputeOps) stays ORT's,
so that no plan is lost: Gemm, but in networks with batch normalisations. PyTorch's all the same is the product of a
classifier's head, whose many terms ORT adds one after the other: the gradient of its bias is a difference of nearly
equal numbers. A plan has next to nothing to save there: one row for each sample. Layer normalisations are exchanged
when a session is made (`quick_choice`); their gradients here where digits are most of them: over a few entries, such as
the heads of an attention, and of a mean over many places, as in the pooler of a network for images, whose features lie
close together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import onnx
from onnx import TensorProto, helper

from ortlab.engine.operators.symbolics import FEWEST_CLASSES
from ortlab.engine.passes.graph_edits import (
    GraphFacts,
    aten_operator,
    attributes_of,
    kernel_call,
    put_calls,
)


class _Call(NamedTuple):
    """A call of a kernel of torch that takes the place of a node."""

    kernel: str
    inputs: Sequence[str]
    outputs: Sequence[str] | None = None  # those of the node if None


_Kind = Callable[[onnx.NodeProto, dict[str, Any]], _Call | None]
"""Makes the call that takes the place of a node with these attributes; None leaves the node as it is."""

_SAME_INPUTS: Final = {
    "Erf": "erf",
    "Sign": "sign",
    "Sqrt": "sqrt",
    "Sigmoid": "sigmoid",
    "SigmoidGrad": "sigmoid_backward",
    "Tanh": "tanh",
    "TanhGrad": "tanh_backward",
    "GlobalAveragePool": "mean_over_space",
}
"""Kernels that take the inputs of the node, whatever its attributes."""

_FEW_ENTRIES: Final = 8
"""Below so many entries PyTorch computes a layer normalisation: their variance is often much less than their square."""

_FEW_MADE: Final = 16
_MANY_FEATURES: Final = 256
"""At most so many numbers of at least so many features are a head, whose product PyTorch computes."""

_AXES_ARE_INPUT: Final = {"ReduceSum": 13, "ReduceMean": 18}
"""From which opset on the axes are an input of the node instead of an attribute."""
_KEEPS_TYPE: Final = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Identity", "Expand", "Scale"})
_KEEPS_NUMBERS: Final = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_REDUCTIONS: Final = ("none", "mean", "sum")
"""In the order of torch's numbers (at::Reduction)."""
_NONE_IGNORED: Final = -(2**31)
"""No class has this index."""


def choose_exact(model: onnx.ModelProto) -> None:
    """Let PyTorch compute the float32 nodes of a gradient graph, changed in place, in which ORT loses digits."""
    choice = _ExactChoice(model)
    nodes = [one for node in model.graph.node for one in choice.instead_of(node)]
    if choice.changed:
        put_calls(model, nodes, dict.fromkeys(choice.untyped, TensorProto.FLOAT))


def normalises_batches(graph: onnx.GraphProto) -> bool:
    """Say whether a graph has batch or instance normalisations, which make much of each difference in digits."""
    return any(aten_operator(node) in {"native_batch_norm", "ortlab::instance_norm"} for node in graph.node)


class _ExactChoice:
    """The choice of what takes the place of each node of a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.changed = False
        self.untyped: list[str] = []
        self._constants: list[onnx.NodeProto] = []  # that the call in work takes
        self._opset = next(one.version for one in model.opset_import if one.domain in {"", "ai.onnx"})
        self._facts = GraphFacts(model)
        self._normalises_batches = normalises_batches(model.graph)
        self._kinds: dict[str, _Kind] = {
            "ReduceSum": self._reduced,
            "ReduceMean": self._reduced,
            "Gemm": self._product,
            "Conv": self._convolution,
            "ConvGrad": self._convolution_gradient,
            "ATen": self._adaptive,
            "DivGrad": self._divided_gradient,
            "Scale": self._scaled,
            "LayerNormalizationGrad": self._normalised_gradient,
            "QuickGeluGrad": self._silu_gradient,
            "SoftmaxCrossEntropyLoss": self._loss,
            "SoftmaxCrossEntropyLossInternal": self._loss,
            "SoftmaxCrossEntropyLossGrad": self._loss_gradient,
            "SoftmaxCrossEntropyLossInternalGrad": self._loss_gradient,
        } | dict.fromkeys(_SAME_INPUTS, self._same)

    def instead_of(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes that take the place of one: the node itself where PyTorch is not to compute it."""
        kind = self._kinds.get(node.op_type)
        if kind is None or not self._is_float32(node):
            return [node]
        self._constants = []
        call = kind(node, attributes_of(node))
        if call is None:
            return [node]
        self.changed = True
        made = kernel_call(call.kernel, call.inputs, call.outputs or list(node.output), node)
        self.untyped += [name for name in made.output if not self._facts.element_types.get(name)]
        return [*self._constants, made]

    def _is_float32(self, node: onnx.NodeProto) -> bool:
        """Say whether the first known type among a node's outputs and its first operand is float32; they share it."""
        known = (self._type(name) for name in (*node.output, node.input[0]))
        return next(filter(None, known), 0) == TensorProto.FLOAT

    def _type(self, name: str) -> int:
        """Return the element type of a value, 0 where it is not known; the gradient builder leaves many out."""
        types, producers = self._facts.element_types, self._facts.producers
        producer = producers.get(name)
        while not types.get(name) and producer is not None and producer.op_type in _KEEPS_TYPE:
            name = producer.input[0]
            producer = producers.get(name)
        return types.get(name, 0)

    def _has_few_classes(self, logits: str) -> bool:
        """Say whether a loss has few classes: with many, torch's two steps take memory for the logits twice."""
        shape = self._facts.shapes.get(logits, ())
        classes = shape[1] if len(shape) > 1 else None
        return isinstance(classes, int) and classes < FEWEST_CLASSES

    def _numbers(self, node: onnx.NodeProto, name: str, values: Any) -> str:
        """Add a constant int64 vector for the call in work; return its name."""
        return self._constant(node, name, TensorProto.INT64, values)

    def _constant(self, node: onnx.NodeProto, name: str, kind: int, values: Any) -> str:
        """Add a constant vector for the call in work; return its name."""
        output = f"{next(filter(None, node.output))}_{name}"
        tensor = helper.make_tensor(f"{output}_value", kind, [len(values)], list(values))
        constant = helper.make_node("Constant", [], [output], name=f"{output}_Constant", value=tensor)
        self._constants.append(constant)
        return output

    # ---- the kinds of nodes -----------------------------------------------------------------------------------

    def _same(self, node: onnx.NodeProto, _: dict[str, Any]) -> _Call:
        return _Call(_SAME_INPUTS[node.op_type], node.input)

    def _reduced(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> _Call:
        axes = ""
        if self._opset >= _AXES_ARE_INPUT[node.op_type]:
            axes = node.input[1] if len(node.input) > 1 else ""
        elif attributes.get("axes"):
            axes = self._numbers(node, "axes", attributes["axes"])
        flags = [attributes.get("keepdims", 1), attributes.get("noop_with_empty_axes", 0)]
        kernel = "sum_over" if node.op_type == "ReduceSum" else "mean_over"
        return _Call(kernel, [node.input[0], self._numbers(node, "flags", flags), axes])

    def _adaptive(self, node: onnx.NodeProto, _: dict[str, Any]) -> _Call | None:
        kernel = aten_operator(node).removeprefix("aten::").removeprefix("_")
        is_pooling = kernel in {"adaptive_avg_pool2d", "adaptive_avg_pool2d_backward"}
        return _Call(kernel, node.input) if is_pooling else None

    def _scaled(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> _Call | None:
        return _Call("divided", node.input) if attributes.get("scale_down") else None

    def _normalised_gradient(self, node: onnx.NodeProto, _: dict[str, Any]) -> _Call | None:
        x, weight = node.input[1:3]
        return _Call("layer_norm_backward", node.input) if self._are_few(weight) or self._is_mean(x) else None

    def _are_few(self, weight: str) -> bool:
        """Say whether a layer normalisation, known by its weight, is over a few entries."""
        shape = self._facts.shapes.get(weight, ())
        return (
            bool(shape)
            and math.prod(size if isinstance(size, int) else _FEW_ENTRIES for size in shape) < _FEW_ENTRIES
        )

    def _is_mean(self, name: str) -> bool:
        """Say whether a value is a mean over places, perhaps in another shape."""
        producer = self._facts.producers.get(name)
        while producer is not None and producer.op_type in _KEEPS_NUMBERS:
            producer = self._facts.producers.get(producer.input[0])
        return producer is not None and (
            producer.op_type in {"ReduceMean", "GlobalAveragePool"}
            or "adaptive_avg_pool" in aten_operator(producer)
        )

    def _divided_gradient(self, node: onnx.NodeProto, _: dict[str, Any]) -> _Call | None:
        # ORT divides by the square of the divisor, which is 0 or infinite long before the quotient is.
        if len(node.output) < 2 or not node.output[1] or node.output[1] not in self._facts.consumed:  # noqa: PLR2004
            return None
        wanted = [index for index, name in enumerate(node.output) if name and name in self._facts.consumed]
        inputs = [*node.input[:3], self._numbers(node, "wanted", wanted)]
        return _Call("quotient_backward", inputs, [node.output[index] for index in wanted])

    def _silu_gradient(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> _Call | None:
        # ORT's QuickGelu is x * sigmoid(alpha * x)
        return _Call("silu_backward", node.input) if attributes.get("alpha") == 1 else None

    def _loss(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> _Call | None:
        logits, target, weight, ignored = [*node.input, "", ""][:4]
        both = len(node.output) == 2 and all(node.output)  # noqa: PLR2004 - the loss, the log probabilities
        if not both or not self._has_few_classes(logits):
            return None
        reduced = self._reduction(node, attributes, ignored)
        return _Call("log_softmax_loss", [logits, target, *reduced, weight])

    def _loss_gradient(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> _Call | None:
        grad, log_probabilities, target, weight, ignored, bias = [*node.input, "", "", ""][:6]
        if bias or not self._has_few_classes(log_probabilities):
            return None
        reduced = self._reduction(node, attributes, ignored)
        return _Call("log_softmax_loss_backward", [grad, log_probabilities, target, *reduced, weight])

    def _reduction(self, node: onnx.NodeProto, attributes: dict[str, Any], ignored: str) -> tuple[str, str]:
        """Name the number of the reduction and the class that is ignored."""
        reduction = _REDUCTIONS.index(attributes.get("reduction", b"mean").decode())
        number = self._numbers(node, "reduction", [reduction])
        index = attributes.get("ignore_index", _NONE_IGNORED)
        return number, ignored or self._numbers(node, "ignored", [index])

    def _product(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> _Call | None:
        is_asked = self._normalises_batches or self._is_head(node, attributes)
        if not is_asked or attributes.get("alpha", 1) != 1 or attributes.get("beta", 1) != 1:
            return None
        turned = [attributes.get("transA", 0), attributes.get("transB", 0)]
        a, b, addend = [*node.input, ""][:3]
        return _Call("gemm", [a, b, self._numbers(node, "turned", turned), addend])

    def _is_head(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> bool:
        """Say whether a product takes many features to a few numbers, as the head of a classifier does."""
        shape = self._facts.shapes.get(node.input[1], ())
        sizes = [size for size in shape if isinstance(size, int)]
        if not len(sizes) == len(shape) == 2:  # noqa: PLR2004 - a matrix
            return False
        made, features = sizes if attributes.get("transB", 0) else reversed(sizes)
        return made <= _FEW_MADE and features >= _MANY_FEATURES

    def _convolution(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> _Call | None:
        numbers = self._windows(node, attributes)
        x, weight, bias = [*node.input, ""][:3]
        return None if numbers is None else _Call("convolution", [x, weight, *numbers, bias])

    def _convolution_gradient(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> _Call | None:
        # What nobody reads is not computed: the gradient of an image, in most networks.
        wanted = [index for index, name in enumerate(node.output) if name and name in self._facts.consumed]
        numbers = self._windows(node, attributes) if wanted else None
        if numbers is None:
            return None
        inputs = [*node.input[:3], *numbers, self._numbers(node, "wanted", wanted)]
        return _Call("convolution_backward", inputs, [node.output[index] for index in wanted])

    def _windows(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[str] | None:
        """Add stride, padding, dilation and groups as constants; return their names, None if torch cannot take them."""
        kernel = attributes.get("kernel_shape")
        if not kernel or attributes.get("auto_pad", b"NOTSET") not in {b"NOTSET", "NOTSET"}:
            return None
        axes = len(kernel)
        pads = list(attributes.get("pads") or [0] * 2 * axes)
        if pads[:axes] != pads[axes:]:
            return None
        values = {
            "stride": attributes.get("strides") or [1] * axes,
            "padding": pads[:axes],
            "dilation": attributes.get("dilations") or [1] * axes,
            "groups": [attributes.get("group", 1)],
        }
        return [self._numbers(node, name, value) for name, value in values.items()]
