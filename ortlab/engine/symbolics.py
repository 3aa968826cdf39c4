"""How ATen operators that onnxruntime 1.19.2 exports wrongly, or not at all, become ONNX.

A symbolic function translates one ATen operator of the traced graph. ORTModule registers its own
(``ortmodule/_custom_op_symbolic_registry.py``) with torch again each time a model is wrapped, from the table
``CustomOpSymbolicRegistry._SYMBOLICS``; the ones here take their place in that table and so last as long.

Where ONNX Runtime has no kernel that is right, the operator stays an ATen operator that torch executes
(domain ``org.pytorch.aten``); `ortlab.engine.gradients` holds the gradients of these.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine import indexing_symbolics as indexing
from ortlab.engine import layer_symbolics as layers
from ortlab.engine import pooling_symbolics as pooling
from ortlab.engine.exporter import symbolic_module
from ortlab.engine.symbolic_words import (
    TO_THE_END,
    aten,
    boolean,
    constant,
    int64,
    int64_vector,
    is_none,
    plain_symbolic,
    rank,
    sizes_between,
    while_training,
)
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from ortlab.engine.layer_symbolics import Symbolic

ATEN_CROSS_ENTROPY: Final[ContextVar[bool]] = ContextVar("ATEN_CROSS_ENTROPY", default=False)
"""Whether exports leave the cross entropy of a (tokens, classes) matrix to torch.

On the CPU, ONNX Runtime's ``SoftmaxCrossEntropyLossInternal`` computes one element at a time, which costs a
tenth of a step of a language model with a vocabulary of thirty thousand. Read during the export.
"""

_CRASHES: Final = "The gradient that ONNX Runtime has for it ends the process."

_REFUSED: Final = {
    "adaptive_max_pool1d": _CRASHES,
    "adaptive_max_pool2d": _CRASHES,
    "adaptive_max_pool3d": _CRASHES,
    "scatter_reduce": _CRASHES,
}


def install() -> None:
    """Put the symbolic functions of this module into ORTModule's table. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry

    table = CustomOpSymbolicRegistry._SYMBOLICS
    if table.get("::diff") is diff:
        return
    ort = {
        name: table[f"::{name}"]
        for name in ("cross_entropy_loss", "group_norm", "layer_norm", "_convolution")
    }
    convolution = while_training(layers.convolution(ort["_convolution"]), ort["_convolution"])
    functions = {
        "_convolution": convolution,
        "_convolution_mode": layers.convolution_mode(convolution),
        "cross_entropy_loss": cross_entropy_loss(ort["cross_entropy_loss"]),
        "cumsum": cumsum,
        "diff": diff,
        "group_norm": layers.group_norm(ort["group_norm"]),
        "index_add": indexing.index_add,
        "layer_norm": layers.layer_norm(ort["layer_norm"]),
        "scaled_dot_product_attention": layers.attention(plain_symbolic("scaled_dot_product_attention")),
        "softplus": softplus,
        "unflatten": unflatten,
    }
    trained = {
        "adaptive_avg_pool1d": pooling.adaptive_avg_pool1d,
        "adaptive_avg_pool3d": pooling.adaptive_avg_pool3d,
        "avg_pool1d": pooling.avg_pool1d,
        "avg_pool3d": pooling.avg_pool3d,
        "batch_norm": layers.batch_norm,
        "index_put": indexing.index_put(plain_symbolic("index_put")),
        "instance_norm": layers.instance_norm,
        "max_pool1d": pooling.max_pool1d,
        "max_pool3d": pooling.max_pool3d,
        "scatter_add": indexing.scatter_add,
    } | {name: indexing.refused(name, why) for name, why in _REFUSED.items()}
    # Masks are joined in place (`mask |= other`), which torch 2.4 cannot export.
    functions |= {f"__i{name}_": plain_symbolic(f"__{name}_") for name in ("and", "or", "xor")}
    functions |= {name: while_training(symbolic, plain_symbolic(name)) for name, symbolic in trained.items()}
    table |= {f"::{name}": symbolic for name, symbolic in functions.items()}


def diff(g: Any, x: Any, n: Any, dim: Any, prepend: Any = None, append: Any = None) -> Any:
    """``torch.diff``: neighbouring differences, as slices; neither torch nor 1.19.2 has a symbolic for it.

    Transformers finds packed sequences in position ids with it, when no attention mask is given.
    """
    axis = constant(dim, "i")
    parts = [part for part in (prepend, x, append) if not is_none(part)]
    values = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else x
    minus = "Xor" if x.type().scalarType() == "Bool" else "Sub"
    for _ in range(constant(n, "i")):
        later = g.op("Slice", values, int64(g, [1]), int64(g, [TO_THE_END]), int64(g, [axis]))
        earlier = g.op("Slice", values, int64(g, [0]), int64(g, [-1]), int64(g, [axis]))
        values = g.op(minus, later, earlier)
    return values


def unflatten(g: Any, x: Any, dim: Any, sizes: Any) -> Any:
    """``Tensor.unflatten``: a Reshape to the shape with one dimension replaced.

    Torch's own (``symbolic_opset13.unflatten``) computes the dimension with ``Mod`` and needs the rank; the symbolic
    shape inference of 1.19.2 stops at what it emits with a bare AssertionError, and with it
    ``nn.MultiheadAttention`` and ``nn.TransformerEncoder``.
    """
    axis = constant(dim, "i")
    parts = [int64_vector(g, sizes)]
    if axis != 0:
        parts.insert(0, sizes_between(g, x, 0, axis))
    if axis != -1:
        parts.append(sizes_between(g, x, axis + 1, TO_THE_END))
    return g.op("Reshape", x, g.op("Concat", *parts, axis_i=0))


def cumsum(g: Any, x: Any, dim: Any, dtype: Any = None) -> Any:
    """``torch.cumsum``: torch's own symbolic; booleans are counted in int64, as torch counts them."""
    if x.type().scalarType() == "Bool" and is_none(dtype):
        from torch.onnx import TensorProtoDataType

        x = g.op("Cast", x, to_i=TensorProtoDataType.INT64)
    return symbolic_module("symbolic_opset11").cumsum(g, x, dim, dtype)


def softplus(g: Any, x: Any, beta: Any, threshold: Any) -> Any:
    """``F.softplus``: executed by torch; ONNX Runtime has no gradient for ONNX's Softplus."""
    return aten(g, "softplus", x, beta, threshold).setType(x.type())


def cross_entropy_loss(onnx_cross_entropy: Symbolic) -> Symbolic:
    """``aten::cross_entropy_loss``: ORT's own, or torch's where `ATEN_CROSS_ENTROPY` asks for it and it fits.

    Raises
    ------
    BuildError
        During the export, for label smoothing and for class probabilities as targets: ORT's operator has neither.
    """

    def symbolic(
        g: Any, logits: Any, target: Any, weight: Any, reduction: Any, ignore_index: Any, smoothing: Any
    ) -> Any:
        if constant(smoothing, "f") != 0:
            _refuse_loss("label smoothing")
        if target.type().scalarType() not in {"Long", "Int"}:
            _refuse_loss("class probabilities as targets")
        is_matrix = rank(logits) == 2 and logits.type().scalarType() == "Float"  # noqa: PLR2004
        if not ATEN_CROSS_ENTROPY.get() or not is_matrix:
            return onnx_cross_entropy(g, logits, target, weight, reduction, ignore_index, smoothing)
        log_probabilities = aten(g, "_log_softmax", logits, int64(g, 1), boolean(g, value=False))
        log_probabilities.setType(logits.type())
        arguments = (log_probabilities, target, weight, reduction, ignore_index)
        loss = aten(g, "nll_loss_forward", *arguments, outputs=2)[0]
        loss.setType(g.original_node.output().type())
        return loss

    return symbolic


def _refuse_loss(what: str) -> None:
    raise BuildError(
        f"Cross entropy with {what} cannot be trained by ONNX Runtime.",
        why="Its loss operator takes one class index per row.",
        fix="Compute the loss outside of the wrapped module, or write it with log_softmax.",
    )
