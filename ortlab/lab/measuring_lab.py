"""What a lab does to measure the memory of a step: run it again from its start, and put everything back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.errors import OrtlabError, StepError
from ortlab.options.configuration import Configuration
from ortlab.records.runs import NOT_MEASURED
from ortlab.runs.experiment import Experiment, check_count, iterator_of, leaving_no_trace
from ortlab.runs.measuring import Measuring
from ortlab.runs.snapshot import Snapshot

if TYPE_CHECKING:
    from weakref import WeakSet

    from ortlab.engine.ort import OrtEngine
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.memory.saved_activations import SavedActivations
    from ortlab.options.options import Need
    from ortlab.parity.subscribers import Subscription
    from ortlab.records.messages import MessageLog
    from ortlab.records.runs import Ledger, Run
    from ortlab.runs.partial import PartsEngine
    from ortlab.runs.progress import Progress

_SEVERAL_PROCESSES: Final = (
    "Several processes train together, and each step would have to be measured in all of them at once."
)


class MeasuringLab(ABC):
    """The base of `Lab` that measures memory; the abstract parts are the lab's."""

    module: torch.nn.Module
    have: frozenset[Need]
    runs: Ledger
    _experiment: Experiment | None
    _recording: Any
    _engine: Any
    _ort: OrtEngine | PartsEngine
    _subscriptions: WeakSet[Subscription]
    _log: MessageLog
    _progress: Progress

    def memory(
        self,
        fn: Callable[[], object] | None = None,
        *,
        n: int = 2,
        watch: Iterable[object] = (),
        **changes: object,
    ) -> MemoryMeasurement:
        """Measure what a step needs: its peak, the peak of each phase, and what the peak is made of.

        The last step is run again from its start: some steps to warm up, then those that are measured. The steps and
        their times do not count, so nothing comes into the ledger. Afterwards, also after a failure or an interrupt,
        weights, gradients, optimizers, random state, engine and options are as they were before the call.

        On a CPU, ONNX Runtime's arena is off meanwhile, which takes a session of its own, kept beside the usual one;
        glibc maps large buffers, so that the resident set follows them; steps are slower.

        Parameters
        ----------
        fn
            A step to measure instead of the last one; it starts where everything stands now.
        n
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
        >>> lab.memory().rise_bytes - lab.memory(memory_plan=("Gelu+:1:-1",)).rise_bytes
        17825792
        """
        self._check_usable("measure memory")
        check_count(n)
        before = None
        if fn is None:
            experiment = self._last_experiment().times(n)
            before = Snapshot(self.module, experiment.start.stateful)
        else:
            experiment = Experiment.begin(self.module, fn, n, watch, "")
        starts = [experiment.start] if before is None else [experiment.start, before]
        configuration = self._configuration
        wished = configuration.tried(changes, self.have)

        def include(optimizer: Any) -> None:
            for start in starts:
                start.include(optimizer)

        try:
            with self._ort.beside(), self._progress.task(), leaving_no_trace(experiment.step):
                self._configure(self._without_arena(wished))
                if before is not None:
                    experiment.start.put_back()
                self._recording = measuring = Measuring(
                    self.module, self._engine, experiment, wished.options, include, self._report_progress
                )
                return self._with_named_activations(measuring.run())
        finally:
            self._recording = None
            starts[-1].put_back()
            self._configure(configuration)

    def _with_step_memory(
        self,
        run: Run,
        experiment: Experiment,
        memory: bool | Run | None,  # noqa: FBT001 - as in `Lab._run`
    ) -> Run:
        """Take a few more steps where a run has ended, measure one, and put everything back to that end.

        Whatever the steps raise is a reason why the run has no figure, and never the end of the run. An interrupt goes
        on, once everything is put back.
        """
        if run.step_memory_bytes is not None:
            return run
        if memory is not None and not isinstance(memory, bool):
            return replace(
                run, step_memory_bytes=memory.step_memory_bytes, no_step_memory=memory.no_step_memory
            )
        if reason := self._why_unmeasured(run, experiment, memory):
            return replace(run, no_step_memory=reason)
        after = Snapshot(self.module, experiment.start.stateful)
        wanted = Configuration(self._engine.name, self._ort.options)
        try:
            with (
                # A second bar would leave a second empty output in the cell: the panel alone says what goes on. All
                # steps are done by now, so that the bar of a sweep must not fall back.
                self._progress.task(1, done=1, what="Measuring step memory", show=False),
                self._ort.beside(),
                leaving_no_trace(experiment.step),
                self._log.muted(),
            ):
                self._ort.options = self._without_arena(wanted).options
                self._recording = measuring = Measuring(
                    self.module,
                    self._engine,
                    experiment,
                    wanted.options,
                    after.include,
                    self._report_progress,
                )
                return replace(run, step_memory_bytes=measuring.settled_step().rise_bytes)
        except Exception as error:  # noqa: BLE001 - whatever the step raises, the run has been made
            return replace(run, no_step_memory=_why(error))
        finally:
            self._recording = None
            after.put_back()
            self._seed_again(after)

    def _why_unmeasured(self, run: Run, experiment: Experiment, memory: bool | None) -> str:  # noqa: FBT001
        """Say why no steps shall be taken to measure the memory of a run; empty where they may."""
        if memory is False:
            return NOT_MEASURED
        if memory is None:
            if (drawn := iterator_of(experiment.step)) is not None:
                return (
                    f"The step draws from a {type(drawn).__name__}, and measuring takes steps of its own, which would "
                    "draw from it, too; memory=True does it all the same."
                )
            if any(one.is_open for one in self._subscriptions):
                return (
                    "A subscriber sees every step, those of a measurement, too; memory=True measures anyway."
                )
        if run.fell_back:
            return "PyTorch executed steps that ONNX Runtime was asked for."
        return _SEVERAL_PROCESSES if self._shares_steps() else ""

    def _seed_again(self, at: Snapshot) -> None:
        """Let ORT's generator, whose state cannot be read, go on from a seed that follows from torch's state."""
        if self._engine.name == "ort":
            from ortlab.engine.sessions import seed

            seed(at.ort_seed)

    @staticmethod
    def _shares_steps() -> bool:
        """Tell whether other processes take part in each step: they would wait for steps that only some take."""
        distributed = torch.distributed
        return (
            distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        )

    def _with_named_activations(self, measured: MemoryMeasurement) -> MemoryMeasurement:
        """Add what the graph that has just run is known to keep."""
        if measured.engine != "ort" or measured.step.phase("backward") is None:
            return measured
        activations = self.activations(progress=False)
        return (
            measured
            if activations.unknown
            else replace(measured, named_activations_bytes=activations.total_bytes)
        )

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
    def _configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def _configure(self, configuration: Configuration) -> object:
        """Take over engine and switches as a whole."""

    @abstractmethod
    def activations(self, *, progress: bool = True) -> SavedActivations:
        """Read what the graph that runs keeps for its backward."""

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _report_progress(self, text: str, fraction: float) -> None: ...


def _why(error: Exception) -> str:
    """Say in one sentence why the steps that measure memory failed."""
    if isinstance(error, OrtlabError):
        return error.why or error.what
    said = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return f"A step after the last one raised {words.rstrip('.')}."
