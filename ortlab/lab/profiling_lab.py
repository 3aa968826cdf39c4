"""What a lab does to profile a step: run it in a session that ORT's profiler watches, and be as it was before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ortlab.errors import ExecutionError
from ortlab.lab.remembered_graph import RememberedGraph
from ortlab.records.runs import EXECUTED_BY_ORT, EXECUTED_BY_PARTS
from ortlab.runs.experiment import check_count, leaving_no_trace
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

    from ortlab.engine.ort import OrtEngine
    from ortlab.engine.profiling import Profile
    from ortlab.memory.trace import Trace
    from ortlab.records.status import Status
    from ortlab.runs.experiment import Experiment
    from ortlab.runs.progress import Progress

_STEPS: Final = 3
"""The first profiled step is slower: its memory is new."""


class ProfilingLab(RememberedGraph):
    """The base of `Lab` that profiles; the abstract parts are the lab's."""

    module: torch.nn.Module
    _executed_by: str
    _progress: Progress

    def profile(
        self,
        n: int = _STEPS,
        *,
        part: str | None = None,
        memory_efficient_order: bool = False,
        progress: bool = True,
    ) -> Trace:
        """Run the last step again while ORT's profiler watches, and go back to where the lab was.

        The step runs on ONNX Runtime with the present switches, whichever engine the lab is set to.

        Parameters
        ----------
        n
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
            If it is not clear which part is meant.
        ExecutionError
            If PyTorch executed a step, as a fallback, or the step does not train.
        StepError
            If no step has run yet, or one is running.
        Exception
            Whatever the step raises. Weights and optimizer are then as they were before this call.
        """
        with self._profiled(n, part, memory_efficient_order, progress=progress) as (profile, engine):
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
        experiment = self._last_experiment()
        engine = self._engine_of(part, "a session")
        before = Snapshot(self.module, experiment.start.stateful)
        try:
            with self._on_ort():
                if engine.pending_stage():
                    self._repeat(experiment, 1, "Building", progress=progress)
                from ortlab.engine.profiling import profiled

                with profiled(engine.execution, memory_efficient_order=memory_efficient_order) as profile:
                    self._repeat(experiment, steps, "Profiling", progress=progress)
                yield profile, engine
        finally:
            before.put_back()

    def _repeat(self, experiment: Experiment, count: int, what: str, *, progress: bool) -> None:
        experiment.start.put_back()
        with (
            leaving_no_trace(experiment.step),
            interrupts_kept() as raise_lost,
            self._progress.task(count, what=what, show=progress) as bar,
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
                bar.begin(f"{what}: step {number} of {count}", number)

    @property
    @abstractmethod
    def status(self) -> Status:
        """What the lab is doing now."""
