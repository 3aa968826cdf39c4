"""Types and symbolic shapes of the values in an execution graph, from wherever they are known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from onnx import TensorProto, numpy_helper

from ortlab.engine.build_log import shapes_inferred_quietly
from ortlab.engine.passes.graph_edits import NAMESPACE, aten_operator
from ortlab.engine.passes.shapes import called, with_sizes, without_memory
from ortlab.memory.symbolic_sizes import Shape, shape_at, simplified

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import onnx

    from ortlab.engine.saved_activations import ForwardOfGraph

_OWN: Final = re.compile(r"_o\d+__d\d+$")
"""Ends the names that shape inference makes up for dimensions of results."""

_NORMALIZATIONS: Final = frozenset(
    {"LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization"}
)


class Inferred:
    """What is known of the graph that was exported: it is the same whatever plans are applied."""

    # `processed` is that graph, with shapes; `symbols` has the present sizes of the input's dimensions.

    def __init__(self, processed: onnx.ModelProto, symbols: Mapping[str, int]) -> None:
        self.values = _values(processed.graph)
        self.symbols = call_sizes(processed, symbols)  # present sizes, of the input and of torch's results
        self.numbers = _numeric(processed, self.symbols)  # shapes for the present sizes


class ValueShapes:
    """Looks up the types and shapes of values."""

    # Where the execution graph does not hold them, the graph before its optimisation may, under the same name. The rest
    # is what ONNX Runtime puts in without a shape when it builds the gradient: for those there are rules.

    def __init__(self, execution: onnx.ModelProto, inferred: Inferred, forward: ForwardOfGraph) -> None:
        self._forward = forward
        self._inferred = inferred
        self._symbols = inferred.symbols
        self._known = [_values(execution.graph), inferred.values]
        self._constants = {one.name: one for one in execution.graph.initializer}
        self._found: dict[str, Shape | None] = {}

    def element_type(self, name: str) -> int:
        """Return the `onnx.TensorProto` element type of a value; 0 if it is not known."""
        if name in self._constants:
            return int(self._constants[name].data_type)
        stated = (known[name].type.tensor_type.elem_type for known in self._known if name in known)
        found = next(filter(None, stated), 0)
        if found or name not in self._forward.made:
            return int(found)
        place, output = self._forward.made[name]
        node = self._forward.nodes[place]
        if node.op_type in _COUNTING or (node.op_type == "ConcatTraining" and output):
            return TensorProto.INT64
        if node.op_type in _NORMALIZATIONS and output:
            return TensorProto.FLOAT  # of the statistics, whatever the input is of
        return self.element_type(node.input[0]) if node.op_type in _CHOOSING | _ARITHMETIC else 0

    def shape(self, name: str) -> Shape | None:
        """Return the symbolic shape of a value; None if it is not known."""
        if name not in self._found:
            self._found[name] = None  # ends the recursion, should a graph ever have a cycle
            self._found[name] = self._shape(name)
        return self._found[name]

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value for the present sizes; None if it is not known."""
        # What inference finds from numbers counts for more than a symbolic shape: that of a slice "the last 4095" has
        # 4095, however many there are. But inference sees the exported graph, where a result may be larger: ORT's
        # compute optimizer moves slices ahead.
        shape = self.shape(name)
        told = None if shape is None else shape_at(shape, self._symbols)
        stated, exported = (_shape_of(known[name]) if name in known else None for known in self._known)
        before = (
            None if exported is None or None in exported else shape_at(_complete(exported), self._symbols)
        )
        same = told == before if stated is not None else told is None
        return self._inferred.numbers.get(name, told) if same else told

    def _shape(self, name: str) -> Shape | None:
        if name in self._constants:
            return tuple(self._constants[name].dims)
        for known in self._known:
            stated = _shape_of(known[name]) if name in known else None
            if stated is not None and None not in stated:
                return _complete(stated)
            by_rule = self._by_rule(name) if name in self._forward.made else None
            if by_rule is not None:
                return by_rule
        return None

    def _by_rule(self, name: str) -> Shape | None:
        place, output = self._forward.made[self._forward.source(name)]
        node = self._forward.nodes[place]
        if node.op_type == "ConcatTraining" and output:
            return (len(node.input),)
        if node.op_type == "BroadcastGradientArgs":
            return self._axes(node, output)
        inner = self.shape(node.input[0])
        if inner is None:
            return None
        if node.op_type in _NORMALIZATIONS and output:
            axis = _attribute(node, "axis", -1) % len(inner)
            return (*inner[:axis], *(1 for _ in inner[axis:]))
        if aten_operator(node) in _EMBEDDINGS:  # of the weight, then of the indices
            places = self.shape(node.input[1])
            return None if places is None else (*places, *inner[1:])
        rules: dict[str, Callable[[onnx.NodeProto, Shape], Shape | None]] = {
            "Size": lambda _node, _inner: (),
            "Shape": lambda _node, inner: (len(inner),),
            "Gather": self._gathered,
            "Slice": self._sliced,
            **dict.fromkeys(_ARITHMETIC, self._broadcast),
            _PACKING: lambda _node, inner: (simplified(f"ceiling(({_product(inner)})/8)"),),
        }
        operator = aten_operator(node) or node.op_type
        return rules[operator](node, inner) if operator in rules else None

    def _broadcast(self, node: onnx.NodeProto, inner: Shape) -> Shape | None:
        """Return the shape that two operands are broadcast to; None where a size of each may be 1 in some batch."""
        other = self.shape(node.input[1])
        if other is None:
            return None
        rank = max(len(inner), len(other))
        pairs = zip(*((1,) * (rank - len(one)) + one for one in (inner, other)), strict=True)
        sizes = [mine if theirs in {1, mine} else theirs if mine == 1 else None for mine, theirs in pairs]
        return None if None in sizes else tuple(one for one in sizes if one is not None)

    def _gathered(self, node: onnx.NodeProto, inner: Shape) -> Shape | None:
        axis = _attribute(node, "axis", 0) % len(inner)
        places = self.shape(node.input[1])
        return None if places is None else (*inner[:axis], *places, *inner[axis + 1 :])

    def _sliced(self, node: onnx.NodeProto, inner: Shape) -> Shape | None:
        """Return the shape of a slice from the beginning, as a model cuts a table of positions; None for others."""
        starts, ends, axes, steps = (
            self._numbers(node.input[place]) if len(node.input) > place else None for place in range(1, 5)
        )
        if starts is None or ends is None or axes is None or set(starts) != {0} or set(steps or [1]) != {1}:
            return None
        sizes = list(inner)
        for axis, end in zip(axes, ends, strict=True):
            if not isinstance(axis, int) or (isinstance(end, int) and end < 0):
                return None
            sizes[axis] = simplified(f"Min({sizes[axis]}, {end})")
        return tuple(sizes)

    def _numbers(self, name: str) -> list[int | str] | None:
        """Return whole numbers that a graph computes from constants and sizes; None if it computes them otherwise."""
        if name in self._constants:
            return [int(one) for one in numpy_helper.to_array(self._constants[name]).reshape(-1)]
        if name not in self._forward.made:
            return None
        node = self._forward.nodes[self._forward.made[name][0]]
        if node.op_type == "Shape":
            shape = self.shape(node.input[0])
            return None if shape is None else list(shape)
        if node.op_type in _SAME_NUMBERS:
            return self._numbers(node.input[0])
        if node.op_type == "Gather":
            among, places = self._numbers(node.input[0]), self._numbers(node.input[1])
            if among is not None and places is not None:
                chosen = [among[place] for place in places if isinstance(place, int)]
                return chosen if len(chosen) == len(places) else None
        return None

    def _axes(self, node: onnx.NodeProto, output: int) -> Shape | None:
        """Count the axes that the gradient of an operand is summed over, as ``BroadcastGradientArgs`` does."""
        shapes = []
        for name in node.input:
            if name not in self._forward.made:
                return None
            source = self._forward.nodes[self._forward.made[name][0]]
            inner = self.shape(source.input[0]) if source.op_type == "Shape" else None
            sizes = None if inner is None else shape_at(inner, self._symbols)
            if sizes is None:
                return None
            shapes.append(sizes)
        own, other = shapes[output], shapes[1 - output]
        rank = max(map(len, shapes))
        own, other = ((1,) * (rank - len(sizes)) + sizes for sizes in (own, other))
        missing = rank - len(shapes[output])
        summed = [place for place in range(rank) if place < missing or (own[place] == 1 and other[place] > 1)]
        return (len(summed),)


_PACKING: Final = f"{NAMESPACE}::packed_bits"

_EMBEDDINGS: Final = frozenset({"embedding", "aten::embedding"})

_COUNTING: Final = frozenset({"Shape", "Size", "BroadcastGradientArgs"})

_ARITHMETIC: Final = frozenset({"Add", "Sub", "Mul", "Div"})
"""ORT moves a transpose behind such a node, whose result then has a name that only the graph that runs knows."""

_CHOOSING: Final = frozenset({"Gather", "Slice"})

_SAME_NUMBERS: Final = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Identity", "Cast"})


def _product(shape: Shape) -> str:
    return "*".join(f"({size})" for size in shape) or "1"


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(one.i) for one in node.attribute if one.name == name), default)


def _values(graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    groups: Iterable[Iterable[onnx.ValueInfoProto]] = (graph.value_info, graph.input, graph.output)
    return {value.name: value for group in groups for value in group}


def _numeric(processed: onnx.ModelProto, symbols: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Infer shapes from the present sizes instead of from symbols."""
    # What torch returns becomes an input: inference has names for its sizes, and no numbers.
    sized = with_sizes(processed, symbols)
    typed = {name: value for name, value in _values(sized.graph).items() if _numbers_of(value) is not None}
    nodes = []
    for node in sized.graph.node:
        results = [typed.get(name) for name in node.output if name]
        if aten_operator(node) and None not in results:
            sized.graph.input.extend(result for result in results if result is not None)
        else:
            nodes.append(node)
    del sized.graph.value_info[:]
    del sized.graph.node[:]
    sized.graph.node.extend(nodes)
    from onnxruntime.training.ortmodule import _graph_transition_manager as _transitions

    with shapes_inferred_quietly():
        inferred = _transitions.SymbolicShapeInference.infer_shapes(
            sized, auto_merge=True, guess_output_rank=True
        )
    known = {value.name: _numbers_of(value) for value in (*sized.graph.input, *inferred.graph.value_info)}
    return {name: sizes for name, sizes in known.items() if sizes is not None}


def _numbers_of(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    shape = _shape_of(value)
    sizes = [size for size in shape or () if isinstance(size, int)]
    return None if shape is None or len(sizes) != len(shape) else tuple(sizes)


def _complete(shape: tuple[int | str | None, ...]) -> Shape:
    return tuple(size for size in shape if size is not None)


def _shape_of(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(
        int(size.dim_value) if size.HasField("dim_value") else size.dim_param or None
        for size in tensor.shape.dim
    )


def call_sizes(model: onnx.ModelProto, symbols: Mapping[str, int]) -> dict[str, int]:
    """Return the dimensions of torch's results in `model`, the exported graph, that have names of their own."""
    # They are neither constant nor a dimension of an operand. `symbols` are the dimensions of the input, with their
    # present sizes; torch is called on tensors of these sizes without memory.
    found = dict(symbols)
    values = _values(model.graph)
    constants = {one.name: one for one in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].HasField("t"):
            constants[node.output[0]] = node.attribute[0].t

    def operand(node: onnx.NodeProto, place: int, is_tensor: bool) -> torch.Tensor:  # noqa: FBT001 - as `called` calls it
        name = node.input[place]
        if not is_tensor:
            return torch.from_numpy(numpy_helper.to_array(constants[name]).copy())
        constant = constants.get(name)
        if constant is not None:
            return without_memory(tuple(constant.dims), constant.data_type)
        stated = _shape_of(values[name])
        shape = None if stated is None or None in stated else shape_at(_complete(stated), found)
        if shape is None:
            raise ValueError(name)
        return without_memory(shape, values[name].type.tensor_type.elem_type)

    for node in model.graph.node:
        unknown = [
            (index, axis, size.dim_param)
            for index, name in enumerate(node.output)
            if name in values
            for axis, size in enumerate(values[name].type.tensor_type.shape.dim)
            if _OWN.search(size.dim_param) and size.dim_param not in found
        ]
        # Whatever an operator cannot do without values, its sizes stay unknown.
        with suppress(Exception):
            if unknown and aten_operator(node):
                now = [
                    () if one is None else tuple(one.shape) for one in called(node, partial(operand, node))
                ]
                # An axis may be one that inference has guessed.
                found.update({symbol: now[index][axis] for index, axis, symbol in unknown})
    return found
