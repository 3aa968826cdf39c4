"""Which nodes of a training graph PyTorch computes on the CPU because ONNX Runtime's own lose digits there.

ReduceSum and ReduceMean of 1.19.2 add one row after the other into a float32 (``core/providers/cpu/reduction``), so the
gradient of a bias is wrong by as many roundings as there are rows, five to ten times as much as PyTorch's sum, which
adds in a cascade. Tanh is an approximation that is five times less exact. The products of Gemm and Conv are added in
another order than PyTorch's, which is no worse; but batch normalisations of small batches behind them make a hundred
times as much of each difference, so a network of both trains like PyTorch only where every digit is the same.

What ORT can recompute to save memory (``memory_optimizer/recompute_analysis.cc``, GetAllowedRecomputeOps) stays ORT's,
so that no plan is lost: Gemm, but in networks with batch normalisations, and LayerNormalization, of which 1.19.2 takes
the variance as the mean of squares less the square of the mean and loses digits where the mean is large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import onnx
from onnx import TensorProto, helper

from ortlab.engine.operators.symbolics import FEWEST_CLASSES
from ortlab.engine.passes.graph_edits import GraphFacts, aten_operator, copied, declare_aten, kernel_call

_Kind = Callable[[onnx.NodeProto, dict[str, Any]], list[onnx.NodeProto] | None]
"""Makes what takes the place of a node with these attributes; None leaves the node as it is."""

_AXES_ARE_INPUT: Final = {"ReduceSum": 13, "ReduceMean": 18}
"""From which opset on the axes are an input of the node instead of an attribute."""
_KEEPS_TYPE: Final = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Identity", "Expand", "Scale"})
_REDUCTIONS: Final = ("none", "mean", "sum")
"""In the order of torch's numbers (at::Reduction)."""
_NONE_IGNORED: Final = -(2**31)
"""No class has this index."""


def choose_exact(model: onnx.ModelProto) -> bool:
    """Let PyTorch compute the float32 nodes in which ORT loses digits; say whether there were any.

    The gradient graph is changed in place.
    """
    choice = _Choice(model)
    nodes = [one for node in model.graph.node for one in choice.instead_of(node)]
    if not choice.changed:
        return False
    nodes = [copied(node) for node in nodes]
    # ORT infers no type for what torch returns, and ReduceSum needed none to be written down.
    model.graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in choice.untyped
    )
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    declare_aten(model)
    return True


class _Choice:
    """The choice of what takes the place of each node of a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.changed = False
        self.untyped: list[str] = []
        self._opset = next(one.version for one in model.opset_import if one.domain in {"", "ai.onnx"})
        facts = GraphFacts(model)
        self._types, self._shapes, self._producers = facts.element_types, facts.shapes, facts.producers
        self._read = facts.consumed
        self._normalises_batches = any(
            aten_operator(node) == "native_batch_norm" for node in model.graph.node
        )
        self._kinds: dict[str, _Kind] = {
            "ReduceSum": self._reduced,
            "ReduceMean": self._reduced,
            "GlobalAveragePool": self._pooled,
            "Gemm": self._product,
            "Conv": self._convolution,
            "ConvGrad": self._convolution_gradient,
            "ATen": self._adaptive,
            "Scale": self._scaled,
            "QuickGeluGrad": self._silu_gradient,
            "SoftmaxCrossEntropyLoss": self._loss,
            "SoftmaxCrossEntropyLossInternal": self._loss,
            "SoftmaxCrossEntropyLossGrad": self._loss_gradient,
            "SoftmaxCrossEntropyLossInternalGrad": self._loss_gradient,
            "Sigmoid": self._elementwise("sigmoid"),
            "SigmoidGrad": self._elementwise("sigmoid_backward"),
            "Tanh": self._elementwise("tanh"),
            "TanhGrad": self._elementwise("tanh_backward"),
        }

    def instead_of(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes that take the place of one: the node itself where PyTorch is not to compute it."""
        made = None
        kind = self._kinds.get(node.op_type)
        if kind is not None and self._is_float32(node):
            made = kind(node, {one.name: helper.get_attribute_value(one) for one in node.attribute})
        if made is None:
            return [node]
        self.changed = True
        self.untyped += [name for name in made[-1].output if not self._types.get(name)]
        return made

    def _is_float32(self, node: onnx.NodeProto) -> bool:
        """Say whether the first known type among a node's outputs and its first operand is float32; they share it."""
        known = (self._type(name) for name in (*node.output, node.input[0]))
        return next(filter(None, known), 0) == TensorProto.FLOAT

    def _type(self, name: str) -> int:
        """Return the element type of a value, 0 where it is not known; the gradient builder leaves many out."""
        producer = self._producers.get(name)
        while not self._types.get(name) and producer is not None and producer.op_type in _KEEPS_TYPE:
            name = producer.input[0]
            producer = self._producers.get(name)
        return self._types.get(name, 0)

    def _has_few_classes(self, logits: str) -> bool:
        """Say whether a loss has few classes: with many, torch's two steps take memory for the logits twice."""
        shape = self._shapes.get(logits, ())
        classes = shape[1] if len(shape) > 1 else None
        return isinstance(classes, int) and classes < FEWEST_CLASSES

    # ---- the kinds of nodes -----------------------------------------------------------------------------------

    def _reduced(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto] | None:
        kernel = "sum_over" if node.op_type == "ReduceSum" else "mean_over"
        constants: list[onnx.NodeProto] = []
        if self._opset >= _AXES_ARE_INPUT[node.op_type]:
            axes = node.input[1] if len(node.input) > 1 else ""
        else:
            axes = ""
            if attributes.get("axes"):
                axes = self._numbers(node, "axes", attributes["axes"], constants)
        flags = [attributes.get("keepdims", 1), attributes.get("noop_with_empty_axes", 0)]
        said = self._numbers(node, "flags", flags, constants)
        return [*constants, kernel_call(kernel, [node.input[0], said, axes], list(node.output), node)]

    def _pooled(self, node: onnx.NodeProto, _: dict[str, Any]) -> list[onnx.NodeProto]:
        return [kernel_call("mean_over_space", [node.input[0]], list(node.output), node)]

    def _adaptive(self, node: onnx.NodeProto, _: dict[str, Any]) -> list[onnx.NodeProto] | None:
        kernel = aten_operator(node).removeprefix("aten::").removeprefix("_")
        if kernel not in {"adaptive_avg_pool2d", "adaptive_avg_pool2d_backward"}:
            return None
        return [kernel_call(kernel, list(node.input), list(node.output), node)]

    @staticmethod
    def _scaled(node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto] | None:
        if not attributes.get("scale_down"):
            return None
        return [kernel_call("divided", list(node.input), list(node.output), node)]

    def _silu_gradient(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto] | None:
        if attributes.get("alpha") != 1:  # ORT's QuickGelu is x * sigmoid(alpha * x)
            return None
        return [kernel_call("silu_backward", list(node.input), list(node.output), node)]

    def _loss(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto] | None:
        logits, target, weight, ignored = [*node.input, "", ""][:4]
        inputs = [logits, target]
        both = len(node.output) == 2 and all(node.output)  # noqa: PLR2004 - the loss, the log probabilities
        if not both or not self._has_few_classes(logits):
            return None
        return self._loss_call("log_softmax_loss", inputs, (weight, ignored), node, attributes)

    def _loss_gradient(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto] | None:
        grad, log_probabilities, target, weight, ignored, bias = [*node.input, "", "", ""][:6]
        inputs = [grad, log_probabilities, target]
        if bias or not self._has_few_classes(log_probabilities):
            return None
        return self._loss_call("log_softmax_loss_backward", inputs, (weight, ignored), node, attributes)

    def _loss_call(
        self,
        kernel: str,
        inputs: list[str],
        optional: tuple[str, str],
        node: onnx.NodeProto,
        attributes: dict[str, Any],
    ) -> list[onnx.NodeProto] | None:
        weight, ignored = optional
        constants: list[onnx.NodeProto] = []
        reduction = _REDUCTIONS.index(attributes.get("reduction", b"mean").decode())
        number = self._numbers(node, "reduction", [reduction], constants)
        ignored = ignored or self._numbers(
            node, "ignored", [attributes.get("ignore_index", _NONE_IGNORED)], constants
        )
        call = kernel_call(kernel, [*inputs, number, ignored, weight], list(node.output), node)
        return [*constants, call]

    @staticmethod
    def _elementwise(kernel: str) -> _Kind:
        def choose(node: onnx.NodeProto, _: dict[str, Any]) -> list[onnx.NodeProto]:
            return [kernel_call(kernel, list(node.input), list(node.output), node)]

        return choose

    def _product(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto] | None:
        if not self._normalises_batches or attributes.get("alpha", 1) != 1 or attributes.get("beta", 1) != 1:
            return None
        constants: list[onnx.NodeProto] = []
        turned = [attributes.get("transA", 0), attributes.get("transB", 0)]
        a, b, addend = [*node.input, ""][:3]
        inputs = [a, b, self._numbers(node, "turned", turned, constants), addend]
        return [*constants, kernel_call("gemm", inputs, list(node.output), node)]

    def _convolution(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto] | None:
        constants: list[onnx.NodeProto] = []
        numbers = self._windows(node, attributes, constants)
        if numbers is None:
            return None
        bias = node.input[2] if len(node.input) > 2 else ""  # noqa: PLR2004 - after the input and the weight
        inputs = [node.input[0], node.input[1], *numbers, bias]
        return [*constants, kernel_call("convolution", inputs, list(node.output), node)]

    def _convolution_gradient(
        self, node: onnx.NodeProto, attributes: dict[str, Any]
    ) -> list[onnx.NodeProto] | None:
        constants: list[onnx.NodeProto] = []
        numbers = self._windows(node, attributes, constants)
        if numbers is None:
            return None
        # What nobody reads is not computed: the gradient of an image, in most networks.
        wanted = [index for index, name in enumerate(node.output) if name and name in self._read]
        if not wanted:
            return None
        which = self._numbers(node, "wanted", wanted, constants)
        outputs = [node.output[index] for index in wanted]
        return [
            *constants,
            kernel_call("convolution_backward", [*node.input[:3], *numbers, which], outputs, node),
        ]

    def _windows(
        self, node: onnx.NodeProto, attributes: dict[str, Any], constants: list[onnx.NodeProto]
    ) -> list[str] | None:
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
        return [self._numbers(node, name, value, constants) for name, value in values.items()]

    def _numbers(self, node: onnx.NodeProto, name: str, values: Any, constants: list[onnx.NodeProto]) -> str:
        output = f"{next(filter(None, node.output))}_{name}"
        tensor = helper.make_tensor(f"{output}_value", TensorProto.INT64, [len(values)], list(values))
        constants.append(helper.make_node("Constant", [], [output], name=f"{output}_Constant", value=tensor))
        return output
