"""ORT's own FusedAdam, and the optimizers that its FP16_Optimizer changes, with the extension or what stands in for it.

Two faults of 1.19.2 are mended here. ``clip_grad_norm_fp32`` (``_modifier.py``), which takes the place of Megatron-LM's
clipping, returns the norm before it has clipped anything unless the gradients of several GPUs are put together, and
fails on a parameter without a gradient. ``check_overflow_for_grads`` looks at gradients on the current GPU only.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine import fused_ops
from ortlab.engine.patching import replace
from ortlab.errors import InstallError, OptionError
from ortlab.records.runs import OVERRIDDEN_BY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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
    return fused_ops.compiled() is not None


def ort_fused_adam(groups: Sequence[dict[str, Any]], **values: Any) -> torch.optim.Optimizer:
    """Make ORT's FusedAdam, which needs the compiled extension and parameters on a GPU."""
    from onnxruntime.training.optim import FusedAdam

    made: torch.optim.Optimizer = FusedAdam(groups, **values)
    made.implementation = "ORT's fused_ops"  # type: ignore[attr-defined]
    return made


def modify(optimizer: Any, **groups: Any) -> None:
    """Replace the methods of an optimizer, in place, by those that 1.19.2 has for its type.

    `groups` are what the modifier of its kind takes. Raises `InstallError` where the optimizer's library is missing, or
    of a version that 1.19.2 does not know, and `OptionError` where 1.19.2 does not know its type.
    """
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
        compiled = fused_ops.install()
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
        return fused_ops.has_overflow(grad_data)

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
