"""Tensors that users look at while a step runs: upstream's subscribers and `inspect_activation`.

1.19.2 puts hooks on a module and all its parts and offers no way to take them away. In a graph of ONNX Runtime, what a
hook does happens once, while it is traced; what acts in each step has to be an `autograd.Function`, as upstream's
`_InspectActivation` is, which becomes an operator that calls Python.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine import load
from ortlab.engine.patching import replace

if TYPE_CHECKING:
    import torch

    Listener = Callable[[str, torch.Tensor], torch.Tensor]


LISTENERS: Final[list[Listener]] = []
"""Called with name and tensor, in order; each returns what takes the tensor's place, with its value."""


def inspect_activation(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Let whoever listens see a tensor inside a forward, and its gradient in the backward.

    It is the identity, on PyTorch and on ONNX Runtime, and gradients pass through. Nobody listens unless something is
    subscribed (`lab.subscribe`); it then costs nothing and may stay in the model, where
    upstream's function of that name raises.

    Parameters
    ----------
    name
        What the tensor is called in files and tables.
    tensor
        Of any shape, dtype and device.

    Returns
    -------
    torch.Tensor
        The same values; go on with it, so that the gradient is seen.

    Examples
    --------
    >>> scores = ortlab.parity.inspect_activation("scores", query @ key.transpose(-1, -2))
    """
    for listener in tuple(LISTENERS):
        tensor = listener(name, tensor)
    return tensor


_TABLES: Final = ("_forward_hooks", "_forward_pre_hooks")

See = Callable[["torch.Tensor", int, str, int], None]
"""Takes a tensor, the depth of its module, its name, and the number of the step."""


def hooks() -> Any:
    """Return upstream's package of hooks, ready to be used beside the installed torch."""
    load()
    from onnxruntime.training.utils import hooks as package
    from onnxruntime.training.utils import torch_io_helper

    replace(torch_io_helper, "_warn_of_constant_inputs", _silent)
    return package


def _silent(_warn: Callable[[object], None]) -> Callable[[object], None]:
    """Say nothing of numbers among what a module takes or returns: a hook hands them on as they are."""

    def say(_data: object) -> None:
        """Say nothing."""

    return say


def is_subscriber(thing: object) -> bool:
    """Tell whether upstream takes an object as a subscriber."""
    return isinstance(thing, hooks()._subscriber_base.SubscriberBase)


def is_exporting() -> bool:
    """Tell whether upstream counts no steps and writes nothing, because the module is being exported."""
    hooks()
    from onnxruntime.training.utils.hooks import _subscriber_manager

    return bool(_subscriber_manager.ORT_NO_INCREASE_GLOBAL_STEP[0])


def seen_in_each_step(
    name: str, tensor: torch.Tensor, run: Any, module_index: int | None, forward: See, backward: See
) -> torch.Tensor:
    """Return a tensor with its value, and let two functions see it and its gradient whenever they are computed."""
    # They see copies. `run` is upstream's `RuntimeStates`; `module_index` is the number of the module that the tensor
    # is the output of, None for none.
    inspect: Any = hooks()._statistics_subscriber._InspectActivation
    seen: torch.Tensor = inspect.apply(name, module_index, run, tensor, forward, backward)
    return seen


@contextmanager
def subscribed(module: torch.nn.Module, subscribers: Sequence[Any]) -> Iterator[None]:
    """Let subscribers see a module in the block; hooks and attributes are afterwards as they were."""
    # One of its own: upstream's shared one drops whoever is subscribed already.
    shared: Any = hooks()._subscriber_manager.SubscriberManager()
    parts = list(module.modules())
    before = [{table: set(getattr(part, table)) for table in _TABLES} for part in parts]
    with_number = {part for part in parts if "id" in vars(part)}
    shared.subscribe(module, list(subscribers))
    made = [
        {table: set(getattr(part, table)) - keys for table, keys in tables.items()}
        for part, tables in zip(parts, before, strict=True)
    ]
    with ExitStack() as ends:
        ends.callback(_take_away, parts, made, with_number)
        for one in subscribers:
            forward: See | None = getattr(one, "module_post_forward_impl", None)
            backward: See | None = getattr(one, "module_pre_backward_impl", None)
            if forward and backward:
                listener = _listener(shared, forward, backward)
                LISTENERS.append(listener)
                ends.callback(LISTENERS.remove, listener)
        yield


def _listener(shared: Any, forward: See, backward: See) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def listen(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return seen_in_each_step(name, tensor, shared.get_run_context(), None, forward, backward)

    return listen


def _take_away(
    parts: Sequence[torch.nn.Module],
    made: Sequence[dict[str, set[int]]],
    with_number: Collection[torch.nn.Module],
) -> None:
    """Remove the hooks that were made, and upstream's number of a module where nobody needs it any more."""
    for part, tables in zip(parts, made, strict=True):
        for table, keys in tables.items():
            for key in keys:
                getattr(part, table).pop(key, None)
                getattr(part, f"{table}_with_kwargs").pop(key, None)
        if part not in with_number and not any(_is_upstreams(hook) for hook in part._forward_hooks.values()):
            vars(part).pop("id", None)


def _is_upstreams(hook: object) -> bool:
    return getattr(hook, "__module__", "").startswith("onnxruntime.training")
