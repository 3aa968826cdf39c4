"""Which nodes PyTorch computes on the CPU because ONNX Runtime's kernels take several times as long.

Of 1.19.2, the gradients of Relu, LeakyRelu, LogSoftmax, LayerNormalization and both Gelus run on one thread or in
several passes, those of Gather and GatherElements add one entry at a time, Where makes two tensors and puts them
together, Sin, Cos and Log ask the C library for each entry on one thread, where ``x ** 2`` and ``x ** 3`` are raised to
a power, too, and the gradient of the first to the power of one. LayerNormalization takes twice as long, and takes the
variance as the mean of squares less the square of the mean, which loses digits where the mean is large. Gradients of
grouped convolutions and maxima of windows are torch's anyway: they get the layout that is quicker. Only nodes of
float32 are taken, and of most kinds only those of at least `FEWEST` entries, since a call costs some 30 microseconds.

In the forward LeakyRelu, Log, Pow, ReduceLogSumExp, Sin, Cos, TopK, GatherElements and calls of torch are taken at
once, which ORT cannot recompute to save memory (``memory_optimizer/recompute_analysis.cc``, GetAllowedRecomputeOps).
What it can if it is its own is left to ORT until a session is made of the graph, and its plans have acted; so no plan
is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortlab.engine.operators import (
    compiled_calls,
    where,  # noqa: F401 - it declares a kernel
)
from ortlab.engine.passes.graph_edits import (
    FLOAT_TYPES,
    SIZES,
    GraphFacts,
    aten_operator,
    attributes_of,
    has_inner_graphs,
    kernel_call,
    needed_nodes,
    put_calls,
)
from ortlab.engine.threads import Work

FEWEST: Final = 2**13
"""Entries from which on PyTorch's kernel pays for the call into Python."""
_UNKNOWN: Final = 64
"""What a dimension counts at least that another batch may change."""

_FORWARD: Final = frozenset(
    {"LeakyRelu", "Log", "Pow", "ReduceLogSumExp", "Sin", "Cos", "TopK", "GatherElements", "ATen"}
)
BEHIND_PLANS: Final = {"LayerNormalization": "ortlab::layer_norm", "Where": "ortlab::where"}
"""Operators that a session computes otherwise when ONNX Runtime's plans have acted, and the calls that do."""
_OTHER_LAYOUT: Final = {
    "convolution_backward": "grouped_convolution_backward",
    "max_pool2d_with_indices": "max_pool2d",
}
"""Kernels by the operator of torch in whose place they are called, with the same arguments."""
_STATISTICS: Final = ("", "mean", "deviation")
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
        nodes += choice.instead_of(node, asked=is_backward or node.op_type in _FORWARD)
    if choice.changed:
        # Indices that are broadcast for nobody any more are dropped; what an inner graph reads cannot be told here.
        nodes = nodes if choice.has_inner_graphs else needed_nodes(nodes, choice.outputs)
        put_calls(model, nodes, choice.untyped)


def with_quick_choices(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph of a session with PyTorch's layer normalisation and the library's Where, or `model` without any.

    ONNX Runtime's Where makes 0 of a -0 that is chosen where the condition is true, and its layer normalisation is NaN
    where the mean is some thousand times the deviation.
    """
    operators = {node.op_type for node in model.graph.node}
    # ORT may find the result of a Where in advance where nothing is trained.
    is_where_quick = "YieldOp" in operators and not compiled_calls.lacking()
    asked = operators & (BEHIND_PLANS.keys() if is_where_quick else {"LayerNormalization"})
    if not asked:
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    choice = _Choice(made)
    nodes: list[onnx.NodeProto] = []
    for node in made.graph.node:
        nodes += choice.instead_of(node) if node.op_type in asked else [node]
        nodes[-1].name = node.name
    if not choice.changed:
        return model
    put_calls(made, nodes, choice.untyped)
    return made


class _Choice:
    """The choice of what takes the place of each node of a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.changed = False
        self.untyped: dict[str, int] = {}
        self._opset = next(one.version for one in model.opset_import if one.domain in {"", "ai.onnx"})
        facts = GraphFacts(model)
        self._constant_of = facts.scalar
        self._work = Work(facts, model.graph, SIZES.get())
        self._types, self._shapes, self._ranks = facts.element_types, facts.shapes, facts.ranks
        self._producers = facts.producers
        self.outputs = {value.name for value in model.graph.output}
        self._only_float32 = FLOAT_TYPES.isdisjoint(set(self._types.values()) - {TensorProto.FLOAT})
        self.has_inner_graphs = has_inner_graphs(model.graph)
        self._same: dict[str, str] = {}
        self._kinds: dict[str, _Kind] = {
            "LeakyRelu": self._leaky("leaky_relu"),
            "Log": self._call("log"),
            "Pow": self._multiplied,
            "ReduceLogSumExp": self._log_sum,
            "Sin": self._call("sin"),
            "Cos": self._call("cos"),
            "TopK": self._top,
            "LayerNormalization": self._normalised,
            "LayerNormalizationGrad": self._call("layer_norm_backward"),
            "SimplifiedLayerNormalizationGrad": self._call("rms_norm_backward"),
            "ReluGrad": self._call("relu_backward"),
            "LeakyReluGrad": self._leaky("leaky_relu_backward"),
            "GeluGrad": self._call("gelu_backward"),
            "FastGeluGrad": self._call("gelu_tanh_backward"),
            "LogSoftmaxGrad_13": self._along("log_softmax_backward", -1),
            "GatherGrad": self._along("gather_backward", 0),
            "GatherElements": self._gathered,
            "GatherElementsGrad": self._add_to_gathered,
            "SliceGrad": self._call("slice_backward"),
            "Where": self._call("where"),
            "ATen": self._laid_out,
        }

    def instead_of(self, node: onnx.NodeProto, *, asked: bool = True) -> list[onnx.NodeProto]:
        """Return the nodes that take the place of one: the node itself where ORT's kernel stays."""
        if not self._same.keys().isdisjoint(node.input):
            node.input[:] = [self._same.get(name, name) for name in node.input]
        if node.op_type == "Pow" and self._changes_nothing(node):
            self._same[node.output[0]] = node.input[0]
            self.changed = True
            return []
        kind = self._kinds.get(node.op_type)
        if kind is None or not asked or not self._is_computed(node) or not self._is_large(node):
            return [node]
        made = kind(node, attributes_of(node))
        if made != [node]:
            self.changed = True
            for index, name in enumerate(made[-1].output):
                if not self._types.get(name):
                    places = index == 1 and (node.op_type == "TopK" or "max_pool2d" in aten_operator(node))
                    whole = places or self._sorts_whole_numbers(node)
                    self.untyped[name] = TensorProto.INT64 if whole else TensorProto.FLOAT
        return made

    def _changes_nothing(self, node: onnx.NodeProto) -> bool:
        """Say whether a Pow is to the power of one; its readers can be told, unless an inner graph is among them."""
        is_told = node.output[0] not in self.outputs and not self.has_inner_graphs
        return is_told and self._scalar(node.input[1]) == 1

    def _is_computed(self, node: onnx.NodeProto) -> bool:
        """Say whether a node computes what the kernels of PyTorch are chosen for."""
        return self._is_float32(node) or self._sorts_whole_numbers(node)

    def _sorts_whole_numbers(self, node: onnx.NodeProto) -> bool:
        """Say whether a node sorts whole numbers, such as those of experts: PyTorch has its own order of ties."""
        return node.op_type == "TopK" and self._types.get(node.input[0]) == TensorProto.INT64

    def _is_float32(self, node: onnx.NodeProto) -> bool:
        """Say whether a node computes in float32: one of no known type does if all of the graph does."""
        known = {self._types.get(name) for name in (*node.output, *node.input)} & FLOAT_TYPES
        is_gradient = "Grad" in node.op_type
        return known == {TensorProto.FLOAT} or (not known and is_gradient and self._only_float32)

    def _is_large(self, node: onnx.NodeProto) -> bool:
        """Say whether a node has many entries; one of which nothing is known has, since most have in a large model."""
        # The gradient of a Gather counts as large whatever it has: ORT's takes more than ten times as long. So does
        # what sorts, as ORT puts what is not a number elsewhere than PyTorch does, and what ORT makes NaN of.
        if node.op_type in {"GatherGrad", "LayerNormalization", "TopK"}:
            return True
        names = [*node.output, *node.input]
        # The gradient of what takes a part of a tensor is told the shape of the whole.
        shapes_of = [self._producers.get(name) for name in node.input]
        names += [one.input[0] for one in shapes_of if one is not None and one.op_type == "Shape"]
        floats = [name for name in names if self._types.get(name, TensorProto.FLOAT) == TensorProto.FLOAT]
        known = [self._entries(name) for name in floats if self._ranks.get(name, 0) > 1]
        return not known or max(known) >= FEWEST

    def _entries(self, name: str) -> int:
        """Count the entries of a value in the first batch, or with `_UNKNOWN` for each size that may change."""
        shape = self._shapes.get(name, (None,) * self._ranks[name])
        known = math.prod(size if isinstance(size, int) else _UNKNOWN for size in shape)
        return max(known, int(self._work.count(name)))

    def _scalar(self, name: str) -> float | None:
        """Return a constant of one entry, or the difference of two, as the gradient of Pow has; else None."""
        producer = self._producers.get(name)
        if producer is not None and producer.op_type == "Sub":
            minuend, subtrahend = map(self._scalar, producer.input)
            return None if minuend is None or subtrahend is None else minuend - subtrahend
        return self._constant_of(name)

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

    def _gathered(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto]:
        before = self._before_broadcast(node.input[1])
        if not before:
            return [node]
        node.input[1:] = before
        return self._along("gather_elements", 0)(node, attributes)

    def _add_to_gathered(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto]:
        node.input[2] = (self._before_broadcast(node.input[2]) or [node.input[2]])[0]
        return self._along("gather_elements_backward", 0)(node, attributes)

    def _before_broadcast(self, name: str) -> list[str]:
        """Return the value that another one is a broadcast of, and the shape that it has been broadcast to."""
        producer = self._producers.get(name)
        return list(producer.input) if producer is not None and producer.op_type == "Expand" else []

    def _multiplied(self, node: onnx.NodeProto, _: dict[str, Any]) -> list[onnx.NodeProto]:
        """Multiply instead of raising to the power of two or three, which ORT does on one thread."""
        x, exponent = node.input
        factors = self._scalar(exponent)
        if factors not in {2, 3}:
            return [node]
        square = helper.make_node("Mul", [x, x], list(node.output), name=node.name)
        if factors == 2:  # noqa: PLR2004
            return [square]
        square.output[0] += "_squared"
        square.name += "_squared"
        return [square, helper.make_node("Mul", [square.output[0], x], list(node.output), name=node.name)]

    @staticmethod
    def _leaky(kernel: str) -> _Kind:
        def choose(node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto]:
            slope = attributes.get("alpha", 0.01)
            if slope < 0:  # then the sign of the result, which the backward reads, is not that of the input
                return [node]
            number = _constant(node, "slope", np.array(slope, np.float32))
            return [number, kernel_call(kernel, [*node.input, number.output[0]], list(node.output), node)]

        return choose

    def _laid_out(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto]:
        # A call with its arguments in it (`torch_calls`) has none of them among its inputs.
        is_plain = not attributes.get("overload_name")
        kernel = _OTHER_LAYOUT.get(aten_operator(node).removeprefix("aten::")) if is_plain else None
        return [node] if kernel is None else self._call(kernel)(node, attributes)

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

    def _normalised(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[onnx.NodeProto]:
        x, weight, bias = [*node.input, ""][:3]
        axis = attributes.get("axis", -1)
        over = -axis if axis < 0 else self._ranks.get(x, 0) - axis
        # The kernel takes the shape of what is normalised from the weight.
        if not bias or self._ranks.get(weight) != over:
            return [node]
        epsilon = _constant(node, "epsilon", np.array(attributes.get("epsilon", 1e-5), np.float32))
        outputs = [*node.output, "", ""][:3]
        outputs = [
            name or f"{node.output[0]}_{unread}" for name, unread in zip(outputs, _STATISTICS, strict=True)
        ]
        return [epsilon, kernel_call("layer_norm", [x, weight, bias, epsilon.output[0]], outputs, node)]

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
