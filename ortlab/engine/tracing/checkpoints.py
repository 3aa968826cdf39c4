"""Gradient checkpointing of torch inside an export (row C3), and around a call that needs one.

``ortmodule/__init__.py`` replaces ``torch.utils.checkpoint.checkpoint`` when it is imported, to trace through it at
memory level 1; whoever imported the function earlier, as transformers and most notebooks do, has the old one, and the
export ends in a message with ORTModule's variables and an unformatted ``{func_full_qual_name}``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from ortlab.engine.build_environment import present
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_NAME: Final = "torch.utils.checkpoint.CheckpointFunction"


def install() -> None:
    """Trace through checkpoints at memory level 1 for every caller; else name the switches that help."""
    from onnxruntime.training.ortmodule import _custom_autograd_function_exporter as exporter

    # A class method, because the exporter asks what was traced for its class.
    CheckpointFunction.apply = classmethod(_trace_through)  # type: ignore[assignment,method-assign]
    exporter._SpecialCustomFunctionHandler._HIGH_PRIORITY_EXPORT_HANDLER_MAP[_NAME] = _leave_to_torch


def _trace_through(cls: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: FBT001
    from onnxruntime.training.ortmodule import ORTMODULE_ONNX_EXPORT_CONTEXT

    options = present()
    level = 0 if options is None or options.allow_autograd_checkpoint else options.memory_level
    if ORTMODULE_ONNX_EXPORT_CONTEXT[0] and level == 1:
        return function(*args)
    return super(CheckpointFunction, cls).apply(function, preserve_rng_state, *args)


def _leave_to_torch(*_args: Any, **_kwargs: Any) -> None:
    """Let a traced `CheckpointFunction` become a PythonOp, or raise BuildError where the options forbid it."""
    options = present()
    if options is None or options.allow_autograd_checkpoint:
        return
    raise BuildError(
        "The model checkpoints gradients with torch.utils.checkpoint, which a graph cannot show.",
        why="It would run the region a second time in the backward pass, behind ONNX Runtime's back.",
        fix=(
            "Let ONNX Runtime recompute instead: memory_level=1. Or leave the region to PyTorch: "
            "allow_autograd_checkpoint=True."
        ),
    )


def saving_apart() -> AbstractContextManager[object]:
    """Keep hooks on saved tensors around a call, such as a checkpoint's, out of its build.

    It acts only where there are such hooks: before torch 2.6, `torch.vmap` refuses to run under hooks, and models of
    transformers make their masks with it.
    """
    try:
        with disable_saved_tensors_hooks("asking whether there are any"):
            return nullcontext()
    except RuntimeError:  # what it raises if there are
        return saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Save a build's tensor as it is: a checkpoint around the call would count it among the call's tensors."""
    return tensor
