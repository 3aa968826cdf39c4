"""The calls of a model's modules in one forward of PyTorch, kept to build the modules for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from ortlab.checks.preflight_batches import Call


def calls_of_parts(
    model: torch.nn.Module, run: Callable[[], object]
) -> tuple[dict[str, Call], BaseException | None]:
    """Run a forward and keep the first call of each module in it.

    Tensors are kept as they are, cut off from what they were computed of; the memory that they need is that of the
    activations of a step.

    Parameters
    ----------
    model
        The model.
    run
        Calls it.

    Returns
    -------
    dict and exception
        Calls by path, in the order of calling, and what the forward raised, None if nothing.
    """
    calls: dict[str, Call] = {}

    def keeper(path: str) -> Callable[..., None]:
        def keep(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in calls:
                calls[path] = Call(*_pytree.tree_map(_cut, (tuple(args), dict(kwargs))))

        return keep

    hooks = [
        part.register_forward_pre_hook(keeper(path), with_kwargs=True)
        for path, part in model.named_modules()
        if part is not model
    ]
    try:
        with torch.enable_grad():
            run()
    except Exception as error:  # noqa: BLE001 - what failed is said by whoever asked
        return calls, error
    finally:
        for hook in hooks:
            hook.remove()
    return calls, None


def _cut(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.detach().requires_grad_(value.requires_grad)
    return value
