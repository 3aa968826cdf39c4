"""Sizes of what torch returns inside a graph, for which shape inference has only names of its own.

The results of a call of torch (`ortlab.engine.operators.torch_calls`) have dimensions like "ATen_157_o0__d1" in the
graph. What those are in terms of the input's dimensions, torch knows: the call is made on tensors without memory, whose
sizes are primes, each of them one dimension of the input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from ortlab.engine.operators.aten_executor import Operator
from ortlab.engine.operators.call_gradients import call_text
from ortlab.engine.operators.torch_calls import CallableCall
from ortlab.engine.passes.graph_edits import aten_operator
from ortlab.memory.shapes import Shape, shape_at

if TYPE_CHECKING:
    import onnx

_OWN: Final = re.compile(r"_o\d+__d\d+$")
"""Ends the names that shape inference makes up for dimensions of results."""

_PRIMES: Final = (
    (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157),
    (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271),
)
"""Two sets, so that a size which is the same with both is a constant."""


class CallSizes(NamedTuple):
    """Dimensions of what torch returns inside a graph, by the names that they have there."""

    # In terms of the input's dimensions; without those that are neither constant nor a dimension of an operand.
    expressions: dict[str, str]
    values: dict[str, int]  # for the present sizes of the input


def call_sizes(model: onnx.ModelProto, symbols: Mapping[str, int]) -> CallSizes:
    """Find the dimensions of what torch returns in `model`, the exported graph with shapes.

    `symbols` are the input's dimensions and their present sizes. If they are more than one set of primes, nothing is
    found.
    """
    found = CallSizes({}, {})
    if len(symbols) > len(_PRIMES[0]):
        return found
    calls = _Calls(model)
    for node in model.graph.node:
        unknown = calls.unknown(node, symbols) if aten_operator(node) else []
        shapes = calls.operands(node, found.expressions) if unknown else None
        if shapes is None:
            continue
        now = calls.results(node, shapes, {**symbols, **found.values})
        if now is not None:
            found.values.update({symbol: now[index][axis] for index, axis, symbol in unknown})
        sizes = [dict(zip(symbols, primes, strict=False)) for primes in _PRIMES]
        one, other = (calls.results(node, shapes, at) for at in sizes)
        if one is None or other is None:
            continue
        operands = {size for shape in shapes.values() for size in shape if isinstance(size, str)}
        for index, axis, symbol in unknown:
            met = one[index][axis], other[index][axis]
            fitting = [text for text in operands if tuple(_value(text, at) for at in sizes) == met]
            if met[0] == met[1]:
                found.expressions[symbol] = str(met[0])
            elif fitting:
                found.expressions[symbol] = min(fitting, key=lambda text: (len(text), text))
    return found


class _Calls:
    """Makes the calls of a graph on tensors without memory."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self._types = {
            value.name: value.type.tensor_type for group in (graph.value_info, graph.input) for value in group
        }
        self._constants = {one.name: one for one in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                self._constants[node.output[0]] = node.attribute[0].t
        for name, one in self._constants.items():
            self._types[name] = helper.make_tensor_type_proto(one.data_type, one.dims).tensor_type

    def unknown(self, node: onnx.NodeProto, symbols: Mapping[str, int]) -> list[tuple[int, int, str]]:
        """List the dimensions of the node's results that have names of their own: output, axis and name."""
        return [
            (index, axis, size.dim_param)
            for index, name in enumerate(node.output)
            if name in self._types
            for axis, size in enumerate(self._types[name].shape.dim)
            if _OWN.search(size.dim_param) and size.dim_param not in symbols
        ]

    def operands(self, node: onnx.NodeProto, known: Mapping[str, str]) -> dict[str, Shape] | None:
        """Return the symbolic shapes of what the node reads; None if one is not known."""
        shapes = {}
        for name in filter(None, node.input):
            shape = _shape(self._types[name], known) if name in self._types else None
            if shape is None:
                return None
            shapes[name] = shape
        return shapes

    def results(
        self, node: onnx.NodeProto, shapes: Mapping[str, Shape], sizes: Mapping[str, int]
    ) -> list[tuple[int, ...]] | None:
        """Return the shapes of the node's results for these sizes; None if torch cannot tell without values."""
        text = call_text(node)
        overload = next((one.s.decode() for one in node.attribute if one.name == "overload_name"), "")
        try:
            called = (
                CallableCall.find(aten_operator(node), text)
                if text
                else Operator.find(aten_operator(node), overload)
            )
            operands = [
                self._operand(name, shapes, sizes, is_tensor=called.is_tensor(place, is_input=True))
                for place, name in enumerate(node.input)
            ]
            made = called.results(operands) if isinstance(called, CallableCall) else called.execute(operands)
            return [() if one is None else tuple(one.shape) for one in made]
        except Exception:  # noqa: BLE001 - whatever an operator cannot do without values, its sizes stay unknown
            return None

    def _operand(
        self, name: str, shapes: Mapping[str, Shape], sizes: Mapping[str, int], *, is_tensor: bool
    ) -> torch.Tensor | None:
        if not name:
            return None
        if not is_tensor:
            return torch.from_numpy(numpy_helper.to_array(self._constants[name]).copy())
        shape = shape_at(shapes[name], sizes)
        if shape is None:
            raise ValueError(name)
        return torch.empty(shape, dtype=_dtype(self._types[name].elem_type), device="meta")


def _shape(tensor: Any, known: Mapping[str, str]) -> Shape | None:
    sizes = [
        int(size.dim_value) if size.HasField("dim_value") else known.get(size.dim_param, size.dim_param)
        for size in tensor.shape.dim
    ]
    return tuple(sizes) if all(size != "" for size in sizes) and tensor.HasField("shape") else None


def _value(expression: str, sizes: Mapping[str, int]) -> int | None:
    found = shape_at((expression,), sizes)
    return None if found is None else found[0]


def _dtype(element_type: int) -> torch.dtype:
    if element_type == TensorProto.BFLOAT16:
        return torch.bfloat16
    return torch.from_numpy(np.empty(0, helper.tensor_dtype_to_np_dtype(element_type))).dtype
