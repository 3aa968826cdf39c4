"""Types and symbolic shapes of the values in an execution graph, from wherever they are known.

Importing this module loads ONNX Runtime.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.training.ortmodule import _graph_transition_manager as _transitions

from ortlab.engine import load
from ortlab.engine.operators.aten_executor import Operator
from ortlab.engine.operators.gradients import call_text
from ortlab.engine.operators.torch_calls import CallableCall
from ortlab.engine.passes.graph_edits import aten_operator
from ortlab.engine.passes.shapes import with_sizes
from ortlab.memory.symbolic_sizes import Shape, shape_at, simplified

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import onnx

    from ortlab.engine.kept_values import ForwardOfGraph

_OWN: Final = re.compile(r"_o\d+__d\d+$")
"""Ends the names that shape inference makes up for dimensions of results."""

_PRIMES: Final = (
    (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157),
    (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271),
)
"""Two sets, so that a size which is the same with both is a constant."""
load()

_NAME: Final = re.compile(r"[^\W\d][\w.:]*")

_NORMALIZATIONS: Final = frozenset(
    {"LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization"}
)


class Inferred:
    """What is known of the graph that was exported: it is the same whatever plans are applied.

    `processed` is that graph, with shapes; `symbols` has the present sizes of the input's dimensions.
    """

    def __init__(self, processed: onnx.ModelProto, symbols: Mapping[str, int]) -> None:
        calls = call_sizes(processed, symbols)
        self.values = _values(processed.graph)
        self.sizes = calls.expressions  # dimensions of torch's results, in terms of the input's
        self.symbols = {**symbols, **calls.values}  # present sizes, of the input and of torch's results
        self.numbers = _numeric(processed, self.symbols)  # shapes for the present sizes


class ValueShapes:
    """Looks up the types and shapes of values.

    Where the execution graph does not hold them, the graph before its optimisation may, under the same name. The rest
    is what ONNX Runtime puts in without a shape when it builds the gradient: for those there are rules.
    """

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
        return self.element_type(node.input[0]) if node.op_type in _CHOOSING else 0

    def shape(self, name: str) -> Shape | None:
        """Return the symbolic shape of a value; None if it is not known."""
        if name not in self._found:
            self._found[name] = None  # ends the recursion, should a graph ever have a cycle
            self._found[name] = self._shape(name)
        return self._found[name]

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value for the present sizes; None if it is not known.

        What inference finds from numbers counts for more than a symbolic shape: that of a slice "the last 4095" has
        4095, however many there are. But inference sees the exported graph, where a result may be larger: ORT's compute
        optimizer moves slices ahead.
        """
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
                return tuple(self._in_input_sizes(size) for size in _complete(stated))
            by_rule = self._by_rule(name) if name in self._forward.made else None
            if by_rule is not None:
                return by_rule
        return None

    def _in_input_sizes(self, size: int | str) -> int | str:
        """Return a size in terms of the input's dimensions, in the place of those of torch's results."""
        if isinstance(size, int) or not self._inferred.sizes:
            return size
        known = self._inferred.sizes
        written = _NAME.sub(lambda met: f"({known[met[0]]})" if met[0] in known else met[0], size)
        return size if written == size else simplified(written)

    def _by_rule(self, name: str) -> Shape | None:
        place, output = self._forward.made[name]
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
        }
        return rules[node.op_type](node, inner) if node.op_type in rules else None

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


_EMBEDDINGS: Final = frozenset({"embedding", "aten::embedding"})

_COUNTING: Final = frozenset({"Shape", "Size", "BroadcastGradientArgs"})

_CHOOSING: Final = frozenset({"Gather", "Slice"})

_SAME_NUMBERS: Final = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Identity", "Cast"})


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(one.i) for one in node.attribute if one.name == name), default)


def _values(graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    groups: Iterable[Iterable[onnx.ValueInfoProto]] = (graph.value_info, graph.input, graph.output)
    return {value.name: value for group in groups for value in group}


def _numeric(processed: onnx.ModelProto, symbols: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Infer shapes from the present sizes instead of from symbols.

    What torch returns becomes an input: inference has names for its sizes, and no numbers.
    """
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
        if now is not None and any(axis >= len(now[index]) for index, axis, _ in unknown):
            continue  # inference has guessed how many dimensions there are
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
