"""Gradients of calls that torch executes for which torch has a formula that needs no second forward.

`ortlab.engine.operators.torch_calls` asks torch's autograd for a gradient, which runs the operator once more. Each
function here takes the gradient of the operator's only result and the operator's arguments, and returns the gradients
of its tensors in their order. What it computes is what torch's ``derivatives.yaml`` names for the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

_aten: Final = torch.ops.aten


def _elu(grad: Tensor, x: Tensor, alpha: float, scale: float, input_scale: float) -> tuple[Tensor]:
    return (_aten.elu_backward(grad, alpha, scale, input_scale, False, x),)  # noqa: FBT003 - not from the result


def _cumsum(grad: Tensor, x: Tensor, dim: int, **_: Any) -> tuple[Tensor]:
    grad = grad.to(x.dtype)
    return (grad.flip(dim).cumsum(dim).flip(dim) if grad.dim() else grad,)


def _bilinear(grad: Tensor, x: Tensor, _: Any, align: bool, scales: Sequence[float] | None) -> tuple[Tensor]:  # noqa: FBT001
    return (
        _aten.upsample_bilinear2d_backward(grad, grad.shape[-2:], x.shape, align, *(scales or (None, None))),
    )


def _grid_sampler(grad: Tensor, x: Tensor, grid: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    backward = _aten.grid_sampler_2d_backward if x.dim() == 4 else _aten.grid_sampler_3d_backward  # noqa: PLR2004
    found: tuple[Tensor, Tensor] = backward(grad, x, grid, *how, [True, True])
    return found


def _rms_norm(
    grad: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, ...]:
    axes = tuple(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = torch.rsqrt(x.square().mean(axes, keepdim=True) + eps)
    normal = x * scale
    of_normal = grad if weight is None else grad * weight
    shared = (of_normal * normal).mean(axes, keepdim=True)
    of_x = torch.addcmul(of_normal, normal, shared, value=-1).mul_(scale)
    if weight is None:
        return (of_x,)
    return of_x, normal.mul_(grad).sum(tuple(range(x.dim() - len(shape))))


def _grouped_mm(
    grad: Tensor, a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any
) -> tuple[Tensor, Tensor]:
    product = _aten._grouped_mm
    return product(grad, b.transpose(-2, -1), offsets), product(a.transpose(-2, -1), grad, offsets)


def _extreme(grad: Tensor, a: Tensor, b: Tensor, *, sign: int) -> tuple[Tensor, Tensor]:
    shared = torch.where(a == b, grad / 2, grad)
    of_a = shared.masked_fill((a < b) if sign > 0 else (a > b), 0)
    of_b = shared.masked_fill((a > b) if sign > 0 else (a < b), 0)
    return of_a.sum_to_size(a.shape).to(a.dtype), of_b.sum_to_size(b.shape).to(b.dtype)


def _maximum(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _extreme(grad, a, b, sign=1)


def _minimum(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _extreme(grad, a, b, sign=-1)


def _im2col(grad: Tensor, x: Tensor, *windows: Sequence[int]) -> tuple[Tensor]:
    return (_aten.col2im(grad, x.shape[-2:], *windows),)


def _roll(grad: Tensor, _: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> tuple[Tensor]:
    return (grad.roll([-shift for shift in shifts], list(dims)),)


def _smooth_l1(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0
) -> tuple[Tensor]:
    return (_aten.smooth_l1_loss_backward(grad, x, target, reduction, beta),)


def _bce_with_logits(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> tuple[Tensor]:
    if pos_weight is None:
        found = torch.sigmoid(x).sub_(target)
    else:
        positive = pos_weight * target
        found = (positive + 1 - target).mul_(torch.sigmoid(x)).sub_(positive)
    found = found if weight is None else found * weight
    found = found.mul_(grad)
    return (found.div_(x.numel()) if reduction == 1 else found,)


def _kl_div(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> tuple[Tensor]:
    shape = torch.broadcast_shapes(x.shape, target.shape)
    found = (-grad * (target.exp() if log_target else target)).expand(shape)
    return ((found / found.numel() if reduction == 1 else found).sum_to_size(x.shape),)


def _log_sigmoid(grad: Tensor, x: Tensor) -> tuple[Tensor]:
    # As torch's kernel has it: 1 less what is lost, so that numbers near 1 round alike.
    return (_aten.log_sigmoid_backward(grad, x, torch.exp(-x.abs())),)


FORMULAS: Final[dict[tuple[str, str], Callable[..., tuple[Tensor, ...]]]] = {
    ("_grouped_mm", "default"): _grouped_mm,
    ("binary_cross_entropy_with_logits", "default"): _bce_with_logits,
    ("cumsum", "default"): _cumsum,
    ("elu", "default"): _elu,
    ("flip", "default"): lambda grad, _, dims: (grad.flip(dims),),
    ("grid_sampler", "default"): _grid_sampler,
    ("hardshrink", "default"): lambda grad, x, size: (_aten.hardshrink_backward(grad, x, size),),
    ("hardtanh", "default"): lambda grad, x, low, high: (_aten.hardtanh_backward(grad, x, low, high),),
    ("hardswish", "default"): lambda grad, x: (_aten.hardswish_backward(grad, x),),
    ("im2col", "default"): _im2col,
    ("kl_div", "default"): _kl_div,
    ("leaky_relu", "default"): lambda grad, x, slope: (_aten.leaky_relu_backward(grad, x, slope, False),),  # noqa: FBT003 - x is no result
    ("log1p", "default"): lambda grad, x: (grad / (x + 1),),
    ("log_sigmoid", "default"): _log_sigmoid,
    ("logit", "default"): lambda grad, x, eps: (_aten.logit_backward(grad, x, eps),),
    ("max", "other"): _maximum,
    ("maximum", "default"): _maximum,
    ("min", "other"): _minimum,
    ("minimum", "default"): _minimum,
    ("mish", "default"): lambda grad, x: (_aten.mish_backward(grad, x),),
    ("pixel_shuffle", "default"): lambda grad, _, factor: (F.pixel_unshuffle(grad, factor),),
    ("relu6", "default"): lambda grad, x: (_aten.hardtanh_backward(grad, x, 0, 6),),
    ("rms_norm", "default"): _rms_norm,
    ("roll", "default"): _roll,
    ("smooth_l1_loss", "default"): _smooth_l1,
    ("softshrink", "default"): lambda grad, x, size: (_aten.softshrink_backward(grad, x, size),),
    ("upsample_bilinear2d", "vec"): _bilinear,
}
"""By operator, without its namespace ``aten::``, and overload.

What returns fewer gradients than there are tensors knows those of the first tensors only: a loss's target needs none.
"""
