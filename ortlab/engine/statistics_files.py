"""Let ORTModule's StatisticsSubscriber write the right standard deviation (row T12).

``utils.hooks._statistics_subscriber._summarize_tensor`` of 1.19.2 takes the sum of each bucket for its mean, so that
its "std" is of the order of the sum: 3.74 for values between -0.87 and 0.59. The files keep their form, which
`merge_activation_summary` and people's own scripts read.

Its `start_step` and `end_step` are asked while hooks run. A graph of ONNX Runtime is traced in step 0, so that with a
later start nothing was ever written of what is inside; and `inspect_activation` did not ask at all. Here each
writing asks.

Both are told which module they see by a table of the modules that were subscribed. What is exported is a copy of them:
its modules were not in the table, which ended the export with a KeyError. A copy has the number of its original.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ortlab.engine.patching import replace
from ortlab.records.activation_statistics import SAMPLES, TensorStatistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import TextIOWrapper


def install() -> None:
    """Replace the function that writes a tensor's summary. Calling it again changes nothing."""
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
