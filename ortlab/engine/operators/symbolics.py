"""How ATen operators that onnxruntime 1.19.2 exports wrongly, or not at all, become ONNX.

A symbolic function translates one ATen operator of the traced graph. ORTModule registers its own
(``ortmodule/_custom_op_symbolic_registry.py``) with torch again each time a model is wrapped, from the table
``CustomOpSymbolicRegistry._SYMBOLICS``; the ones here take their place in that table and so last as long.

Where ONNX Runtime has no kernel that is right, the operator stays an ATen operator that torch executes
(domain ``org.pytorch.aten``); `ortlab.engine.operators.gradients` holds the gradients of these.
"""

from __future__ import annotations

import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.build_environment import acts
from ortlab.engine.exporter import symbolic_module
from ortlab.engine.operators import edge_symbolics as edges
from ortlab.engine.operators import indexing_symbolics as indexing
from ortlab.engine.operators import layer_symbolics as layers
from ortlab.engine.operators import recurrent
from ortlab.engine.operators.call_symbolics import expanded_by_torch, has_no_kernels, is_complex
from ortlab.engine.operators.symbolic_words import (
    TO_THE_END,
    LeftToTorch,
    aten,
    boolean,
    cast_like,
    constant,
    filled,
    int64,
    int64_vector,
    is_none,
    is_training_export,
    none,
    plain_symbolic,
    rank,
    sizes_between,
    while_training,
)

if TYPE_CHECKING:
    from ortlab.engine.operators.layer_symbolics import Symbolic

ON_CPU: Final = "_scaled_dot_product_flash_attention_for_cpu"

ON_CUDA: Final = "_scaled_dot_product_efficient_attention"

_FLOATS: Final = frozenset({"Float", "Double", "Half", "BFloat16"})

_RANK: Final = 4  # batch, heads, positions, features

_MASK: Final = 3  # position among the arguments of aten::scaled_dot_product_attention

ATEN_CROSS_ENTROPY: Final[ContextVar[bool]] = ContextVar("ATEN_CROSS_ENTROPY", default=False)
"""Whether exports leave the cross entropy of a (tokens, classes) matrix to torch.

On the CPU, ONNX Runtime's ``SoftmaxCrossEntropyLossInternal`` computes one element at a time, which costs a
tenth of a step of a language model with a vocabulary of thirty thousand. Read during the export.
"""

FEWEST_CLASSES: Final = 256
FEWEST_SCORES: Final = 2**15
"""From how many classes, or scores in the trace, on torch's kernels gain more than the calls into Python cost."""

# The gradients that ONNX Runtime has for these end the process.
_CRASHING: Final = ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "scatter_reduce")


def install() -> None:
    """Put the symbolic functions of this module into ORTModule's table. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry

    table = CustomOpSymbolicRegistry._SYMBOLICS
    if table.get("::diff") is diff:
        return
    ort = {
        name: table[f"::{name}"]
        for name in ("cross_entropy_loss", "embedding", "group_norm", "layer_norm", "_convolution")
    }
    convolution = while_training(layers.convolution(ort["_convolution"]), ort["_convolution"])
    functions = {
        "_grouped_mm": layers.grouped_linear,
        "_convolution": convolution,
        "_convolution_mode": layers.convolution_mode(convolution),
        "argmin": indexing.argmin(plain_symbolic("argmin")),
        "as_strided": indexing.as_strided,
        "broadcast_tensors": layers.broadcast_tensors(plain_symbolic("broadcast_tensors")),
        "chunk": indexing.parts(plain_symbolic("chunk"), even=False),
        "copy": copy,
        "copy_": copy,
        "cross_entropy_loss": cross_entropy_loss(ort["cross_entropy_loss"]),
        "cumsum": cumsum,
        "diff": diff,
        "embedding": layers.embedding(ort["embedding"]),
        "eye": indexing.eye(plain_symbolic("eye")),
        "flip": while_training(
            indexing.left_to_torch("the gradient of a Slice backwards fails"), plain_symbolic("flip")
        ),
        "gelu": layers.gelu,
        "group_norm": layers.group_norm(ort["group_norm"]),
        "index": indexing.index(plain_symbolic("index")),
        "index_add": indexing.index_add,
        "gru": recurrent.gru(plain_symbolic("gru")),
        "instance_norm": layers.instance_norm,
        "layer_norm": layers.layer_norm(ort["layer_norm"]),
        "lstm": recurrent.lstm(plain_symbolic("lstm")),
        "permute": permute,
        "rms_norm": layers.rms_norm,
        "rnn_relu": recurrent.rnn("relu", plain_symbolic("rnn_relu")),
        "rnn_tanh": recurrent.rnn("tanh", plain_symbolic("rnn_tanh")),
        "scaled_dot_product_attention": by_torch(
            layers.attention(plain_symbolic("scaled_dot_product_attention"))
        ),
        "softplus": softplus,
        "split": indexing.split(plain_symbolic("split")),
        "tensor_split": indexing.parts(plain_symbolic("tensor_split"), even=True),
        "unflatten": unflatten,
    }
    trained = {
        "adaptive_avg_pool1d": layers.adaptive_avg_pool1d,
        "adaptive_avg_pool3d": layers.adaptive_avg_pool3d,
        "avg_pool1d": layers.avg_pool1d,
        "avg_pool3d": layers.avg_pool3d,
        "batch_norm": layers.batch_norm,
        "glu": indexing.left_to_torch("in pieces it makes eight tensors where torch makes two"),
        "index_put": indexing.index_put(plain_symbolic("index_put")),
        "max_pool1d": layers.max_pool1d,
        "max_pool3d": layers.max_pool3d,
        "mse_loss": indexing.left_to_torch("in pieces it takes seven times as long"),
        "scatter_add": indexing.scatter_add,
    } | {name: indexing.left_to_torch("its gradient crashes") for name in _CRASHING}
    # Masks are joined in place (`mask |= other`), which torch 2.4 cannot export.
    functions |= {f"__i{name}_": plain_symbolic(f"__{name}_") for name in ("and", "or", "xor")}
    functions |= {name: while_training(symbolic, plain_symbolic(name)) for name, symbolic in trained.items()}
    functions |= edges.symbolics()
    table |= {f"::{name}": symbolic for name, symbolic in functions.items()}
    table["prim::ConstantChunk"] = chunk


def diff(g: Any, x: Any, n: Any, dim: Any, prepend: Any = None, append: Any = None) -> Any:
    """Emit ``torch.diff``, neighbouring differences, as slices; neither torch nor 1.19.2 has a symbolic for it."""
    # Transformers finds packed sequences in position ids with it, when no attention mask is given.
    axis = constant(dim, "i")
    parts = [part for part in (prepend, x, append) if not is_none(part)]
    values = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else x
    minus = "Xor" if x.type().scalarType() == "Bool" else "Sub"
    for _ in range(constant(n, "i")):
        later = g.op("Slice", values, int64(g, [1]), int64(g, [TO_THE_END]), int64(g, [axis]))
        earlier = g.op("Slice", values, int64(g, [0]), int64(g, [-1]), int64(g, [axis]))
        values = g.op(minus, later, earlier)
    return values


def chunk(g: Any, x: Any, chunks: int, dim: int) -> Any:
    """Emit ``torch.chunk`` as slices whose sizes stay symbols."""
    # Torch's own symbolic (``symbolic_opset11.prim_constant_chunk``) emits the same, but its results keep the shapes
    # that they had in the trace, and their sizes become numbers: the heads of an attention, ``rearrange(q, "b n (h d)
    # -> b h n d")`` of einops, were those of the first batch.
    return indexing.slices(g, x, chunks, dim, g.original_node.outputsSize())


def unflatten(g: Any, x: Any, dim: Any, sizes: Any) -> Any:
    """Emit ``Tensor.unflatten`` as a Reshape to the shape with one dimension replaced."""
    # Torch's own (``symbolic_opset13.unflatten``) computes the dimension with ``Mod`` and needs the rank; the symbolic
    # shape inference of 1.19.2 stops at what it emits with a bare AssertionError, and with it ``nn.MultiheadAttention``
    # and ``nn.TransformerEncoder``.
    axis = constant(dim, "i")
    parts = [int64_vector(g, sizes)]
    if axis != 0:
        parts.insert(0, sizes_between(g, x, 0, axis))
    if axis != -1:
        parts.append(sizes_between(g, x, axis + 1, TO_THE_END))
    return g.op("Reshape", x, g.op("Concat", *parts, axis_i=0))


def permute(g: Any, x: Any, dims: Any) -> Any:
    """Emit ``Tensor.permute``; torch's own symbolic writes negative dimensions into Transpose, which knows none."""
    axes = constant(dims, "is")
    return g.op("Transpose", x, perm_i=[axis % len(axes) for axis in axes])


def copy(g: Any, x: Any, source: Any, _: Any) -> Any:
    """Emit what ``x.copy_(source)`` leaves in `x`: the source, in the dtype and shape of `x`."""
    # Torch's exporter has no form for it, and torch no gradient of the operator as such; scans of state-space models
    # (Bamba, Zamba2) write their steps into slices with it.
    traced, given, *_rest = g.original_node.inputs()
    if is_complex(traced) or is_complex(given):
        if not (is_complex(traced) and is_complex(given)):
            raise LeftToTorch("it makes complex numbers of real ones")
    elif given.type().scalarType() != traced.type().scalarType():
        if traced.type().scalarType() not in _FLOATS:
            raise LeftToTorch("it casts to a dtype that no gradient goes through")
        source = cast_like(g, source, given, traced)
    if is_complex(traced) or has_no_kernels(traced):
        return expanded_by_torch(g, source, x)
    return g.op("Expand", source, g.op("Shape", x)).setType(x.type())


def cumsum(g: Any, x: Any, dim: Any, dtype: Any = None) -> Any:
    """Emit ``torch.cumsum`` as torch's own symbolic does; booleans are counted in int64, as torch counts them."""
    if x.type().scalarType() == "Bool" and is_none(dtype):
        from torch.onnx import TensorProtoDataType

        x = g.op("Cast", x, to_i=TensorProtoDataType.INT64)
    return symbolic_module("symbolic_opset11").cumsum(g, x, dim, dtype)


def softplus(g: Any, x: Any, beta: Any, threshold: Any) -> Any:
    """Leave ``F.softplus`` to torch; ONNX Runtime has no gradient for ONNX's Softplus."""
    return aten(g, "softplus", x, beta, threshold).setType(x.type())


def cross_entropy_loss(onnx_cross_entropy: Symbolic) -> Symbolic:
    """Return the symbolic function of ``aten::cross_entropy_loss``: ORT's own, or torch's."""
    # Torch's is taken where `ATEN_CROSS_ENTROPY` asks for it and it fits. Label smoothing and class probabilities as
    # targets are left to torch: ORT's operator has neither.

    def symbolic(
        g: Any, logits: Any, target: Any, weight: Any, reduction: Any, ignore_index: Any, smoothing: Any
    ) -> Any:
        if constant(smoothing, "f") != 0:
            raise LeftToTorch("ORT's loss has no label smoothing")
        if target.type().scalarType() not in {"Long", "Int"}:
            raise LeftToTorch("ORT's loss takes one class index per row")
        if not ATEN_CROSS_ENTROPY.get() or not _suits_torch(g, logits, target):
            return onnx_cross_entropy(g, logits, target, weight, reduction, ignore_index, smoothing)
        arguments = (logits, target, weight, reduction, ignore_index)
        loss = aten(g, "ortlab::cross_entropy", *arguments, outputs=3)[0]
        loss.setType(g.original_node.output().type())
        return loss

    return symbolic


def _suits_torch(g: Any, logits: Any, target: Any) -> bool:
    """Say whether torch computes a loss faster, and whether ORT's optimizers can do without its operator."""
    # The optimizer that leaves out ignored rows (``InsertGatherBeforeSceLoss``) looks for ORT's operator behind the
    # marker that ORTModule puts on sparse labels, a Python operator.
    traced, *_ = g.original_node.inputs()  # with the sizes of the trace, which the export forgets
    sizes: list[int | None] = traced.type().sizes() or []
    return (
        is_training_export()
        and len(sizes) == 2  # noqa: PLR2004 - rows, classes
        and (sizes[1] is None or sizes[1] >= FEWEST_CLASSES or sizes[1] * (sizes[0] or 0) >= FEWEST_SCORES)
        and logits.type().scalarType() == "Float"
        and str(logits.type().device()) == "cpu"
        and target.type().scalarType() == "Long"
        and not target.node().kind().endswith("PythonOp")
    )


def by_torch(in_pieces: Symbolic) -> Symbolic:
    """Return the symbolic function of ``F.scaled_dot_product_attention``: one call to torch, or else `in_pieces`."""
    # It is one call where `sdpa_fallback` asks for that and torch's operator can compute it.

    def symbolic(g: Any, query: Any, key: Any, value: Any, *args: Any) -> Any:
        if not acts("sdpa_fallback"):
            return in_pieces(g, query, key, value, *args)
        mask, dropout, causal, scale, grouped = (*args, *[None] * 5)[:5]
        device = query.type().device()
        obstacle = _obstacle(g, (query, key, value), dropout)
        if obstacle:
            warnings.warn(f"sdpa_fallback leaves an attention in pieces: {obstacle}.", stacklevel=2)
            return in_pieces(g, query, key, value, *args)
        if not is_none(grouped) and constant(grouped, "i"):
            key, value = (layers.for_each_head(g, one, query) for one in (key, value))
        bias = none(g) if is_none(mask) else _as_bias(g, mask, like=query)
        scale = none(g) if is_none(scale) else scale
        if device.type == "cpu":
            output = aten(g, ON_CPU, query, key, value, dropout, causal, bias, scale, outputs=2)[0]
        else:
            if not is_none(mask):
                bias = g.op("Expand", bias, _scores_shape(g, query, key))
            yes = boolean(g, value=True)
            output = aten(g, ON_CUDA, query, key, value, bias, yes, dropout, causal, scale, outputs=4)[0]
        output.setType(query.type())
        return output

    return symbolic


def _obstacle(g: Any, tensors: tuple[Any, Any, Any], dropout: Any) -> str:
    """Say why torch's operator cannot compute this attention, as PyTorch decides it; empty if it can."""
    if any(rank(one) != _RANK or one.type().scalarType() not in _FLOATS for one in tensors):
        return "its query, key and value are not floats of four dimensions"
    device = tensors[0].type().device()
    if device is None or device.type not in ("cpu", "cuda"):
        return "its device is not known"
    if device.type == "cpu" and constant(dropout, "f") != 0:
        return "on the CPU, torch has the operator without dropout only"
    mask = list(g.original_node.inputs())[_MASK]  # as traced: what symbolics emit does not say
    if not is_none(mask) and mask.type().scalarType() != "Bool" and mask.type().requires_grad():
        return "its mask is learned, and torch's operator has no gradient for that"
    return ""


def _as_bias(g: Any, mask: Any, *, like: Any) -> Any:
    """Emit what is added to the scores: a boolean mask says where to look, torch's operators take numbers."""
    if mask.type().scalarType() != "Bool":
        return mask
    shape = g.op("Shape", mask)
    zeros, never = filled(g, shape, 0.0, like=like), filled(g, shape, float("-inf"), like=like)
    return g.op("Where", mask, zeros, never)


def _scores_shape(g: Any, query: Any, key: Any) -> Any:
    return g.op("Concat", sizes_between(g, query, 0, 3), sizes_between(g, key, 2, 3), axis_i=0)
