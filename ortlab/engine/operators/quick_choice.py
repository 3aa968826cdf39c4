"""Which nodes PyTorch computes on the CPU because ONNX Runtime's kernels take several times as long.

Of 1.19.2, the gradients of Relu, LeakyRelu, LogSoftmax and FastGelu run on one thread or in several passes, those of
Gather and GatherElements add one entry at a time, Where broadcasts one entry at a time, and the gradient of ``x ** 2``
raises x to the power of one. Only nodes of float32 that have at least `FEWEST` entries are taken, since a call costs
some 30 microseconds. In the forward only LeakyRelu, ReduceLogSumExp and TopK are, which ORT cannot recompute to save
memory (``memory_optimizer/recompute_analysis.cc``, GetAllowedRecomputeOps); so no plan is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortlab.engine.passes.graph_edits import GraphFacts, attributes_of, copied, declare_aten, kernel_call

FEWEST: Final = 2**14
"""Entries from which on PyTorch's kernel pays for the call into Python."""
_UNKNOWN: Final = 32
"""What a dimension counts that is not known before the step, such as that of the batch."""

_FORWARD: Final = frozenset({"LeakyRelu", "ReduceLogSumExp", "TopK"})
_AXES_ARE_INPUT: Final = 18
"""From which opset on the axes of ReduceLogSumExp are an input."""

_Kind = Callable[[onnx.NodeProto, dict[str, Any]], list[onnx.NodeProto]]
"""Makes what takes the place of a node with these attributes."""


def choose_quick(model: onnx.ModelProto) -> None:
    """Let PyTorch compute the slow nodes of a gradient graph, which is changed in place."""
    choice = _Choice(model)
    backward: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        is_backward = node.op_type == "YieldOp" or not backward.isdisjoint(node.input)
        backward.update(node.output if is_backward else ())
        nodes += choice.instead_of(node, backward=is_backward)
    if choice.changed:
        nodes = [copied(node) for node in nodes]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        declare_aten(model)


class _Choice:
    """The choice of what takes the place of each node of a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.changed = False
        self._opset = next(one.version for one in model.opset_import if one.domain in {"", "ai.onnx"})
        facts = GraphFacts(model)
        self._types, self._shapes, self._producers = facts.element_types, facts.shapes, facts.producers
        self._outputs = {value.name for value in model.graph.output}
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._same: dict[str, str] = {}
        self._kinds: dict[str, _Kind] = {
            "LeakyRelu": self._leaky("leaky_relu"),
            "ReduceLogSumExp": self._log_sum,
            "TopK": self._top,
            "ReluGrad": self._call("relu_backward"),
            "LeakyReluGrad": self._leaky("leaky_relu_backward"),
            "FastGeluGrad": self._call("gelu_tanh_backward"),
            "LogSoftmaxGrad_13": self._along("log_softmax_backward", -1),
            "GatherGrad": self._along("gather_backward", 0),
            "GatherElementsGrad": self._along("gather_elements_backward", 0),
            "SliceGrad": self._call("slice_backward"),
            "Where": self._call("where"),
        }

    def instead_of(self, node: onnx.NodeProto, *, backward: bool) -> list[onnx.NodeProto]:
        """Return the nodes that take the place of one: the node itself where ORT's kernel stays."""
        if not self._same.keys().isdisjoint(node.input):
            node.input[:] = [self._same.get(name, name) for name in node.input]
        if node.op_type == "Pow" and self._scalar(node.input[1]) == 1 and node.output[0] not in self._outputs:
            self._same[node.output[0]] = node.input[0]
            self.changed = True
            return []
        kind = self._kinds.get(node.op_type)
        if kind is None or not (backward or node.op_type in _FORWARD) or not self._is_large(node):
            return [node]
        self.changed = True
        return kind(node, attributes_of(node))

    def _is_large(self, node: onnx.NodeProto) -> bool:
        if self._types.get(node.output[0]) != TensorProto.FLOAT:
            return False
        shapes = [self._shapes.get(name, ()) for name in (*node.output, *node.input)]
        sizes = [[size if isinstance(size, int) else _UNKNOWN for size in shape] for shape in shapes]
        return max(math.prod(shape) if shape else 0 for shape in sizes) >= FEWEST

    def _scalar(self, name: str) -> float | None:
        """Return a constant of one entry, or the difference of two, as the gradient of Pow has; else None."""
        tensor = self._constants.get(name)
        producer = self._producers.get(name)
        if producer is not None and producer.op_type == "Sub":
            minuend, subtrahend = map(self._scalar, producer.input)
            return None if minuend is None or subtrahend is None else minuend - subtrahend
        if producer is not None and producer.op_type == "Constant":
            tensor = attributes_of(producer).get("value")
        value = None if tensor is None else numpy_helper.to_array(tensor)
        return float(value.item()) if value is not None and value.size == 1 else None

    # ---- the kinds of nodes -----------------------------------------------------------------------------------

    @staticmethod
    def _call(kernel: str) -> _Kind:
        def choose(node: onnx.NodeProto, _: dict[str, Any]) -> list[onnx.NodeProto]:
            return [kernel_call(kernel, list(node.input), list(node.output), node)]

        return choose

    @staticmethod
    def _along(kernel: str, default: int) -> _Kind:
        """Call a kernel that takes an axis behind the node's inputs."""

        def choose(node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto]:
            axis = _constant(node, "axis", np.array(attributes.get("axis", default)))
            return [axis, kernel_call(kernel, [*node.input, axis.output[0]], list(node.output), node)]

        return choose

    @staticmethod
    def _leaky(kernel: str) -> _Kind:
        def choose(node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto]:
            slope = attributes.get("alpha", 0.01)
            if slope < 0:  # then the sign of the result, which the backward reads, is not that of the input
                return [node]
            number = _constant(node, "slope", np.array(slope, np.float32))
            return [number, kernel_call(kernel, [*node.input, number.output[0]], list(node.output), node)]

        return choose

    def _log_sum(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto]:
        axes = attributes.get("axes")
        if self._opset >= _AXES_ARE_INPUT or not axes:
            return [node]
        said = [
            _constant(node, "axes", np.array(axes)),
            _constant(node, "keeps", np.array(attributes.get("keepdims", 1))),
        ]
        inputs = [node.input[0], *(one.output[0] for one in said)]
        return [*said, kernel_call("log_sum_exp", inputs, list(node.output), node)]

    @staticmethod
    def _top(node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto]:
        how = [
            attributes.get(name, default) for name, default in (("axis", -1), ("largest", 1), ("sorted", 1))
        ]
        said = _constant(node, "how", np.array(how))
        outputs = [name or f"{node.name}_unread" for name in node.output]
        return [said, kernel_call("topk", [*node.input, said.output[0]], outputs, node)]


def _constant(node: onnx.NodeProto, name: str, value: np.ndarray[Any, Any]) -> onnx.NodeProto:
    output = f"{node.output[0]}_{name}"
    tensor = numpy_helper.from_array(value, f"{output}_value")
    return helper.make_node("Constant", [], [output], name=f"{output}_Constant", value=tensor)
