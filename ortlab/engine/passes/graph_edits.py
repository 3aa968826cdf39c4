"""What a pass over an ONNX graph works with: facts about its values, and nodes to add."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import onnx
from onnx import TensorProto, helper, numpy_helper

WITHOUT_VALUES: Final = frozenset({"Shape", "Size"})
"""Operators that need no values of what they read; ORT runs them right behind the node that makes it."""

FLOAT_TYPES: Final = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
)
"""The ONNX element types that have a gradient."""

ATEN: Final = "org.pytorch.aten"
"""The domain of ORT's ``ATen`` node, which calls PyTorch."""

NAMESPACE: Final = "ortlab"
"""Of the operators of `ortlab.engine.operators.torch_kernels`, which ``ATen`` nodes call as ``ortlab::<name>``."""

STOP: Final = "detach_copy"
"""The ATen operator through which no gradient flows."""

LOSSES: Final = frozenset({"SoftmaxCrossEntropyLossInternal", "SoftmaxCrossEntropyLoss"})
"""ORT's operators of a loss over classes."""

NEEDING_GRADIENT: Final[ContextVar[frozenset[str] | None]] = ContextVar("NEEDING_GRADIENT", default=None)
"""The inputs of the graph in work whose gradient is asked for; None if that is not known: then all that are floats."""

SIZES: Final[ContextVar[Mapping[str, int]]] = ContextVar("SIZES", default=MappingProxyType({}))
"""The sizes of the input's dimensions, by symbol, in the call that the graph in work is built for; else none."""

Shape: TypeAlias = tuple[int | str, ...]


class GraphFacts:
    """Shapes, element types and differentiability of the values of a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.shapes: dict[str, Shape] = {}  # where every dimension is known as a number or by its symbol
        self.ranks: dict[str, int] = {}  # where known
        self.element_types: dict[str, int] = {}
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            self.element_types[value.name] = tensor.elem_type
            if tensor.HasField("shape"):
                self.ranks[value.name] = len(tensor.shape.dim)
                sizes = tuple(
                    size.dim_param or (size.dim_value if size.HasField("dim_value") else None)
                    for size in tensor.shape.dim
                )
                known = tuple(size for size in sizes if size is not None)
                if len(known) == len(sizes):
                    self.shapes[value.name] = known
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        for initializer in graph.initializer:
            self.shapes[initializer.name] = tuple(initializer.dims)
            self.ranks[initializer.name] = len(initializer.dims)
            self.element_types[initializer.name] = initializer.data_type
        needing = NEEDING_GRADIENT.get()
        inputs = {value.name for value in graph.input}
        # Values through which a gradient may flow to a parameter or to an input that needs one. A value whose type is
        # not known counts as a float.
        self.differentiable = {
            name for name in (inputs if needing is None else needing) if self._is_float(name)
        }
        self.producers = {name: node for node in graph.node for name in node.output}
        # Values that a node or the caller of the graph reads.
        self.consumed = {name for node in graph.node for name in node.input}
        self._outputs = {value.name for value in graph.output}
        self.consumed |= self._outputs
        self._graph = graph
        self.leading_out = self.leading_to(self._outputs)
        for node in graph.node:
            if aten_operator(node) != STOP and not self.differentiable.isdisjoint(node.input):
                self.differentiable.update(name for name in node.output if name and self._is_float(name))

    @cached_property
    def readers(self) -> dict[str, list[onnx.NodeProto]]:
        """The nodes that read each value when this is first asked for; one that reads it twice stands there twice."""
        found: dict[str, list[onnx.NodeProto]] = {}
        for node in self._graph.node:
            for name in node.input:
                found.setdefault(name, []).append(node)
        return found

    def only_reader(self, name: str) -> onnx.NodeProto | None:
        """Return the node that reads a value, None if several do, none, or the caller of the graph."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self._outputs else None

    def source(self, name: str, behind: Collection[str]) -> str:
        """Follow a value back through nodes of these operators, to what the first of them reads."""
        while (producer := self.producers.get(name)) is not None and producer.op_type in behind:
            name = producer.input[0]
        return name

    def leading_to(self, outputs: Iterable[str]) -> set[str]:
        """Return the values to which a gradient of one of these may come.

        It depends on them without an integer and without a `detach` in between.
        """
        found = set(outputs)
        for node in reversed(self._graph.node):  # a graph is in topological order, as ONNX demands
            if aten_operator(node) != STOP and not found.isdisjoint(node.output):
                found.update(name for name in node.input if name and self._is_float(name))
        return found

    def vector(self, name: str) -> list[int] | None:
        """Return the integers of a constant, also of one that an Unsqueeze makes a vector; None if it is computed."""
        node = self.producers.get(name)
        if node is not None and node.op_type == "Unsqueeze":
            return self.vector(node.input[0])
        if node is None or node.op_type != "Constant":
            return None
        return [int(number) for number in numpy_helper.to_array(node.attribute[0].t).reshape(-1)]

    def scalar(self, name: str) -> float | None:
        """Return a constant of one entry as a number; None if it is computed, or has more."""
        tensor, node = self._constants.get(name), self.producers.get(name)
        if node is not None and node.op_type == "Constant":
            tensor = attributes_of(node).get("value")
        value = None if tensor is None else numpy_helper.to_array(tensor)
        return float(value.item()) if value is not None and value.size == 1 else None

    def _is_float(self, name: str) -> bool:
        return self.element_types.get(name, TensorProto.FLOAT) in FLOAT_TYPES | {TensorProto.UNDEFINED}


def has_inner_graphs(graph: onnx.GraphProto) -> bool:
    """Say whether a node holds a graph, such as the body of a Loop, which reads values of this one by their names."""
    return any(one.HasField("g") for node in graph.node for one in node.attribute)


def aten_operator(node: onnx.NodeProto) -> str:
    """Return the name of the ATen operator that a node calls, "" if it calls none."""
    if node.domain != ATEN:
        return ""
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == "operator"), "")


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the values of a node's attributes by name."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def nodes_of(model: onnx.ModelProto, *operators: str) -> list[onnx.NodeProto]:
    """Return the nodes of some of ONNX's own operators."""
    return [node for node in model.graph.node if node.op_type in operators and not node.domain]


class GraphAdditions:
    """Nodes to put in front of the nodes of a graph, or in their place, all at once."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._before: dict[str, list[onnx.NodeProto]] = {}
        self._dropped: set[str] = set()

    def node(
        self, before: onnx.NodeProto, operator: str, inputs: list[str], output: str, /, **attributes: Any
    ) -> str:
        """Add a node with one output in front of `before`; return the output's name."""
        new = helper.make_node(operator, inputs, [output], name=f"{output}_{operator}", **attributes)
        self._before.setdefault(before.output[0], []).append(new)
        return output

    def scalar(self, before: onnx.NodeProto, output: str, element_type: int, value: float) -> str:
        """Add a constant scalar in front of `before`; return its name."""
        tensor = helper.make_tensor(f"{output}_value", element_type, [], [value])
        return self.node(before, "Constant", [], output, value=tensor)

    def vector(self, before: onnx.NodeProto, output: str, values: list[int]) -> str:
        """Add a constant int64 vector in front of `before`; return its name."""
        tensor = helper.make_tensor(f"{output}_value", TensorProto.INT64, [len(values)], values)
        return self.node(before, "Constant", [], output, value=tensor)

    def apart(self, before: onnx.NodeProto, name: str, output: str, axis: int = 0) -> str:
        """Add a pair of nodes that change a value's shape and change it back; return the name of the same value."""
        # Optimizers of ORT that look for what makes a value, or for what reads it, stop at the pair.
        along = self.vector(before, f"{output}_axis", [axis])
        wider = self.node(before, "Unsqueeze", [name, along], f"{output}_wider")
        return self.node(before, "Squeeze", [wider, along], output)

    def drop(self, node: onnx.NodeProto) -> None:
        """Leave `node` out; nodes in front of it have to make its outputs."""
        self._dropped.add(node.output[0])

    def apply(self) -> bool:
        """Put the nodes in; say whether there were any."""
        if self._before:
            woven: list[onnx.NodeProto] = []
            for node in self._graph.node:
                kept = () if node.output[0] in self._dropped else (node,)
                woven += [copied(part) for part in (*self._before.get(node.output[0], ()), *kept)]
            del self._graph.node[:]
            self._graph.node.extend(woven)
        return bool(self._before)


def declare_aten(model: onnx.ModelProto) -> None:
    """Let a model, which is changed in place, have ``ATen`` nodes. A second time changes nothing."""
    if all(one.domain != ATEN for one in model.opset_import):
        model.opset_import.append(helper.make_opsetid(ATEN, 1))


def copied(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a copy of a node that lives on when the graph that it is taken from is emptied."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def needed_nodes(nodes: Sequence[onnx.NodeProto], outputs: Collection[str]) -> list[onnx.NodeProto]:
    """Drop the nodes that nothing reads, of a graph with these outputs; `nodes` are in topological order."""
    read, needed = set(outputs), []
    for node in reversed(nodes):
        if node.op_type == "YieldOp" or not read.isdisjoint(node.output):
            read.update(node.input)
            needed.append(node)
    return needed[::-1]


def put_calls(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], untyped: Mapping[str, int] | None = None
) -> None:
    """Give a model, which is changed in place, these nodes, among them calls of torch."""
    # ORT infers no type for what torch returns: `untyped` holds the element types that the model does not tell.
    kept = [copied(node) for node in nodes]
    model.graph.value_info.extend(
        helper.make_tensor_value_info(name, element_type, None)
        for name, element_type in (untyped or {}).items()
    )
    del model.graph.node[:]
    model.graph.node.extend(kept)
    declare_aten(model)


def kernel_call(
    kernel: str, inputs: Sequence[str], outputs: Sequence[str], instead_of: onnx.NodeProto
) -> onnx.NodeProto:
    """Return a call of a kernel that takes the place of a node, and is named after it."""
    return helper.make_node(
        "ATen",
        inputs,
        outputs,
        name=f"{instead_of.name or outputs[0]}_{kernel}",
        domain=ATEN,
        operator=f"{NAMESPACE}::{kernel}",
    )


def call_kernel(node: onnx.NodeProto, kernel: str) -> None:
    """Turn a node into a call of a kernel; it keeps its inputs and outputs."""
    node.op_type, node.domain = "ATen", ATEN
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("operator", f"{NAMESPACE}::{kernel}"))
