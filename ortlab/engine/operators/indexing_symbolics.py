"""Indexing for onnxruntime 1.19.2: sums over places that meet, and memory read by its layout."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import torch

from ortlab.engine.exporter import symbolic_module
from ortlab.engine.operators.symbolic_words import (
    LeftToTorch,
    aten,
    cast_like,
    constant,
    filled,
    int64,
    int64_vector,
    is_none,
    rank,
)
from ortlab.errors import BuildError

_INT64: Final = 7
"""ONNX's number for int64 (``onnx.TensorProto``)."""


def scatter_add(g: Any, x: Any, dim: Any, index: Any, source: Any) -> Any:
    """Leave ``Tensor.scatter_add`` to torch."""
    # The gradient of ScatterElements in 1.19.2 (``gradient_builder.cc``, GetScatterElementsGradient) ignores its
    # `reduction`, and cuts the gradient of the tensor that is added to.
    return aten(g, "scatter_add", x, dim, index, source).setType(x.type())


def index_add(g: Any, x: Any, dim: Any, index: Any, source: Any, alpha: Any = None) -> Any:
    """Leave ``Tensor.index_add`` to torch, whose export keeps only one of the rows that meet in one place."""
    if alpha is not None and constant(alpha, "f") != 1:
        source = g.op("Mul", source, filled(g, int64(g, [1]), constant(alpha, "f"), like=source))
    one = int64(g, 1)
    return aten(g, "index_add", x, dim, index, source, one).setType(x.type())


def left_to_torch(why: str) -> Any:
    """Return a symbolic function that leaves its operator to torch."""

    def symbolic(*_: Any) -> NoReturn:
        raise LeftToTorch(why)

    return symbolic


def argmin(plain: Any) -> Any:
    """Return the symbolic function of ``torch.argmin``: ONNX Runtime's has no kernel for int64."""

    def symbolic(g: Any, x: Any, *args: Any) -> Any:
        if x.type().scalarType() == "Long":
            raise LeftToTorch("ArgMin has no kernel for its dtype")
        return plain(g, x, *args)

    return symbolic


def eye(plain: Any) -> Any:
    """Return the symbolic function of ``torch.eye``: ONNX Runtime's EyeLike makes no mask and no small whole number."""

    def symbolic(g: Any, *args: Any) -> Any:
        if g.original_node.output().type().scalarType() not in {"Float", "Double", "Int", "Long"}:
            raise LeftToTorch("EyeLike has no kernel for its dtype")
        return plain(g, *args)

    return symbolic


def as_strided(g: Any, x: Any, _sizes: Any, strides: Any, offset: Any = None) -> Any:
    """Emit the elements that ``torch.as_strided`` chooses, by their places in memory as it was while tracing."""
    # Torch's export takes every tensor for contiguous (``symbolic_opset9.as_strided``), and is silently wrong for
    # others. Here the dimensions are put in the order in which they lie in memory first. Places depend on the sizes of
    # the batch, to which such an export is bound (`ortlab.engine.tracing.graph_inputs`).
    helper = symbolic_module("symbolic_helper")
    traced = g.original_node.inputsAt(0).type()  # in the graph that is being made, nothing has strides
    chosen = g.original_node.output().type().sizes()
    steps = helper._maybe_get_const(strides, "is")
    start = 0 if offset is None or is_none(offset) else helper._maybe_get_const(offset, "i")
    order = _order_in_memory(traced.sizes(), traced.strides())
    if order is None or chosen is None or not isinstance(steps, (list, tuple)) or not isinstance(start, int):
        raise _unreadable(
            "elements of the tensor that it is applied to share memory, or have other memory in between"
        )
    places = torch.full((1,) * len(chosen), start, dtype=torch.int64)
    for axis, (size, step) in enumerate(zip(chosen, steps, strict=True)):
        shape = [-1 if other == axis else 1 for other in range(len(chosen))]
        places = places + (torch.arange(size) * step).reshape(shape)
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < math.prod(traced.sizes()):
        raise _unreadable("it reads beyond the tensor that it is applied to")
    if order != sorted(order):
        x = g.op("Transpose", x, perm_i=order)
    flat = g.op("Reshape", x, int64(g, [-1]))
    return g.op("Gather", flat, g.op("Constant", value_t=places), axis_i=0)


def _order_in_memory(sizes: Sequence[int] | None, strides: Sequence[int] | None) -> list[int] | None:
    """Return the dimensions from the farthest apart to the nearest, None if they do not fill one piece of memory."""
    if sizes is None or strides is None or None in sizes or None in strides:
        return None
    order = sorted(range(len(sizes)), key=lambda axis: (-strides[axis], sizes[axis] != 1))
    expected = 1
    for axis in reversed(order):
        if sizes[axis] != 1 and strides[axis] != expected:
            return None
        expected *= sizes[axis]
    return order


def _unreadable(why: str) -> BuildError:
    return BuildError(
        "The model reads memory by its layout, with as_strided, which a graph cannot show.",
        why=f"Values in a graph have no strides: {why}.",
        fix="Use view, transpose, unfold or indexing, or call contiguous() before as_strided.",
    )


def index_put(onnx_index_put: Any) -> Any:
    """Return the symbolic function of ``Tensor.index_put``: as torch exports it, where that is right."""
    # Torch's export does not sum values that meet in one place, and for a mask of several dimensions it does not expand
    # the values to the places that the mask chooses. So torch executes sums and masks.

    def symbolic(g: Any, x: Any, indices: Any, values: Any, accumulate: Any = None) -> Any:
        if accumulate is not None and constant(accumulate, "i"):
            raise LeftToTorch("its export keeps one of the summed values")
        chosen = symbolic_module("symbolic_helper")._unpack_list(indices)
        if any(one.type().kind() == "TensorType" and one.type().scalarType() == "Bool" for one in chosen):
            raise LeftToTorch("its export does not expand the values to the places of a mask")
        target, _, assigned, *_rest = g.original_node.inputs()
        return onnx_index_put(g, x, indices, cast_like(g, values, assigned, target), accumulate)

    return symbolic


def split(plain: Any) -> Any:
    """Return the symbolic function of ``torch.split``: torch's own where all parts have sizes that are known."""
    # Along an axis that is not known, such as the batch, torch's (``symbolic_opset13.split``) takes the last part to be
    # as long as the others, and parts whose sizes are computed become a sequence, through which no gradient flows.

    def symbolic(g: Any, x: Any, sizes: Any, dim: Any, _outputs: int | None = None) -> Any:
        helper, axis = symbolic_module("symbolic_helper"), constant(dim, "i")
        size = helper._maybe_get_const(sizes, "t")
        is_known = isinstance(size, torch.Tensor) and (
            size.dim() > 0 or helper._get_tensor_dim_size(x, axis) is not None
        )
        if _outputs is None or is_known:
            return plain(g, x, sizes, dim, _outputs)
        if helper._is_packed_list(sizes):
            lengths = int64_vector(g, sizes)
        else:
            length = g.op("Reshape", sizes, int64(g, [1]))
            whole = g.op("Gather", g.op("Shape", x), int64(g, [axis]), axis_i=0)
            rest = g.op("Sub", whole, g.op("Mul", length, int64(g, [_outputs - 1])))
            lengths = g.op("Concat", *[length] * (_outputs - 1), rest, axis_i=0)
        return g.op("Split", x, lengths, axis_i=axis, outputs=_outputs)

    return symbolic


def parts(plain: Any, *, even: bool) -> Any:
    """Return the symbolic function of ``torch.tensor_split``, if `even`, or of ``torch.chunk``."""
    # Torch's make a sequence of the parts where it does not know how many there are, and no gradient flows through one:
    # a batch of four makes two parts of ``chunk(3)``. The trace knows, by the list that it takes apart.

    def symbolic(g: Any, x: Any, number: Any, dim: Any, _outputs: int | None = None) -> Any:
        count = symbolic_module("symbolic_helper")._maybe_get_const(number, "t")
        uses = g.original_node.output().uses() if g.original_node.outputsSize() == 1 else []
        made = _outputs or (
            uses[0].user.outputsSize() if uses and uses[0].user.kind() == "prim::ListUnpack" else 0
        )
        if not made or not isinstance(count, torch.Tensor) or count.dim():
            return plain(g, x, number, dim) if _outputs is None else plain(g, x, number, dim, _outputs)
        found = slices(g, x, int(count), constant(dim, "i"), made, even=even)
        return found if _outputs else g.op("prim::ListConstruct", *found)

    return symbolic


def slices(g: Any, x: Any, count: int, dim: int, made: int, *, even: bool = False) -> list[Any]:
    """Emit the first so many parts of what is cut into `count` along an axis, with sizes that stay symbols."""
    number, axis = int64(g, [count]), int64(g, [dim])
    size = g.op("Gather", g.op("Shape", x), axis, axis_i=0)
    whole = size if even else g.op("Add", size, int64(g, [count - 1]))
    step, longer = g.op("Div", whole, number), g.op("Mod", size, number) if even else None
    results, start = [], int64(g, [0])
    for index in range(1, made + 1):
        end = g.op("Mul", step, int64(g, [index]))
        if longer is not None:  # the first parts have one entry more
            end = g.op("Add", end, g.op("Min", longer, int64(g, [index])))
        part = g.op("Slice", x, start, end, axis)
        results.append(part.setType(x.type().with_sizes([None] * (rank(x) or 0))) if rank(x) else part)
        start = end
    return results


_KEEPS_VALUES: Final = frozenset(
    """Cast Expand Flatten Gather Identity Reshape Slice Squeeze Tile Transpose Unsqueeze""".split()  # noqa: SIM905
)
"""ONNX operators whose results are values of their first input."""

_COUNTS: Final = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size"})
"""ONNX operators whose results are counts or places, which are never below zero."""


def index(plain: Any) -> Any:
    """Return the symbolic function of ``aten::index``: torch's own, with negative indices made positive first."""
    # With several tensors, torch's (``symbolic_opset9.index``) makes the number ``i * columns + j`` of the indices of
    # an element, and takes another element where one of them is negative. It warns of that in every model of
    # transformers, whose masks are indexed by ranges.

    def symbolic(g: Any, x: Any, indices: Any) -> Any:
        helper = symbolic_module("symbolic_helper")
        places = helper._unpack_list(indices) if helper._is_packed_list(indices) else [indices]
        if sum(not is_none(one) for one in places) > 1:
            wrapped = [
                one
                if is_none(one) or helper._is_bool(one) or _is_from_zero_on(one)
                else _wrapped(g, x, axis, one)
                for axis, one in enumerate(places)
            ]
            indices = g.op("prim::ListConstruct", *wrapped)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Exporting aten::index operator of advanced indexing")
            return plain(g, x, indices)

    return symbolic


def _wrapped(g: Any, x: Any, axis: int, places: Any) -> Any:
    """Emit indices that count from the start, made of ones that may count from the end."""
    size = g.op("Gather", g.op("Shape", x), int64(g, axis), axis_i=0)
    places = g.op("Cast", places, to_i=_INT64)
    return g.op("Where", g.op("Less", places, int64(g, 0)), g.op("Add", places, size), places)


def _is_from_zero_on(value: Any) -> bool:
    """Say whether an emitted value is known to hold nothing below zero, as a range of sizes does."""
    node = value.node()
    kind, inputs = node.kind().removeprefix("onnx::"), list(node.inputs())
    if kind == "Constant":
        held = node.t("value") if node.hasAttribute("value") and node.kindOf("value") == "t" else None
        return held is not None and (held.numel() == 0 or bool((held >= 0).all()))
    if kind == "Range":
        return _is_from_zero_on(inputs[0]) and _is_from_zero_on(inputs[2])
    if kind in {"Add", "Mul"}:
        return all(_is_from_zero_on(one) for one in inputs)
    return kind in _COUNTS or (kind in _KEEPS_VALUES and _is_from_zero_on(inputs[0]))
