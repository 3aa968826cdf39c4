"""Tensors that users look at while a step runs: upstream's subscribers, `inspect_activation`, files of statistics.

1.19.2 puts hooks on a module and all its parts and offers no way to take them away. In a graph of ONNX Runtime, what a
hook does happens once, while it is traced; what acts in each step has to be an `autograd.Function`, as upstream's
`_InspectActivation` is, which becomes an operator that calls Python.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine import load
from ortlab.engine.patching import replace
from ortlab.records.activation_statistics import SAMPLES, TensorStatistics

if TYPE_CHECKING:
    from io import TextIOWrapper

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
    """Return a tensor with its value, and let two functions see it and its gradient whenever they are computed.

    They see copies. `run` is upstream's `RuntimeStates`; `module_index` is the number of the module that the tensor is
    the output of, None for none.
    """
    inspect: Any = hooks()._statistics_subscriber._InspectActivation
    seen: torch.Tensor = inspect.apply(name, module_index, run, tensor, forward, backward)
    return seen


@contextmanager
def subscribed(module: torch.nn.Module, subscribers: Sequence[Any]) -> Iterator[None]:
    """Let subscribers see a module in the block; hooks and attributes are afterwards as they were.

    The module is the one that steps call; subscribers are objects of upstream's `SubscriberBase`.
    """
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


# ---- files of statistics ---------------------------------------------------------------------------------------------


def install() -> None:
    """Let ORTModule's StatisticsSubscriber write the right numbers, in the right steps (row T12); once.

    ``utils.hooks._statistics_subscriber._summarize_tensor`` of 1.19.2 takes the sum of each bucket for its mean, so
    that its "std" is of the order of the sum: 3.74 for values between -0.87 and 0.59. The files keep their form, which
    `merge_activation_summary` and people's own scripts read.

    Its `start_step` and `end_step` are asked while hooks run. A graph of ONNX Runtime is traced in step 0, so that with
    a later start nothing was ever written of what is inside; and `inspect_activation` did not ask at all. Here each
    writing asks.

    Both are told which module they see by a table of the modules that were subscribed. What is exported is a copy of
    them: its modules were not in the table, which ended the export with a KeyError. A copy has the number of its
    original.
    """
    from onnxruntime.training.utils.hooks import _statistics_subscriber, _subscriber_base

    replace(_statistics_subscriber, "_summarize_tensor", _right_statistics)
    replace(_subscriber_base.RuntimeStates._GlobalStates, "__init__", _with_numbers_of_copies)
    writer = _statistics_subscriber.StatisticsSubscriber
    replace(writer, "post_forward_tensor_apply", _in_every_step)
    for name in ("module_post_forward_impl", "module_pre_backward_impl"):
        replace(writer, name, _in_its_steps)


class _Numbers(dict[torch.nn.Module, int]):
    """Number of each module in the tree, and of the copies of these modules."""

    def __missing__(self, module: torch.nn.Module) -> int:
        number = vars(module).get("id")  # upstream writes it on each module, and a copy takes it along
        if not isinstance(number, int):
            raise KeyError(module)
        return number


def _with_numbers_of_copies(original: Callable[..., Any]) -> Callable[..., None]:
    def initialise(self: Any) -> None:
        original(self)
        self.module_to_module_index = _Numbers()

    return initialise


def _in_every_step(_original: Callable[..., Any]) -> Callable[..., Any]:
    from onnxruntime.training.utils.hooks import _subscriber_manager

    def post_forward_tensor_apply(
        self: Any, run_rtx: Any, module: Any, tensor_index: int, tensor: Any
    ) -> Any:
        exporting = _subscriber_manager.ORT_NO_INCREASE_GLOBAL_STEP[0]
        if not exporting and self._need_skip_step(run_rtx.global_states.execution_step):
            return tensor
        return self.post_forward_tensor_apply_impl(run_rtx, module, tensor_index, tensor)

    return post_forward_tensor_apply


def _in_its_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Any, activation: Any, depth: int, name: str, step: int) -> None:
        if not self._need_skip_step(step):
            original(self, activation, depth, name, step)

    return write


def _right_statistics(_original: Callable[..., Any]) -> Callable[..., None]:
    def summarize_tensor(
        display_name: str,
        tensor: torch.Tensor,
        f: TextIOWrapper,
        depth: int = 0,
        run_on_cpu: bool = False,  # noqa: FBT001, FBT002 - ORT's signature
        bucket_size: int = 0,  # noqa: ARG001 - ORT's signature
    ) -> None:
        flat = (tensor.cpu() if run_on_cpu else tensor).detach().reshape(-1)
        facts = TensorStatistics.of(flat)
        f.write(
            f"{'>' * max(0, depth) + display_name} shape: {tensor.shape} dtype: {tensor.dtype} size: {flat.size()} \n"
            f"min: {facts.minimum} max: {facts.maximum}, mean: {facts.mean}, std: {facts.std} \n"
            f"nan: {facts.nan}, inf: {facts.inf}\n"
            f"samples(top {SAMPLES}): {_printed(flat[:SAMPLES])}\n"
            f"neg: {facts.negative}, pos: {facts.positive}, zero: {facts.zero},\n"
            f"{'=' * 16}\n"
        )

    return summarize_tensor


def _printed(sample: torch.Tensor) -> str:
    """Return a tensor's text as upstream prints it; upstream leaves these settings behind for the user's own prints."""
    before = dict(vars(torch._tensor_str.PRINT_OPTS))
    torch.set_printoptions(precision=6, linewidth=128)
    try:
        return str(sample)
    finally:
        vars(torch._tensor_str.PRINT_OPTS).update(before)
