"""The recording of a training loop that somebody else runs, such as transformers' Trainer or one with accelerate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ortlab.errors import StepError
from ortlab.records.runs import Step
from ortlab.runs.exchange import exchange_watched
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.recording import Recording

if TYPE_CHECKING:
    from ortlab.records.runs import Initialization


class LoopRecording(Recording):
    """Executes a whole loop once, and finds its steps.

    A step goes from the first forward in training mode after the last step to the end of the optimizer's step, so it
    has as many forwards as gradients are accumulated over. Evaluation, logging, saving and the loading of a step's
    first batch belong to no step.
    """

    failure: BaseException | None = None  # what ended the loop early, after at least one step

    @property
    def _planned_steps(self) -> int:
        return 0  # the loop knows, and tells nobody

    def _steps(self, *, show: bool, partial: bool) -> tuple[Step, ...]:  # noqa: ARG002 - the loop draws its own bar
        self._done: list[Step] = []
        self._losses: list[float] = []
        self._is_open = False
        self._measured: Step | None = None
        self._probe.start()
        exchange = exchange_watched(self._module, self._stopwatch, self._device)
        line = self._progress.task(show=False)
        with exchange, self._stopwatch.watching(), line as self._task, interrupts_kept():
            hook = register_optimizer_step_post_hook(self._optimizer_stepped)
            try:
                self._experiment.step()
            except BaseException as failure:
                self._close()
                if not self._done:
                    raise
                self.failure = failure
            finally:
                hook.remove()
        self._close()
        if not self._done:
            self._explain_no_step()
        return tuple(self._done)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one forward of the module; timed, and part of a step, in training mode only."""
        if not self._module.training:
            outputs = self._engine.forward(args, kwargs)
            self._fallback_reason = self._fallback_reason or self._engine.fallback_reason
            return outputs
        self._close()
        if not self._is_open:
            self._is_open = True
            self._number += 1
            self._executed_by = set()
            self._stopwatch.start_step()
        with self._stopwatch.excluded():
            self._note_loss()
        return super().forward(args, kwargs)

    def built(self, done: Initialization) -> None:
        """Write down that the engine has just built something; the peak starts anew for the first graph only."""
        if self._module.training and not self._done:
            super().built(done)
            return
        self._stopwatch.initialization_ms += done.total_ms
        so_far = self._initialization
        self._initialization = done if so_far is None else so_far.plus(done)

    def _optimizer_stepped(self, *_: Any) -> None:
        """Measure the open step as it is now; another optimizer may follow before the next forward."""
        if not self._is_open:
            return
        watch = self._stopwatch
        with watch.excluded():
            self._note_loss()
        self._measured = Step(
            total_ms=watch.elapsed_ms(),
            forward_ms=watch.forward_ms,
            backward_ms=watch.backward_ms,
            optimizer_ms=watch.optimizer_ms,
            initialization_ms=watch.initialization_ms,
            loss=sum(self._losses) if self._losses else None,
            executed_by=self._who(),
            exchange_ms=watch.exchange_ms,
        )

    def _note_loss(self) -> None:
        """Add the loss of the last backward to the step's; the loop has scaled each to its part of the batch."""
        root, self._stopwatch.backward_root = self._stopwatch.backward_root, None
        if isinstance(root, torch.Tensor) and root.numel() == 1:
            self._losses.append(float(root.detach().float().item()))

    def _close(self) -> None:
        """End the open step if its optimizer has stepped; otherwise leave it open."""
        if self._measured is None:
            return
        self._done.append(self._measured)
        self._task.step(self._measured.loss, self._measured.total_ms)
        self._losses, self._is_open, self._measured = [], False, None

    def _explain_no_step(self) -> None:
        if not self._is_open:
            raise StepError(
                "The training did not call the wrapped model in training mode.",
                why="There is nothing that ONNX Runtime could have executed.",
                fix="Give the trainer the model that was wrapped, Trainer(model=lab.module), and let it train.",
            )
        raise StepError(
            "The training called the model, and no optimizer made a step.",
            why="A step is written down when a torch.optim optimizer has made it.",
            fix="Let the loop call optimizer.step(), or time single calls: lab.step(fn).",
        )
