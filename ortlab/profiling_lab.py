"""What a lab does to profile a step: run it in a session that ORT's profiler watches, and be as it was before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ortlab.errors import ExecutionError, OptionError
from ortlab.experiment import check_count
from ortlab.interrupts import interrupts_kept
from ortlab.runs import EXECUTED_BY_ORT, EXECUTED_BY_PARTS
from ortlab.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

    from ortlab.engine.ort import OrtEngine
    from ortlab.engine.profiling import Profile
    from ortlab.experiment import Experiment
    from ortlab.memory.trace import Trace
    from ortlab.status import Status

_STEPS: Final = 3
"""The first profiled step is slower: its memory is new."""


class ProfilingLab(ABC):
    """The base of `Lab` that profiles; the abstract parts are the lab's."""

    module: torch.nn.Module
    _executed_by: str

    def profile(
        self,
        steps: int = _STEPS,
        *,
        part: str | None = None,
        memory_efficient_order: bool = False,
        progress: bool = True,
    ) -> Trace:
        """Run the last step again while ORT's profiler watches, and go back to where the lab was.

        Parameters
        ----------
        steps
            How often; each kernel's time is the shortest of them.
        part
            Path of the part to profile, where several parts of the model are wrapped.
        memory_efficient_order
            Whether nodes run in the order that ORT gives to sessions with recompute plans, though there may be none.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        Trace
            Every node that ran, in its order, with time and size of its results.

        Raises
        ------
        OptionError
            If the engine is not "ort", or it is not clear which part is meant.
        ExecutionError
            If PyTorch executed a step, as a fallback, or the step does not train.
        StepError
            If no step has run yet, or one is running.
        Exception
            Whatever the step raises. Weights and optimizer are then as they were before this call.
        """
        with self._profiled(steps, part, memory_efficient_order, progress=progress) as (profile, engine):
            in_order = memory_efficient_order or bool(engine.execution.plans)
            return profile.trace(engine.execution.plans, "memory efficient" if in_order else "default")

    @contextmanager
    def _profiled(
        self,
        steps: int,
        part: str | None = None,
        memory_efficient_order: bool = False,  # noqa: FBT001, FBT002 - as `profile`
        *,
        progress: bool = True,
    ) -> Iterator[tuple[Profile, OrtEngine]]:
        """Yield what was seen of the last step while ORT's profiler watched; then go back to where the lab was."""
        self._check_usable("profile a step")
        check_count(steps)
        if self.engine != "ort":
            raise OptionError(
                f"Engine {self.engine!r} cannot be profiled with ONNX Runtime's profiler.",
                fix='Set engine="ort", or use torch.profiler for the others.',
            )
        experiment = self._last_experiment()
        engine = self._engine_of(part, "a session")
        before = Snapshot(self.module, experiment.start.stateful)
        try:
            if engine.pending_stage():
                self._repeat(experiment, 1, "Building", progress=progress)
            from ortlab.engine.profiling import profiled

            with profiled(engine.execution, memory_efficient_order=memory_efficient_order) as profile:
                self._repeat(experiment, steps, "Profiling", progress=progress)
            yield profile, engine
        finally:
            before.put_back()
            self._report_progress("", 1.0)

    def _repeat(self, experiment: Experiment, count: int, what: str, *, progress: bool) -> None:
        from tqdm import tqdm

        experiment.start.put_back()
        with (
            interrupts_kept() as raise_lost,
            tqdm(total=count, desc=what, leave=False, disable=None if progress else True) as bar,
        ):
            for number in range(1, count + 1):
                raise_lost()
                experiment.step()
                if self._executed_by not in (EXECUTED_BY_ORT, EXECUTED_BY_PARTS):
                    raise ExecutionError(
                        "ONNX Runtime did not execute the step that was to be profiled.",
                        why=self.status.reason or "PyTorch did.",
                        fix="Mend that, or wrap a part of the model only.",
                    )
                bar.update()
                self._report_progress(f"{what}: step {number} of {count}", number / count)

    @property
    @abstractmethod
    def engine(self) -> str:
        """The engine of the next step."""

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...

    @abstractmethod
    def _engine_of(self, part: str | None, has: str) -> OrtEngine: ...

    @abstractmethod
    def _report_progress(self, text: str, fraction: float) -> None: ...

    @property
    @abstractmethod
    def status(self) -> Status:
        """What the lab is doing now."""
