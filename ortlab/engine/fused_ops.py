"""What stands in for ORT's CUDA extension ``fused_ops``: the same four functions, by PyTorch's own kernels.

``FusedAdam`` and ``FP16_Optimizer`` of 1.19.2 call an extension that its users compile with nvcc, for the CUDA of their
torch (``ortmodule/torch_cpp_extensions/cuda/fused_ops``). Each function here takes the same arguments and computes what
the kernel does, on any device; the formulas are those of the .cu files. A tensor in half precision is computed in
float32, as in the kernels.
"""

from __future__ import annotations

import importlib
import math
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKAGE: Final = "onnxruntime.training.ortmodule.torch_cpp_extensions"
NAME: Final = "fused_ops"

L2, TRANSFORMERS, TORCH = 0, 1, 2
"""How Adam decays weights (``AdamWMode`` of ``fused_adam.py``): in the gradient; after the step; before it."""

_HAVE_FUSED_ADAM: Final = frozenset({"cpu", "cuda"})
"""Devices that PyTorch has a fused Adam for, in every version that ortlab works with."""

TorchTensorVector = list
"""The extension has a vector of tensors; a list serves."""


def compiled() -> ModuleType | None:
    """Return ORT's own extension; None if it is not compiled, or for another torch."""
    if isinstance(sys.modules.get(f"{_PACKAGE}.{NAME}"), ModuleType):
        present = sys.modules[f"{_PACKAGE}.{NAME}"]
        return None if present is sys.modules[__name__] else present
    try:
        return importlib.import_module(f"{_PACKAGE}.{NAME}")
    except (ImportError, OSError):
        return None


def install() -> bool:
    """Give ORT's optimizers the functions here, unless the extension is compiled; tell whether it is."""
    if compiled() is not None:
        return True
    own = sys.modules[__name__]
    sys.modules[f"{_PACKAGE}.{NAME}"] = own
    setattr(importlib.import_module(_PACKAGE), NAME, own)
    return False


def is_fused(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether PyTorch has one fused kernel for Adam on these tensors; it goes through them in lists otherwise."""
    return all(one.device.type in _HAVE_FUSED_ADAM and one.is_floating_point() for one in tensors)


def multi_tensor_adam(  # noqa: PLR0917 - the signature of ORT's extension
    _chunk_size: int,
    _overflow: Any,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take one step of Adam, in place (``multi_tensor_adam.cu``).

    `tensor_lists` are gradients, parameters, their first moments and their second moments; `step` counts from 1 on;
    `mode` is `L2`, `TRANSFORMERS` or `TORCH`; `bias_correction` is 1 to correct the moments for having started at zero,
    or 0.

    ORT adds epsilon to ``sqrt(v)`` in modes 0 and 1, PyTorch to ``sqrt(v / (1 - beta2 ** step))``, as mode 2 does. So
    PyTorch's kernel is given the epsilon and the learning rate that make its step ORT's.
    """
    from torch.optim.adam import adam

    gradients, parameters, means, squares = (list(one) for one in tensor_lists)
    first, second = 1 - beta1**step, math.sqrt(1 - beta2**step)
    to_root = epsilon * second if mode == TORCH and bias_correction else epsilon
    keep = 1 - lr * weight_decay
    if mode == TORCH and weight_decay:
        torch._foreach_mul_(parameters, keep)
    steps: dict[torch.device, list[torch.Tensor]] = {}
    # Views of one tensor for each device, which is cheaper than a tensor for each parameter.
    for one in parameters:
        if one.device not in steps:
            here = sum(other.device == one.device for other in parameters)
            steps[one.device] = list(torch.full((here,), step - 1.0, device=one.device).unbind())
    fused = is_fused(parameters)
    adam(
        parameters,
        gradients,
        means,
        squares,
        [],
        [steps[one.device].pop() for one in parameters],
        foreach=not fused,
        fused=fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr if bias_correction else lr * first / second,
        weight_decay=weight_decay if mode == L2 else 0.0,
        eps=to_root / second,
        maximize=False,
    )
    if mode == TRANSFORMERS and weight_decay:
        torch._foreach_mul_(parameters, keep)


def multi_tensor_l2norm(
    _chunk_size: int,
    _overflow: Any,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    per_tensor: bool = False,  # noqa: FBT001, FBT002 - the signature of ORT's extension
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the 2-norm of a list of tensors (``multi_tensor_l2norm_kernel.cu``).

    Returns that of all entries, shape (1,), and that of each tensor, shape (n,) or, without `per_tensor`, (0,); both in
    float32.
    """
    (tensors,) = tensor_lists
    if all(one.dtype == torch.float32 for one in tensors):
        norms = torch.stack(list(torch._foreach_norm(list(tensors))))
    else:
        norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float32) for one in tensors])
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else norms[:0]


def multi_tensor_scale(
    _chunk_size: int, overflow: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], scale: float
) -> None:
    """Write the first list, scaled, into the second (``multi_tensor_scale_kernel.cu``).

    `overflow` becomes 1 if an entry of the first list is not finite, and stays as it is otherwise.
    """
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        _note_overflow(overflow, source)
        target.copy_(source.float() * scale)


def unscale_fp16_grads_into_fp32_grads(
    halves: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], overflow: torch.Tensor, scale: float
) -> None:
    """Divide the gradients of float16 parameters by the loss scale and add them to those of their float32 masters.

    As ``fused_ops_frontend.cpp`` does for apex: a master without a gradient gets one; `overflow`, one integer, becomes
    1 if a float16 gradient is not finite. Halves and masters come in the same order; `scale` is what the loss was
    multiplied by.
    """
    for half, master in zip(halves, masters, strict=True):
        if half.grad is None:
            continue
        _note_overflow(overflow, half.grad)
        gradient = half.grad.float() / scale
        master.grad = gradient if master.grad is None else master.grad + gradient


def has_overflow(gradients: Sequence[torch.Tensor]) -> bool:
    """Tell whether an entry of a gradient is infinite or not a number, with one look at each device."""
    found: dict[torch.device, torch.Tensor] = {}
    for one in gradients:
        found.setdefault(one.device, torch.zeros(1, device=one.device))
    for device, overflow in found.items():
        here = [one for one in gradients if one.device == device]
        torch._amp_foreach_non_finite_check_and_unscale_(here, overflow, torch.ones(1, device=device))
    return any(bool(overflow.item()) for overflow in found.values())


def _note_overflow(overflow: torch.Tensor, tensor: torch.Tensor) -> None:
    overflow.logical_or_(~torch.isfinite(tensor).all())
