"""What a lab does to measure the memory of a step: run it again from its start, and put everything back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ortlab.errors import StepError
from ortlab.experiment import Experiment, check_count
from ortlab.memory.measuring import Measuring
from ortlab.memory.phases import MemoryPhases
from ortlab.recording import Recording
from ortlab.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

    from ortlab.configuration import Configuration
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.memory.stash import Stash
    from ortlab.options import Need
    from ortlab.runs import Ledger


class MeasuringLab(ABC):
    """The base of `Lab` that measures memory; the abstract parts are the lab's."""

    module: torch.nn.Module
    have: frozenset[Need]
    runs: Ledger
    _experiment: Experiment | None
    _recording: Any
    _engine: Any

    def measure_memory(
        self,
        fn: Callable[[], object] | None = None,
        *,
        steps: int = 2,
        watch: Iterable[object] = (),
        **changes: object,
    ) -> MemoryMeasurement:
        """Measure what a step needs: its peak, the peak of each phase, and what the peak is made of.

        The last step is run again from its start: some steps to warm up, then those that are measured. The steps and
        their times do not count, so nothing comes into the ledger. Afterwards, also after a failure or an interrupt,
        weights, gradients, optimizers, random state, engine and options are as they were before the call.

        On a CPU, ONNX Runtime's arena is off meanwhile, which takes a new session, as the next step does afterwards;
        glibc maps large buffers, so that the resident set follows them; steps are slower.

        Parameters
        ----------
        fn
            A step to measure instead of the last one; it starts where everything stands now.
        steps
            How many steps are measured.
        watch
            With `fn`: more objects to put back, as for `step`.
        **changes
            Options to measure with, and `engine`, as for `set`. Nothing is changed in the lab.

        Returns
        -------
        MemoryMeasurement
            The record; it is kept nowhere else.

        Raises
        ------
        StepError
            If no step has run yet, a step is running, the step does not call the model, PyTorch executed what ONNX
            Runtime was asked for, or memory cannot be told on this system; the error says why.
        OptionError
            If a change is none that `set` would take.
        Exception
            Whatever the step raises.

        Examples
        --------
        >>> lab.measure_memory().rise_bytes - lab.measure_memory(memory_plan=("Gelu+:1:-1",)).rise_bytes
        17825792
        """
        self._check_usable("measure memory")
        check_count(steps)
        before = None
        if fn is None:
            experiment = self._last_experiment().times(steps)
            before = Snapshot(self.module, experiment.start.stateful)
        else:
            experiment = Experiment.begin(self.module, fn, steps, watch, "")
        starts = [experiment.start] if before is None else [experiment.start, before]
        configuration = self.configuration
        wished = configuration.changed(changes, self.have)

        def include(optimizer: Any) -> None:
            for start in starts:
                start.include(optimizer)

        try:
            self.configure(self._without_arena(wished))
            if before is not None:
                experiment.start.put_back()
            self._recording = measuring = Measuring(
                self.module, self._engine, experiment, wished.options, include, self._report_progress
            )
            return self._with_named_stash(measuring.run())
        finally:
            self._recording = None
            starts[-1].put_back()
            self.configure(configuration)
            self._report_progress("", 1.0)

    @property
    def memory_phases(self) -> MemoryPhases:
        """Memory at the points of the steps: of the run that goes on, or else of the last one.

        There are readings if `print_memory_stats` was on.
        """
        if isinstance(self._recording, Recording):
            return self._recording.memory_phases
        return self.runs[-1].memory_phases if len(self.runs) else MemoryPhases(())

    def _with_named_stash(self, measured: MemoryMeasurement) -> MemoryMeasurement:
        """Add what the graph that has just run is known to keep."""
        if measured.engine != "ort" or measured.step.phase("backward") is None:
            return measured
        stash = self.stash(progress=False)
        return measured if stash.unknown else replace(measured, named_stash_bytes=stash.total_bytes)

    def _without_arena(self, configuration: Configuration) -> Configuration:
        """Return what is run: on a CPU, ORT's arena would hide what a step gives back."""
        device = next((tensor.device.type for tensor in self.module.parameters()), "cpu")
        if configuration.engine != "ort":
            return configuration
        if device == "cpu":
            return configuration.changed({"cpu_memory_arena": False}, self.have)
        if not configuration.options.external_gpu_allocator:
            raise StepError(
                "The GPU memory of ONNX Runtime cannot be told.",
                why="It keeps a pool of its own, because external_gpu_allocator is off.",
                fix="Switch it on: lab.set(external_gpu_allocator=True).",
            )
        return configuration

    @property
    @abstractmethod
    def configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def configure(self, configuration: Configuration) -> object:
        """Take over engine and switches as a whole."""

    @abstractmethod
    def stash(self, *, progress: bool = True) -> Stash:
        """Read what the graph that runs keeps for its backward."""

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _report_progress(self, text: str, fraction: float) -> None: ...
