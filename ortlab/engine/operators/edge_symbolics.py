"""Operators whose form in ONNX differs from PyTorch's at the edges: ties, NaN, infinity, numbers near zero.

Torch's exporter writes ``log1p(x)`` as ``log(1 + x)``, which is 0 for 1e-20, and ``logsigmoid(x)`` as the logarithm of
a sigmoid, which is -inf for -100. Gradients of 1.19.2 at the bounds of a Clip, of Max and Min, and of a LeakyRelu with
a negative slope are not PyTorch's either. Such an operator becomes a call of PyTorch's own, most with a formula for the
backward (`ortlab.engine.operators.torch_calls`). Bounds of a clamp and some powers have a form that is right.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.operators.indexing_symbolics import left_to_torch
from ortlab.engine.operators.symbolic_words import (
    LeftToTorch,
    boolean,
    constant,
    filled,
    is_none,
    is_training_export,
    plain_symbolic,
    while_training,
)

if TYPE_CHECKING:
    from ortlab.engine.operators.layer_symbolics import Symbolic

_DTYPES: Final = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}

_IN_ALL_GRAPHS: Final = {
    "log1p": "its form is 0 for small numbers",
    "log_sigmoid": "its form is -inf from -89 on",
    "binary_cross_entropy": "its form takes the logarithm of 0, which torch bounds",
    "binary_cross_entropy_with_logits": "its form takes the logarithm of a sigmoid",
    "cdist": "its form adds a small number to each difference",
    "cosine_similarity": "its form takes the smallest norm for the smallest product of two",
    "kl_div": "its form makes 0 of nan",
    "pairwise_distance": "its form adds a small number elsewhere",
    "hardshrink": "its form makes 0 of nan",
    "softshrink": "its form makes 0 of nan",
}
"""What is wrong forward, so that also a graph without a gradient calls torch."""

_IN_TRAINING: Final = {
    "hardtanh": "its gradient flows at the bounds",
    "relu6": "its gradient flows at the bounds",
    "logit": "its gradient is finite where there is no result",
    "maximum": "the gradient of Max is nan for infinite operands",
    "minimum": "the gradient of Min is nan for infinite operands",
    "std": "its gradient is nan where all values are equal",
    "std_mean": "its gradient is nan where all values are equal",
}
"""What is right forward, or in all but huge numbers, and has a wrong gradient."""


def symbolics() -> dict[str, Symbolic]:
    """Return the symbolic functions of this module by the name of their operators."""
    functions = {name: left_to_torch(why) for name, why in _IN_ALL_GRAPHS.items()}
    functions |= {
        name: while_training(left_to_torch(why), plain_symbolic(name)) for name, why in _IN_TRAINING.items()
    }
    functions |= {name: bounded(name, plain_symbolic(name)) for name in ("clamp", "clamp_min", "clamp_max")}
    functions |= {
        name: of_masks(while_training(of_two(plain_symbolic(name)), plain_symbolic(name)))
        for name in ("max", "min")
    }
    functions["leaky_relu"] = while_training(
        leaky_relu(plain_symbolic("leaky_relu")), plain_symbolic("leaky_relu")
    )
    functions["linalg_vector_norm"] = while_training(
        vector_norm(plain_symbolic("linalg_vector_norm")), plain_symbolic("linalg_vector_norm")
    )
    functions["pow"] = power(plain_symbolic("pow"))
    functions["dropout"] = dropped(plain_symbolic("dropout"))
    functions["floor_divide"] = rounded_down(plain_symbolic("floor_divide"))
    functions |= {name: rounded_down(plain_symbolic(name)) for name in ("__rshift_", "bitwise_right_shift")}
    functions["add"] = added_masks(plain_symbolic("add"))
    functions["where"] = chosen_masks(plain_symbolic("where"))
    functions["masked_fill"] = filled_masks(plain_symbolic("masked_fill"))
    return functions


def bounded(name: str, plain: Symbolic) -> Symbolic:
    """Return the symbolic function of a clamp: with both bounds, of which the one that is not given is infinite."""
    # ONNX Runtime's Clip takes the largest number for a bound that is left out, and makes it of an infinite value.
    # Bounds that are tensors have gradients, which Max and Min compute otherwise.

    def symbolic(g: Any, x: Any, *bounds: Any) -> Any:
        low, high = {
            "clamp": (*bounds, None, None)[:2],
            "clamp_min": (*bounds, None),
            "clamp_max": (None, *bounds),
        }[name]
        dtype = _DTYPES.get(x.type().scalarType())
        given = [one for one in (low, high) if not is_none(one)]
        if any(one.type().kind() == "TensorType" and one.type().dim() for one in given):
            return while_training(left_to_torch("the gradient of Max is nan for infinite operands"), plain)(
                g, x, *bounds
            )
        number = _number(given[0]) if len(given) == 1 else None
        if dtype is None or number is None:
            return plain(g, x, *bounds)
        ends = (number, math.inf) if is_none(high) else (-math.inf, number)
        return g.op("Clip", x, *(_scalar(g, end, dtype) for end in ends)).setType(x.type())

    return symbolic


def of_two(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``torch.max`` and ``torch.min``, which are those of two tensors, too."""

    def symbolic(g: Any, x: Any, other: Any = None, keepdim: Any = None) -> Any:
        if other is not None and keepdim is None:
            raise LeftToTorch("the gradient of Max and Min is nan for infinite operands")
        return plain(g, x, other, keepdim)

    return symbolic


def of_masks(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``torch.max`` and ``torch.min``, for which ONNX takes no bool."""

    def symbolic(g: Any, x: Any, *rest: Any) -> Any:
        if _are_masks(x):
            raise LeftToTorch("ONNX has no maximum of masks")
        return plain(g, x, *rest)

    return symbolic


def leaky_relu(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``F.leaky_relu``."""
    # LeakyReluGrad of 1.19.2 reads the sign of the result, which is not that of the input where the slope is negative.

    def symbolic(g: Any, x: Any, slope: Any, *rest: Any) -> Any:
        if constant(slope, "f") < 0:
            raise LeftToTorch("its gradient with a negative slope is wrong")
        return plain(g, x, slope, *rest)

    return symbolic


def vector_norm(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``torch.linalg.vector_norm``: a root's gradient at 0 is nan, that of torch 0."""

    def symbolic(g: Any, x: Any, order: Any, *rest: Any) -> Any:
        if constant(order, "f") not in {0, 1, 2, math.inf, -math.inf}:
            raise LeftToTorch("its gradient is nan where all values are zero")
        return plain(g, x, order, *rest)

    return symbolic


def added_masks(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``x + other``: of two masks it is what one of them has, and Add takes no bool."""

    def symbolic(g: Any, x: Any, other: Any, *rest: Any) -> Any:
        return g.op("Or", x, other) if _are_masks(x, other) else plain(g, x, other, *rest)

    return symbolic


def chosen_masks(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``torch.where``; 1.19.2 has no kernel for masks."""

    def symbolic(g: Any, condition: Any, x: Any = None, other: Any = None, *rest: Any) -> Any:
        if x is not None and other is not None and _are_masks(condition, x, other):
            return g.op("Or", g.op("And", condition, x), g.op("And", g.op("Not", condition), other))
        return plain(g, condition, x, other, *rest)

    return symbolic


def filled_masks(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``Tensor.masked_fill``, for a mask in which there is True or False to fill in."""

    def symbolic(g: Any, x: Any, places: Any, value: Any) -> Any:
        number = _number(value) if _are_masks(x, places) else None
        if number is None:
            return plain(g, x, places, value)
        return g.op("Or", x, places) if number else g.op("And", x, g.op("Not", places))

    return symbolic


def _are_masks(*values: Any) -> bool:
    return all(one.type().kind() == "TensorType" and one.type().scalarType() == "Bool" for one in values)


def power(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``x ** exponent``, with forms for the exponents 0, 1/2 and -1/2."""
    # The gradient of ``x ** 0`` in 1.19.2 is 0 times ``x ** -1``, nan at 0. PyTorch takes a square root for ``x **
    # 0.5``, which is nan for -inf. Where `x` is broadcast to the shape of the exponent, 1.19.2 does not sum its
    # gradient.

    def symbolic(g: Any, x: Any, exponent: Any) -> Any:
        *_, traced = g.original_node.inputs()
        if traced.type().kind() == "TensorType" and traced.type().dim() and is_training_export():
            raise LeftToTorch("its gradient is not summed over the dimensions of the exponent")
        number = _number(exponent)
        if x.type().scalarType() in _DTYPES and exponent.node().kind() == "onnx::Constant":
            if number == 0:  # chosen rather than made, so that a gradient of zeros goes to x as in torch
                ones = filled(g, g.op("Shape", x), 1, like=x)
                return g.op("Where", boolean(g, value=False), x, ones).setType(x.type())
            if number is not None and abs(number) == 0.5:  # noqa: PLR2004
                root = g.op("Sqrt", x).setType(x.type())
                return root if number > 0 else g.op("Reciprocal", root).setType(x.type())
        return plain(g, x, exponent)

    return symbolic


def dropped(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of a dropout, which may drop everything; ONNX Runtime's may not."""

    def symbolic(g: Any, x: Any, rate: Any, train: Any) -> Any:
        dtype = _DTYPES.get(x.type().scalarType())
        if dtype is not None and constant(train, "i") and constant(rate, "f") == 1:
            return g.op("Mul", x, _scalar(g, 0.0, dtype)).setType(x.type())
        return plain(g, x, rate, train)

    return symbolic


def rounded_down(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``x // other`` and ``x >> other``, whose form in ONNX rounds towards zero."""

    def symbolic(g: Any, x: Any, other: Any) -> Any:
        # As in most computations of sizes, where a call would hide what follows from them.
        if all(map(_is_no_negative, g.original_node.inputs())):
            return plain(g, x, other)
        raise LeftToTorch("its form rounds -0.5 to 0")

    return symbolic


_COUNTING: Final = frozenset({"aten::size", "aten::numel", "aten::len", "aten::dim"})
_KEEPING_SIGNS: Final = frozenset(
    """aten::Int aten::ScalarImplicit aten::add aten::mul aten::floor_divide aten::remainder aten::__rshift__ aten::to
    prim::NumToTensor""".split()  # noqa: SIM905
)
"""Operators whose result is negative only where one of their arguments is."""


def _is_no_negative(value: Any) -> bool:
    """Say whether a traced whole number is known to be zero or more."""
    node = value.node()
    if node.kind() == "prim::Constant":
        held = value.toIValue()
        number = held.item() if hasattr(held, "numel") and held.numel() == 1 else held
        return number is None or (isinstance(number, int) and number >= 0)
    return node.kind() in _COUNTING or (
        node.kind() in _KEEPING_SIGNS and all(map(_is_no_negative, node.inputs()))
    )


def _number(value: Any) -> float | None:
    """Return a constant scalar as a number, None for everything else."""
    node = value.node()
    if node.kind() not in {"onnx::Constant", "prim::Constant"} or "value" not in node.attributeNames():
        return None
    held = getattr(node, node.kindOf("value"))("value")
    if hasattr(held, "item"):
        held = held.item() if held.dim() == 0 else None
    return float(held) if isinstance(held, (int, float)) and not isinstance(held, bool) else None


def _scalar(g: Any, number: float, dtype: str) -> Any:
    import torch

    return g.op("Constant", value_t=torch.tensor(number, dtype=getattr(torch, dtype)))
