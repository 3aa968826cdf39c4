"""An ONNX graph as nodes and the values between them: who makes a value, who reads it, what a constant holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

from ortlab.graphs.nodes import Value, node_names, operator_in_namespace, without_stand_in

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

Place: TypeAlias = tuple[int, int]
"""A node by its number, and one of its inputs or outputs."""

_CONSTANT: Final = "Constant"
_SMALL: Final = 8
"""Numbers of a constant that are written out."""

_PROCESS_BOUND: Final = "pointer"
"""In names of attributes that hold addresses of Python objects (``input_pointer_scalars`` of a PythonOp)."""


@dataclass(frozen=True, eq=False, slots=True)
class WiredNode:
    """One node of an ONNX graph."""

    number: int  # its place among the nodes
    name: str  # as `ortlab.graphs.node_names` gives it
    operator: str  # as in tables: "Gelu", "com.microsoft.BiasGelu", "aten::gelu"
    inputs: tuple[str, ...]  # names of the values that it reads; those that graphs inside it read come last
    outputs: tuple[str, ...]  # names of its results; "" for one that it does not make
    attributes: tuple[tuple[str, str], ...]  # name, and what it holds


class Wiring:
    """The nodes of a model, and what lies between them."""

    # Constants are values, whether they are stored in the graph or made by a ``Constant`` node.

    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        # By name of a value that is constant: a digest of what it holds.
        self.constants = {tensor.name: _digest(tensor) for tensor in graph.initializer}
        self._values = {tensor.name: tensor for tensor in graph.initializer}
        self.nodes: list[WiredNode] = []  # all but the ``Constant`` ones, in the order of the file
        self.constant_nodes = 0
        masks: set[str] = set()  # bytes in what stands in for a dropout, truth values in a Dropout
        for name, called in zip(node_names(graph), graph.node, strict=True):
            node = without_stand_in(called)
            masks.update(node.output[1:] if node is not called else ())
            if node.op_type == _CONSTANT and not node.domain:
                self.constant_nodes += 1
                held = next(
                    (one.t for one in node.attribute if one.name == "value" and one.HasField("t")), None
                )
                if held is None:
                    self.constants[node.output[0]] = str([(one.name, _words(one)) for one in node.attribute])
                else:
                    self.constants[node.output[0]], self._values[node.output[0]] = _digest(held), held
            else:
                self.nodes.append(_wired(len(self.nodes), name, node))
        # By name of a value: the node that makes it, and which of its results it is.
        self.made: dict[str, Place] = {}
        # By name of a value: the nodes that read it, and as which of their inputs.
        self.readers: dict[str, list[Place]] = {}
        for one in self.nodes:
            for slot, name in enumerate(one.outputs):
                if name:
                    self.made[name] = one.number, slot
            for slot, name in enumerate(one.inputs):
                if name:
                    self.readers.setdefault(name, []).append((one.number, slot))
        stored = self.constants.keys()
        self.inputs = {info.name: _typed(info) for info in graph.input if info.name not in stored}
        self.outputs = {info.name: _typed(info) for info in graph.output}
        self.types = {info.name: _typed(info) for info in graph.value_info} | self.inputs | self.outputs
        for name in masks & self.types.keys():
            self.types[name] = replace(self.types[name], dtype="bool")

    @cached_property
    def order(self) -> list[int]:
        """Numbers of the nodes, each behind those that make what it reads; nodes in a circle come last."""
        missing = [0] * len(self.nodes)
        behind: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for number in self.before(node.number):
                missing[node.number] += 1
                behind[number].append(node.number)
        ready = [node.number for node in self.nodes if not missing[node.number]]
        for number in ready:  # it grows meanwhile
            for later in behind[number]:
                missing[later] -= 1
                if not missing[later]:
                    ready.append(later)
        return ready + [number for number, left in enumerate(missing) if left]

    def before(self, number: int) -> Iterator[int]:
        """Yield the numbers of the nodes that make what a node reads."""
        return (self.made[name][0] for name in self.nodes[number].inputs if name in self.made)

    def behind(self, number: int) -> Iterator[int]:
        """Yield the numbers of the nodes that read what a node makes."""
        return (reader for name in self.nodes[number].outputs for reader, _ in self.readers.get(name, ()))

    def words(self, value: str) -> str:
        """Say what a value is: what a small constant holds, or else its name."""
        tensor = self._values.get(value)
        if tensor is None:
            return value
        from onnx import numpy_helper

        if prod(tensor.dims) > _SMALL or tensor.external_data:
            return f"{value} ({'x'.join(map(str, tensor.dims))})"
        return str(numpy_helper.to_array(tensor).tolist())

    def constant_type(self, value: str) -> str:
        """Return the type of what a constant holds; "" for one that is no tensor."""
        from onnx import TensorProto

        tensor = self._values.get(value)
        return "" if tensor is None else TensorProto.DataType.Name(tensor.data_type).lower()


def _typed(info: ValueInfoProto) -> Value:
    """Read name, type and shape of a value; a size that is not told is "?", a shape that is not told is ("...",)."""
    from onnx import TensorProto

    tensor = info.type.tensor_type
    shape = tuple(
        size.dim_param or (size.dim_value if size.HasField("dim_value") else "?") for size in tensor.shape.dim
    )
    dtype = TensorProto.DataType.Name(tensor.elem_type).lower() if tensor.elem_type else ""
    return Value(info.name, dtype, shape if tensor.HasField("shape") else ("...",))


def _wired(number: int, name: str, node: NodeProto) -> WiredNode:
    inside = tuple(
        dict.fromkeys(
            name for one in node.attribute for graph in _graphs(one) for name in _read_outside(graph)
        )
    )
    return WiredNode(
        number,
        name,
        operator_in_namespace(node),
        (*node.input, *inside),
        tuple(node.output),
        tuple(sorted((one.name, _words(one)) for one in node.attribute if _PROCESS_BOUND not in one.name)),
    )


def _graphs(attribute: AttributeProto) -> Iterator[GraphProto]:
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def _read_outside(graph: GraphProto) -> Iterator[str]:
    """Yield the values that a graph inside a node reads from around it."""
    own = {one.name for one in (*graph.input, *graph.initializer)}
    own |= {name for node in graph.node for name in node.output}
    for node in graph.node:
        inner = (name for one in node.attribute for within in _graphs(one) for name in _read_outside(within))
        for name in (*node.input, *inner):
            if name and name not in own:
                yield name


def _words(attribute: AttributeProto) -> str:
    """Say what an attribute holds, without names that mean nothing."""
    from onnx import helper

    if attribute.HasField("t"):
        return _digest(attribute.t)
    graphs = list(_graphs(attribute))
    if graphs:
        return "; ".join(" ".join(node.op_type for node in graph.node) for graph in graphs)
    held = helper.get_attribute_value(attribute)
    if isinstance(held, bytes):
        return held.decode(errors="replace")
    if isinstance(held, float):
        return f"{held:.7g}"
    return str(list(held)) if isinstance(held, Mapping) is False and hasattr(held, "__iter__") else str(held)


def _digest(tensor: TensorProto) -> str:
    """Return a digest of type, shape and numbers of a tensor; where the numbers lie in a file, of the tensor's name."""
    from onnx import numpy_helper

    stored = tensor.name.encode() if tensor.external_data else tensor.raw_data
    held = stored or numpy_helper.to_array(tensor).tobytes()
    head = f"{tensor.data_type} {list(tensor.dims)} ".encode()
    return hashlib.blake2b(head + held, digest_size=12).hexdigest()
