"""How many floating-point operations a node needs, by the shapes that it ran with.

Counted is what multiplies matrices: products, convolutions, attention, recurrent cells, forward and backward. One
multiplication and one addition are two operations, as in `torch.utils.flop_counter`. What goes through numbers one by
one (an addition, a softmax, a normalisation) waits for memory rather than for arithmetic, and is not counted there
either; its results are counted as elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, ...]


class _Ran(NamedTuple):
    """A node as it ran."""

    inputs: Sequence[Shape]
    outputs: Sequence[Shape]
    attributes: Mapping[str, Any]


Formula: TypeAlias = Callable[[_Ran], int | None]
"""Counts the operations of a node; None where its shapes and attributes do not suffice."""

_UNSEEN: Final = frozenset({"PythonOp", "PythonOpGrad", "If", "Loop", "Scan", "TritonOp"})
"""Operators whose work their shapes do not tell."""


def flops(
    operator: str, inputs: Sequence[Shape], outputs: Sequence[Shape], attributes: Mapping[str, Any]
) -> int | None:
    """Count the operations of one node: 0 for what does not multiply matrices, None where it cannot be told."""
    # The domain of `operator` does not matter; of an ATen node it is the name of PyTorch's operator. `inputs` and
    # `outputs` are the shapes of those that are there, in order.
    name = _name(operator)
    if name in _UNSEEN:
        return None
    formula = _FORMULAS.get(name)
    return 0 if formula is None else formula(_Ran(inputs, outputs, attributes))


def _name(operator: str) -> str:
    return operator.rpartition("::" if "::" in operator else ".")[2]


def _product(node: _Ran) -> int | None:
    """Multiply: two operations for each result and each element of the inner dimension (ONNX, MatMul)."""
    # ``FusedMatMul`` of ORT may transpose the left operand first, and its batch dimensions (matmul_helper.h).
    left = node.inputs[0]
    if not left:
        return None
    if node.attributes.get("transBatchA"):
        left = (*left[1:-1], left[0], left[-1])
    inner = left[-2] if node.attributes.get("transA") and len(left) > 1 else left[-1]
    return 2 * prod(node.outputs[0]) * inner


def _convolution(node: _Ran) -> int:
    """Convolve: each result sums over the kernel and the input channels of its group (ONNX, Conv)."""
    return 2 * prod(node.outputs[0]) * prod(node.inputs[1][1:])


def _transposed_convolution(node: _Ran) -> int:
    """Convolve the other way: each input goes to a kernel's worth of results (ONNX, ConvTranspose)."""
    return 2 * prod(node.inputs[0]) * prod(node.inputs[1][1:])


def _convolution_gradient(node: _Ran) -> int:
    """Go back through a convolution: as much as forward for the gradient of the input, and of the weight."""
    # Inputs are gradient, input and weight, of ORT's ``ConvGrad`` and of PyTorch's ``convolution_backward`` alike.
    gradient, given, weight = node.inputs[:3]
    wanted = sum(shape in (given, weight) for shape in node.outputs)
    return wanted * 2 * prod(gradient) * prod(weight[1:])


def _grouped_product(node: _Ran) -> int:
    """Multiply by groups (``aten::_grouped_mm``): each row of a matrix with one of the matrices, as experts do."""
    left, right = node.inputs[:2]
    groups = left[0] if len(left) > len(right) else 1  # then the columns of the right belong to one each
    return 2 * prod(left) * right[-1] // max(groups, 1)


def _grouped_product_gradient(node: _Ran) -> int:
    """Go back through a product of groups: as much as forward for each operand; the gradient comes before them."""
    return 2 * _grouped_product(_Ran(node.inputs[1:], node.outputs, node.attributes))


def _grouped_linear(node: _Ran) -> int:
    """Multiply groups of rows with a matrix each, shape (groups, n, k)."""
    rows, matrices = node.inputs[:2]
    return 2 * prod(rows) * matrices[1]


def _grouped_linear_gradient(node: _Ran) -> int:
    """Go back through it: as much as forward for each operand."""
    return 2 * _grouped_linear(_Ran(node.inputs[1:], node.outputs, node.attributes))


def _einsum(node: _Ran) -> int | None:
    """Sum products of two operands over all letters (ONNX, Einsum); of one operand nothing is multiplied."""
    equation = node.attributes.get("equation", b"")
    text = (equation.decode() if isinstance(equation, bytes) else str(equation)).replace(" ", "")
    terms = text.partition("->")[0].split(",")
    if len(terms) == 1:
        return 0
    if "." in text or len(terms) != 2 or list(map(len, terms)) != list(map(len, node.inputs)):  # noqa: PLR2004
        return None
    sizes = {
        letter: size
        for term, shape in zip(terms, node.inputs, strict=True)
        for letter, size in zip(term, shape, strict=True)
    }
    return 2 * prod(sizes.values())


def _attention(node: _Ran) -> int:
    """Project to queries, keys and values, score, and mix (ORT, com.microsoft.Attention)."""
    batch, length, _ = node.inputs[0]
    features = node.inputs[1][1] // 3
    return 2 * prod(node.inputs[0]) * node.inputs[1][1] + 4 * batch * length * length * features


def _projected_attention(node: _Ran) -> int | None:
    """Score and mix queries, keys and values that are projected already (ORT, com.microsoft.MultiHeadAttention)."""
    if any(len(shape) != 3 for shape in node.inputs[:3]):  # noqa: PLR2004 - packed in another way
        return None
    query, key, value = node.inputs[:3]
    return 2 * query[0] * query[1] * key[1] * (query[2] + value[2])


def _scores_and_mixture(query: Shape, key: Shape, value: Shape) -> tuple[int, int]:
    pairs = prod(query[:-2]) * query[-2] * key[-2]
    return 2 * pairs * query[-1], 2 * pairs * value[-1]


def _dot_product_attention(node: _Ran) -> int:
    """Score and mix (torch.utils.flop_counter.sdpa_flop_count)."""
    return sum(_scores_and_mixture(*node.inputs[:3]))


def _dot_product_attention_gradient(node: _Ran) -> int:
    """Score again, and four products for the gradients (torch.utils.flop_counter.sdpa_backward_flop_count)."""
    # The first input is the gradient of the result.
    scores, mixture = _scores_and_mixture(*node.inputs[1:4])
    return 3 * scores + 2 * mixture


def _recurrent(node: _Ran) -> int:
    """Multiply each element of the sequence with both weights (ONNX, LSTM, GRU and RNN)."""
    length, batch, _ = node.inputs[0]
    return 2 * length * batch * (prod(node.inputs[1]) + prod(node.inputs[2]))


def _recurrent_gradient(node: _Ran) -> int:
    """Go back through the two products of a recurrent cell: twice the forward (ORT, LSTMGrad and GRUGrad)."""
    return 2 * _recurrent(node)


def _recurrent_layer_gradient(node: _Ran) -> int:
    """Count the same where PyTorch does it: the gradients of the sequence and of both weights come first."""
    length, batch, _ = node.outputs[0]
    return 4 * length * batch * (prod(node.outputs[1]) + prod(node.outputs[2]))


def _linear(node: _Ran) -> int:
    """Multiply rows with a weight (PyTorch, linear, mm and addmm); the row's length is the inner dimension."""
    return 2 * prod(node.outputs[0]) * node.inputs[0][-1]


def _gemm(node: _Ran) -> int:
    """Multiply two matrices, turned or not: the left one has the inner dimension beside the result's rows."""
    return 2 * node.outputs[0][1] * prod(node.inputs[0])


def _sum_of_outer_products(node: _Ran) -> int:
    """Sum the outer products of two operands' rows (`ortlab.engine.operators.torch_kernels.matmul_of_rows`)."""
    return 2 * prod(node.outputs[0]) * prod(node.inputs[0][:-1])


def _chunked_loss(node: _Ran) -> int:
    """Multiply rows with the weight, and again for each of the two gradients that is wanted and so not empty."""
    # Counted is each row, though those whose label is ignored are left out.
    hidden, weight = node.inputs[:2]
    classes = prod(weight) // hidden[-1]
    products = 1 + sum(shape in (hidden, weight) for shape in node.outputs[1:3])
    return products * 2 * prod(hidden) * classes


_OPERATORS: Final[dict[Formula, tuple[str, ...]]] = {
    _product: ("MatMul", "FusedMatMul", "TransposeMatMul", "MatMulInteger"),
    _gemm: ("Gemm", "FusedGemm", "gemm"),
    _linear: ("linear", "mm", "bmm", "matmul", "matmul_transposed"),
    _sum_of_outer_products: ("matmul_of_rows",),
    _convolution: ("Conv", "FusedConv", "convolution"),
    _transposed_convolution: ("ConvTranspose",),
    _convolution_gradient: ("ConvGrad", "convolution_backward", "grouped_convolution_backward"),
    _grouped_product: ("_grouped_mm",),
    _grouped_product_gradient: ("_grouped_mm_vjp",),
    _grouped_linear: ("grouped_linear",),
    _grouped_linear_gradient: ("grouped_linear_backward",),
    _einsum: ("Einsum",),
    _attention: ("Attention",),
    _projected_attention: ("MultiHeadAttention",),
    _dot_product_attention: (
        "attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
    ),
    _dot_product_attention_gradient: (
        "attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_efficient_attention_backward",
    ),
    _chunked_loss: ("chunked_cross_entropy",),
    _recurrent: (
        *("LSTM", "LSTMTraining", "GRU", "GRUTraining", "RNN"),
        *("lstm_layer", "gru_layer", "rnn_layer"),
    ),
    _recurrent_gradient: ("LSTMGrad", "GRUGrad"),
    _recurrent_layer_gradient: ("lstm_layer_backward", "gru_layer_backward", "rnn_layer_backward"),
}
_FORMULAS: Final = {name: formula for formula, names in _OPERATORS.items() for name in names}
