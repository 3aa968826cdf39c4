"""The recording of one run: steps are executed, and their times, losses and data are written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ortlab.errors import StepError
from ortlab.runs import EXECUTED_BY_FALLBACK, Initialization, Step
from ortlab.snapshot import DataDigest, Snapshot

if TYPE_CHECKING:
    from ortlab.measure import MemoryProbe, Stopwatch


class Engine(Protocol):
    """One way to execute a module; see `ortlab.engine`."""

    name: str
    executed_by: str
    fallback_reason: str

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward."""


class Recording:
    """Executes the steps of one run; while it does, the lab sends each forward through `forward`.

    Parameters
    ----------
    module, engine
        What is run, and by what.
    stopwatch, probe
        What measures time and memory.
    start
        The point the run starts at; gives the seed of ORT's generator.
    progress
        Told about each step.
    show
        Whether to draw a progress bar where standard error is a terminal.

    Attributes
    ----------
    data
        Digest of the model's inputs.
    initialization
        What was built during the run, or None.
    fallback_reason
        Why PyTorch executed a step that ORT was asked for; empty if it did not.
    started_at
        ISO 8601, UTC.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        engine: Engine,
        stopwatch: Stopwatch,
        probe: MemoryProbe,
        start: Snapshot,
        progress: Callable[[str, float], None],
        *,
        show: bool,
    ) -> None:
        self.data = DataDigest()
        self.initialization: Initialization | None = None
        self.fallback_reason = ""
        self.started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._module = module
        self._engine = engine
        self._stopwatch = stopwatch
        self._probe = probe
        self._seed = start.ort_seed
        self._progress = progress
        self._show = show
        self._executed_by: set[str] = set()

    def run(self, fn: Callable[[], object], count: int) -> tuple[Step, ...]:
        """Execute the steps.

        Raises
        ------
        StepError
            If the first step does not use the model, or does not train it.
        """
        from tqdm import tqdm

        if self._engine.name == "ort":
            from ortlab.engine.sessions import seed

            seed(self._seed)
        self._probe.start()
        steps: list[Step] = []
        # With disable=None tqdm draws on terminals only; a notebook shows the panel's bar instead.
        bar = tqdm(total=count, unit="step", leave=False, disable=None if self._show else True)
        with self._stopwatch.watching(), bar:
            for number in range(1, count + 1):
                steps.append(self._step(fn))
                bar.update()
                self._progress(f"Step {number} of {count}", number / count)
        return tuple(steps)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one forward of the module, timed."""
        watch = self._stopwatch
        with watch.excluded():
            self.data.update(list(args), dict(kwargs))
        with watch.forward():
            outputs = self._engine.forward(args, kwargs)
        self._executed_by.add(self._engine.executed_by)
        self.fallback_reason = self.fallback_reason or self._engine.fallback_reason
        return outputs

    def built(self, done: Initialization) -> None:
        """Write down that the engine has just built something, before it runs the module."""
        self._stopwatch.initialization_ms += done.total_ms
        self.initialization = done if self.initialization is None else self.initialization.plus(done)
        # An export needs more memory than the steps it is for: their peak counts from here on.
        with self._stopwatch.excluded():
            self._probe.start()

    def _step(self, fn: Callable[[], object]) -> Step:
        watch = self._stopwatch
        self._executed_by = set()
        watch.start_step()
        result = fn()
        total_ms = watch.elapsed_ms()
        self._check_step()
        return Step(
            total_ms=total_ms,
            forward_ms=watch.forward_ms,
            backward_ms=watch.backward_ms,
            optimizer_ms=watch.optimizer_ms,
            initialization_ms=watch.initialization_ms,
            loss=_loss(result, watch.backward_root),
            executed_by=self._executed_by.pop() if len(self._executed_by) == 1 else EXECUTED_BY_FALLBACK,
        )

    def _check_step(self) -> None:
        if not self._stopwatch.forward_calls:
            raise StepError(
                "The step did not call the wrapped model.",
                why="There is nothing that ONNX Runtime could have executed.",
                fix="Call the model that was wrapped in the step: loss = model(**batch).loss.",
            )
        if self._module.training and not self._stopwatch.backward_calls:
            raise StepError(
                "The step called the model but no backward().",
                why="Without it nothing is trained, and there is no backward pass to measure.",
                fix="Add loss.backward() and optimizer.step(), or call model.eval() first to time inference.",
            )


def _loss(result: object, root: torch.Tensor | None) -> float | None:
    loss = result if isinstance(result, (torch.Tensor, float, int)) else root
    if isinstance(loss, torch.Tensor):
        return float(loss.detach().float().item()) if loss.numel() == 1 else None
    return None if loss is None else float(loss)
