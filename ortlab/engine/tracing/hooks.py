"""Hooks inside a module that is exported: what becomes part of the graph, and what could never run.

A forward hook of a sub-module runs in the export alone. What it returns is in the graph; what it prints or collects
happens once. A backward hook there, and a hook on a tensor that a forward makes, never run: ONNX Runtime computes the
gradients inside. Hooks on the wrapped module itself, on its outputs and on its parameters run as in PyTorch.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ortlab.errors import BuildError
from ortlab.records.messages import ORTLAB, MessageLog

_ON_TENSORS: Final = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
_BACKWARD: Final = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD: Final = ("_forward_hooks", "_forward_pre_hooks")
_LIBRARIES: Final = ("accelerate", "deepspeed", "ortlab", "torch", "transformers")
"""Packages whose forward hooks compute something for the graph, as a weight's norm is; ortlab's mark values in it."""


class TensorHooks(TorchFunctionMode):
    """Refuses hooks on the tensors that a forward makes, while it is traced."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`; raise BuildError if it hooks a tensor of the forward's or asks to keep its gradient."""
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
