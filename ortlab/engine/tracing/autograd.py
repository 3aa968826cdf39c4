"""Hooks and checkpoints inside a module that is exported: what becomes part of the graph, and what could never run.

A forward hook of a sub-module runs in the export alone. What it returns is in the graph; what it prints or collects
happens once. A backward hook there, and a hook on a tensor that a forward makes, never run: ONNX Runtime computes the
gradients inside. Hooks on the wrapped module itself, on its outputs and on its parameters run as in PyTorch.

Gradient checkpointing: ``ortmodule/__init__.py`` replaces ``torch.utils.checkpoint.checkpoint`` when it is
imported, to trace through it at memory level 1; whoever imported the function earlier, as transformers and most
notebooks do, has the old one, and the export ends in a message with ORTModule's variables and an unformatted
``{func_full_qual_name}``.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ortlab.engine.build_environment import present
from ortlab.engine.patching import with_attributes
from ortlab.errors import BuildError
from ortlab.records.messages import ORTLAB, MessageLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ON_TENSORS: Final = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
_BACKWARD: Final = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD: Final = ("_forward_hooks", "_forward_pre_hooks")
_LIBRARIES: Final = ("accelerate", "deepspeed", "ortlab", "torch", "transformers")
"""Packages whose forward hooks compute something for the graph, as a weight's norm is; ortlab's mark values in it."""


class TensorHooks(TorchFunctionMode):
    """Refuses hooks on the tensors that a forward makes, while it is traced."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _ON_TENSORS and not isinstance(args[0], torch.nn.Parameter):
            raise BuildError(
                f"The forward of this module calls {name}() on a tensor that it has made.",
                why="ONNX Runtime computes the gradients inside the module; that one never gets out.",
                fix="Return the tensor and put the hook on the output, or wrap the parts around it: "
                "ortlab.wrap(model, only=[...]).",
            )
        return function(*args, **(kwargs or {}))


def check_hooks(module: torch.nn.Module, log: MessageLog) -> None:
    """Raise BuildError if a sub-module has a backward hook, and log which sub-modules' forward hooks are exported."""
    parts = [(name, part) for name, part in module.named_modules() if part is not module]
    refused = [name for name, part in parts if any(getattr(part, table) for table in _BACKWARD)]
    if refused:
        raise BuildError(
            f"{_listed(refused)} has a backward hook, which would never run.",
            why="ONNX Runtime computes the gradients inside the wrapped model in one pass.",
            fix="Put the hook on the wrapped model itself or on parameters, remove it, or wrap the parts around: "
            "ortlab.wrap(model, only=[...]).",
        )
    exported = [
        name
        for name, part in parts
        if any(_is_users(hook) for table in _FORWARD for hook in getattr(part, table).values())
    ]
    if exported:
        text = (
            f"{_listed(exported)} has a forward hook: what it returns is part of the graph; "
            "whatever else it does happens in the export only."
        )
        log.add("WARNING", ORTLAB, text)


def _is_users(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] not in _LIBRARIES


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more (each)"  # noqa: PLR2004


@contextmanager
def masks_indexed_plainly() -> Iterator[None]:
    """Let masks that are made with `vmap` index tensors in the block as elsewhere, not in a Function of torch's own."""
    # T5Gemma2's encoder makes such masks. What `vmap` makes of the Function cannot be exported, and its own backward is
    # for flex attention.
    module = sys.modules.get("torch._dynamo._trace_wrapped_higher_order_op")
    if module is None or not hasattr(module, "mod_index"):
        yield
        return
    with with_attributes(module, mod_index=torch.ops.aten.index):
        yield


# --- checkpoints --------------------------------------------------------------------------------------------------

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
    """Keep hooks on saved tensors around a call, such as a checkpoint's, out of its build."""
    # It acts only where there are such hooks: before torch 2.6, `torch.vmap` refuses to run under hooks, and models of
    # transformers make their masks with it.
    try:
        with disable_saved_tensors_hooks("asking whether there are any"):
            return nullcontext()
    except RuntimeError:  # what it raises if there are
        return saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Save a build's tensor as it is: a checkpoint around the call would count it among the call's tensors."""
    return tensor
