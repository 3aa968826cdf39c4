"""ORT's own optimizers, FusedAdam and FP16_Optimizer, without the CUDA extension ``fused_ops`` that they ask for.

Their users compile that extension with nvcc, for the CUDA of their torch
(``ortmodule/torch_cpp_extensions/cuda/fused_ops``). This module stands in for it: four functions take the same
arguments and compute what the kernels do, on any device; the formulas are those of the .cu files. A tensor in half
precision is computed in float32, as in the kernels.

Two faults of 1.19.2 are repaired here. ``clip_grad_norm_fp32`` (``_modifier.py``), which takes the place of
Megatron-LM's clipping, returns the norm before it has clipped anything unless the gradients of several GPUs are put
together, and fails on a parameter without a gradient. ``check_overflow_for_grads`` looks at gradients on the current
GPU only.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine.patching import replace
from ortlab.errors import InstallError, OptionError
from ortlab.records.runs import OVERRIDDEN_BY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


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
    """Take one step of Adam, in place (``multi_tensor_adam.cu``)."""
    # `tensor_lists` are gradients, parameters, their first moments and their second moments; `step` counts from 1 on;
    # `mode` is `L2`, `TRANSFORMERS` or `TORCH`; `bias_correction` is 1 to correct the moments for having started at
    # zero, or 0. ORT adds epsilon to ``sqrt(v)`` in modes 0 and 1, PyTorch to ``sqrt(v / (1 - beta2 ** step))``, as
    # mode 2 does. So PyTorch's kernel is given the epsilon and the learning rate that make its step ORT's.
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
    """Compute the 2-norm of a list of tensors (``multi_tensor_l2norm_kernel.cu``)."""
    # Returns that of all entries, shape (1,), and that of each tensor, shape (n,) or, without `per_tensor`, (0,); both
    # in float32.
    (tensors,) = tensor_lists
    if all(one.dtype == torch.float32 for one in tensors):
        norms = torch.stack(list(torch._foreach_norm(list(tensors))))
    else:
        norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float32) for one in tensors])
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else norms[:0]


def multi_tensor_scale(
    _chunk_size: int, overflow: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], scale: float
) -> None:
    """Write the first list, scaled, into the second (``multi_tensor_scale_kernel.cu``)."""
    # `overflow` becomes 1 if an entry of the first list is not finite, and stays as it is otherwise.
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        _note_overflow(overflow, source)
        target.copy_(source.float() * scale)


def unscale_fp16_grads_into_fp32_grads(
    halves: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], overflow: torch.Tensor, scale: float
) -> None:
    """Divide the gradients of float16 parameters by the loss scale and add them to those of their float32 masters."""
    # As ``fused_ops_frontend.cpp`` does for apex: a master without a gradient gets one; `overflow`, one integer,
    # becomes 1 if a float16 gradient is not finite. Halves and masters come in the same order; `scale` is what the loss
    # was multiplied by.
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


_LIBRARIES: Final = {"deepspeed": "DeepSpeed", "apex": "Apex", "megatron": "Megatron-LM"}
_INSTALL: Final = {
    "deepspeed": "pip install 'deepspeed<=0.9.2'",
    "apex": "Build Apex with its CUDA extensions: https://github.com/NVIDIA/apex",
    "megatron": "Take Megatron-LM 1.1.5 from https://github.com/microsoft/DeepSpeedExamples",
}


def is_compiled() -> bool:
    """Tell whether ORT's extension `fused_ops` can be used; False where ONNX Runtime itself cannot be loaded."""
    from ortlab import engine

    try:
        engine.load()
    except InstallError:
        return False
    return compiled() is not None


def ort_fused_adam(groups: Sequence[dict[str, Any]], **values: Any) -> torch.optim.Optimizer:
    """Make ORT's FusedAdam, which needs the compiled extension and parameters on a GPU."""
    from onnxruntime.training.optim import FusedAdam

    made: torch.optim.Optimizer = FusedAdam(groups, **values)
    made.implementation = "ORT's fused_ops"  # type: ignore[attr-defined]
    return made


def modify(optimizer: Any, **groups: Any) -> None:
    """Replace the methods of an optimizer, in place, by those that 1.19.2 has for its type."""
    from ortlab import engine

    engine.load()
    from onnxruntime.training.optim import _modifier_registry as registry

    name = (
        "apex.amp.optimizer.unique_name_as_id"
        if hasattr(optimizer, "_amp_activations")
        else registry.get_full_qualified_type_name(optimizer)
    )
    library = name.split(".", maxsplit=1)[0]
    _mend()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        modifier = registry.OptimizerModifierTypeRegistry.create_modifier(name, optimizer, **groups)
        if modifier is None:
            raise _unknown(optimizer)
        if importlib.util.find_spec(library) is None:
            raise InstallError(
                f"{_LIBRARIES[library]} is not installed.",
                why="FP16_Optimizer changes an optimizer of it, and calls it.",
                fix=_INSTALL[library],
            )
        if not modifier.can_be_modified():
            raise InstallError(
                f"This optimizer of {_LIBRARIES[library]} cannot be changed; it has been left as it is.",
                why="; ".join(str(one.message) for one in said),
                fix=f"{_INSTALL[library]}, or train without fp16_optimizer.",
            )
        compiled = install()
        modifier.override_function()
    by = "ORT's fused_ops" if compiled else "PyTorch's operators over lists"
    for one in (optimizer, getattr(optimizer, "optimizer", None)):  # a run is told of the inner one
        if one is not None:
            setattr(one, OVERRIDDEN_BY, by)


def _unknown(optimizer: Any) -> OptionError:
    absent = [name for name in ("deepspeed", "apex") if importlib.util.find_spec(name) is None]
    fixes = {
        "deepspeed": "Install DeepSpeed (pip install 'deepspeed<=0.9.2') and give what deepspeed.initialize returned",
        "apex": "install Apex and give what amp.initialize(..., opt_level='O2') returned",
    }
    fix = "; or ".join(fixes[name] for name in absent) or (
        "Give what deepspeed.initialize or apex.amp.initialize returned"
    )
    kind = type(optimizer)
    return OptionError(
        f"fp16_optimizer cannot change a {kind.__module__}.{kind.__qualname__}; it has been left as it is.",
        why="FP16_Optimizer of 1.19.2 knows those of DeepSpeed ZeRO (stages 1 and 2), Apex O2 and Megatron-LM 1.1.5.",
        fix=f"{fix}.",
    )


def _mend() -> None:
    from onnxruntime.training.optim import _ds_modifier, _megatron_modifier, _modifier

    for module in (_modifier, _ds_modifier):
        replace(module, "check_overflow_for_grads", _overflow_anywhere)
    replace(_megatron_modifier, "clip_grad_norm_fp32", _clipping)


def _overflow_anywhere(_original: Callable[..., bool]) -> Callable[..., bool]:
    def check_overflow_for_grads(grad_data: Sequence[torch.Tensor]) -> bool:
        return has_overflow(grad_data)

    return check_overflow_for_grads


def _clipping(original: Callable[..., float]) -> Callable[..., float]:
    def clip_grad_norm_fp32(
        parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, **groups: Any
    ) -> float:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        held = [one for one in listed if one.grad is not None]
        if all(groups.values()) and groups:
            return original(held, max_norm, norm_type, **groups)
        return torch.nn.utils.clip_grad_norm_(held, float(max_norm), float(norm_type)).item()

    return clip_grad_norm_fp32
