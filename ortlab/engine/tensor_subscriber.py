"""The class to derive own subscribers from: it sees activations and gradients in each step, whoever executes it."""

# ruff: noqa: E402 - onnxruntime.training can be imported only after load() has prepared torch for it

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.engine import load

load()

from onnxruntime.training.utils.hooks._subscriber_base import SubscriberBase

from ortlab.engine.subscriptions import is_exporting, seen_in_each_step

if TYPE_CHECKING:
    import torch


class TensorSubscriber(SubscriberBase):  # type: ignore[misc] # upstream has no types
    """Sees every output of every module, each tensor of `ortlab.parity.inspect_activation`, and their gradients.

    A subclass overrides `activation` and `gradient`. They are called in each step on PyTorch and on ONNX Runtime, where
    an override of upstream's `..._apply_impl` runs in the export only. `lab.subscribe` takes its objects.

    Parameters
    ----------
    start_step, end_step
        The first step that is seen, from 0 on, and the first that is seen no more; None for all.
    """

    def __init__(self, start_step: int | None = None, end_step: int | None = None) -> None:
        super().__init__(start_step=start_step, end_step=end_step)

    def activation(self, name: str, tensor: torch.Tensor, step: int) -> None:
        """See an activation; `tensor` is a copy."""

    def gradient(self, name: str, tensor: torch.Tensor, step: int) -> None:
        """See the gradient of an activation; `tensor` is a copy."""

    def post_forward_tensor_apply(self, run_rtx: Any, module: Any, tensor_index: int, tensor: Any) -> Any:
        """Put a mark behind a module's output; in a graph, which is made once, for all steps. Upstream's name."""
        if not is_exporting() and self._need_skip_step(run_rtx.global_states.execution_step):
            return tensor
        index = run_rtx.global_states.module_to_module_index[module]
        name = f"{type(module).__name__}_{index}_{tensor_index}th_output"
        see = self.module_post_forward_impl, self.module_pre_backward_impl
        return seen_in_each_step(name, tensor, run_rtx, index, *see)

    def module_post_forward_impl(self, activation: Any, _depth: int, name: str, step: int) -> None:
        """Pass on an activation of a step that is to be seen; upstream's name."""
        if not is_exporting() and not self._need_skip_step(step):
            self.activation(name, activation, step)

    def module_pre_backward_impl(self, activation: Any, _depth: int, name: str, step: int) -> None:
        """Pass on a gradient of a step that is to be seen; upstream's name."""
        if not is_exporting() and not self._need_skip_step(step):
            self.gradient(name, activation, step)
