"""Scaled dot product attention as one call to torch, with the gradient that torch has for it.

1.19.2 has this for CUDA (``ORTMODULE_ATEN_SDPA_FALLBACK``), read while it is imported
(``_custom_op_symbolic_registry.py``, ``_custom_gradient_registry.py``). Its symbolic function takes one argument less
than torch has passed since 2.5 and hands on boolean masks, which the operator does not take. Here each export decides,
and on the CPU the operator is the one that torch itself computes attention with there.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.build_options import acts
from ortlab.engine.operators.symbolic_words import (
    aten,
    boolean,
    constant,
    filled,
    is_none,
    none,
    rank,
    sizes_between,
)

if TYPE_CHECKING:
    from ortlab.engine.operators.layer_symbolics import Symbolic

ON_CPU: Final = "_scaled_dot_product_flash_attention_for_cpu"
ON_CUDA: Final = "_scaled_dot_product_efficient_attention"

_FLOATS: Final = frozenset({"Float", "Double", "Half", "BFloat16"})
_RANK: Final = 4  # batch, heads, positions, features
_MASK: Final = 3  # position among the arguments of aten::scaled_dot_product_attention


def by_torch(in_pieces: Symbolic) -> Symbolic:
    """``F.scaled_dot_product_attention``: one call to torch where `sdpa_fallback` asks for it and it can be one.

    Parameters
    ----------
    in_pieces
        The symbolic function for all other cases.
    """

    def symbolic(g: Any, query: Any, key: Any, value: Any, *args: Any) -> Any:
        if not acts("sdpa_fallback"):
            return in_pieces(g, query, key, value, *args)
        mask, dropout, causal, scale, grouped = (*args, *[None] * 5)[:5]
        device = query.type().device()
        obstacle = _obstacle(g, (query, key, value), dropout, grouped)
        if obstacle:
            warnings.warn(f"sdpa_fallback leaves an attention in pieces: {obstacle}.", stacklevel=2)
            return in_pieces(g, query, key, value, *args)
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


def _obstacle(g: Any, tensors: tuple[Any, Any, Any], dropout: Any, grouped: Any) -> str:
    """Say why torch's operator cannot compute this attention, as PyTorch decides it; empty if it can."""
    if any(rank(one) != _RANK or one.type().scalarType() not in _FLOATS for one in tensors):
        return "its query, key and value are not floats of four dimensions"
    if not is_none(grouped) and constant(grouped, "i"):
        return "its heads share keys and values (enable_gqa)"
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
