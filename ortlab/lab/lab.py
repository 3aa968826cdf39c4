"""The lab: one model under experiment, its switches, its steps and its runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.baselines import Baseline, baseline
from ortlab.engine.installation import have as installed_needs
from ortlab.engine.logs.build_log import step_messages
from ortlab.engine.logs.runtime_log import crashed_processes
from ortlab.engine.ort import OrtEngine
from ortlab.errors import StepError, WrapError
from ortlab.lab.activations_lab import ActivationsLab
from ortlab.lab.batch_size_lab import BatchSizeLab
from ortlab.lab.bisecting_lab import BisectingLab
from ortlab.lab.budgeting_lab import BudgetingLab
from ortlab.lab.comparing_engines_lab import ComparingEnginesLab
from ortlab.lab.density_lab import DensityLab
from ortlab.lab.graph_diff_lab import GraphDiffLab
from ortlab.lab.graph_lab import GraphLab
from ortlab.lab.lab_view import LabView
from ortlab.lab.parity_lab import ParityLab
from ortlab.lab.pricing_lab import PricingLab
from ortlab.lab.profiling_lab import ProfilingLab
from ortlab.lab.snapshot_lab import SnapshotLab
from ortlab.lab.subscribing_lab import SubscribingLab
from ortlab.lab.sweeping_lab import SweepingLab
from ortlab.options.configuration import Configuration
from ortlab.options.engine_names import check_engine, engine_kind
from ortlab.options.option_files import with_files, with_usable_export_folder
from ortlab.options.options import Options, check_needs, switches
from ortlab.options.variables import sources
from ortlab.records.coverage import names
from ortlab.records.messages import MessageLog
from ortlab.records.runs import Initialization, Ledger, Run
from ortlab.runs.experiment import Experiment
from ortlab.runs.interrupts import answered, interrupts_kept, say
from ortlab.runs.loop_recording import LoopRecording
from ortlab.runs.measuring import Measuring
from ortlab.runs.partial import PartsEngine
from ortlab.runs.parts import find_parts
from ortlab.runs.progress import Progress
from ortlab.runs.recording import Recording
from ortlab.runs.snapshot import Snapshot
from ortlab.runs.weights import check_weights
from ortlab.runs.wrapping import Takeover, check_wrappable
from ortlab.shown import ShownAsPanel

if TYPE_CHECKING:
    import torch

    from ortlab.lab.following import Observer
    from ortlab.options.options import Need
    from ortlab.ranks.ranks import Ranks
    from ortlab.runs.parts import Wishes

_NOT_BEGUN: Final = (
    "Stopped before the first step was done; nothing is kept, and the lab is as it was before."
)

_RECORDED: Final = "A recorded training takes no steps of its own; lab.memory(fn) measures one."


class Lab(
    ShownAsPanel,
    LabView,
    ActivationsLab,
    ComparingEnginesLab,
    DensityLab,
    SweepingLab,
    ProfilingLab,
    SnapshotLab,
    PricingLab,
    BudgetingLab,
    BatchSizeLab,
    ParityLab,
    GraphLab,
    GraphDiffLab,
    BisectingLab,
    SubscribingLab,
):
    """One model under experiment; `ortlab.wrap` makes it.

    Parameters
    ----------
    module
        The model. It keeps its identity: `lab.module is model`, and calling it runs the lab's engine.
    only
        The sub-modules that ONNX Runtime runs; None for the whole model. See `ortlab.wrap`.
    options
        The switches; by default those that the `ORTMODULE_*` environment variables set.
    engine
        "ort", "eager", "checkpoint" or "compile"; see `set`.
    name
        What tables and errors call the model.

    Attributes
    ----------
    module
        The model.
    name
        Its name.
    runs
        The ledger.
    sweeps
        The sweeps, in order; one that was interrupted, too.
    budgets
        The budgets that were asked for, in order.
    notes
        What the environment variables meant, one sentence each; and where the last lines of a process are that died
        inside ONNX Runtime.
    from_environment
        By option: the environment variable that gave it its first value.

    Raises
    ------
    WrapError
        If the object or a part of it cannot be wrapped, or there is no such part.
    OptionError
        If an option is unknown, wrong, or needs something that is missing here.

    Examples
    --------
    >>> lab = ortlab.wrap(model)
    >>> run = lab.step(train_one_batch, n=20)
    >>> lab.rerun(memory_level=1)
    >>> lab.compare(engine="eager", memory_level=1)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        only: Wishes | None = None,
        options: Options | None = None,
        engine: str = "ort",
        name: str = "model",
        **changes: object,
    ) -> None:
        super().__init__()
        check_wrappable(module)
        parts = None if only is None else find_parts(module, only)
        self.notes: tuple[str, ...] = ()
        self.from_environment: Mapping[str, str] = {}
        if options is None:
            options, self.notes = Options.from_environment(os.environ)
            found = sources(os.environ, switches())
            self.from_environment = {name: found[name] for name in found if name not in changes}
            if options.export_cache_dir and "export_cache_dir" not in changes:
                options, note = with_usable_export_folder(options)
                self.notes += (note,)
        self.notes += crashed_processes()
        options = with_files(options.replace(**changes), Options().changed(options) + tuple(changes))
        engine = check_engine(engine)
        self.have: frozenset[Need] = installed_needs()
        check_needs(options, self.have)
        self.module = module
        self.name = name
        self.runs = Ledger()
        self._options = options
        self._observers: list[Observer] = []
        self._ranks: Ranks | None = None
        self._experiment: Experiment | None = None
        self._progress = Progress(self._tell_progress)
        self._recording: Recording | None = None
        self._takeover = Takeover(module, self._forward)
        self._wrapped = True
        takeover = self._takeover
        self._log = MessageLog()
        told = (options, self._progress.stage, self._built, self._log)
        self._ort: OrtEngine | PartsEngine
        if parts is None:
            self._ort = OrtEngine(module, takeover.run_original, *told, takeover.instance_forward)
        else:
            try:
                self._ort = PartsEngine(module, parts, takeover.run_original, *told)
            except BaseException:
                takeover.release()
                raise
        self._baselines: dict[str, Baseline] = {}
        try:
            self._engine = self._choose(engine)
        except BaseException:
            takeover.release()
            self._ort.close()
            raise
        self._executed_by = ""

    # ---- switches ---------------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The present switches; change them with `set`."""
        return self._options

    @property
    def engine(self) -> str:
        """The engine of the next step: "ort", "eager", "checkpoint" or "compile", with what it is told; see `set`."""
        return self._engine.name

    @property
    def _configuration(self) -> Configuration:
        """Engine and switches together; `_configure` takes them over again."""
        return Configuration(self.engine, self._options)

    def set(self, *, engine: str | None = None, **changes: object) -> Lab:
        """Change switches, or the engine; the next call rebuilds what they touch, and only that.

        Parameters
        ----------
        engine
            "ort"; "eager", plain PyTorch; "checkpoint", which runs each layer under `torch.utils.checkpoint`
            ("checkpoint:encoder+decoder.block" names them); "compile", `torch.compile` ("compile:0.5" gives it an
            activation memory budget). None leaves it.
        **changes
            Options by name, as in `lab.set(memory_level=1)`.

        Returns
        -------
        Lab
            The lab itself.

        Raises
        ------
        OptionError
            If an option or the engine is unknown, has a wrong value, contradicts another, or cannot act here, or the
            model has no layers to checkpoint. Nothing is changed then.
        StepError
            If a step is running.
        """
        self._check_usable("change options")
        wished = changes if engine is None else {**changes, "engine": engine}
        return self._configure(self._configuration.changed(wished, self.have))

    def _configure(self, configuration: Configuration) -> Lab:
        """Take over an engine and switches as a whole, for example those that `_configuration` gave before.

        Raises
        ------
        OptionError
            If the model has no layers to checkpoint. Nothing is changed then.
        StepError
            If a step is running.
        """
        self._check_usable("change options")
        self._engine = self._choose(configuration.engine)
        self._options = self._ort.options = configuration.options
        self._notify("options")
        self._notify("status")
        return self

    # ---- steps ------------------------------------------------------------------------------------------------

    @interrupts_kept()
    def step(
        self,
        fn: Callable[[], object],
        n: int = 1,
        *,
        watch: Iterable[object] = (),
        source: str = "",
        memory: bool | None = None,
        progress: bool = True,
    ) -> Run:
        """Run a training step n times, time it, and add the run to the ledger.

        Weights, buffers, gradients, optimizers, schedulers and random state are kept as they are now, as the start
        that `rerun` and `restore` go back to.

        Parameters
        ----------
        fn
            One training step: forward, backward, optimizer. If it returns the loss, that is recorded; otherwise the
            tensor that `backward()` was called on is.
        n
            How many steps.
        watch
            More objects to keep with the start: optimizers, schedulers and other things with `state_dict()` that
            the step changes. Those that `fn` names itself, as globals or closure variables, are found.
        source
            The step's source, for the record of what a rerun repeats.
        memory
            Whether to measure the run's step memory (`Run.step_memory_bytes`). On a GPU it is read in passing. On a CPU
            `fn` is called a few more times after the n steps, two as a rule; then weights, optimizer and random state
            are put back to where the n steps ended. By default yes, unless `fn` is seen to draw from an iterator: what
            is drawn is gone. `Run.no_step_memory` says why a run has no figure.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        Run
            The record, also in `lab.runs`.

        Raises
        ------
        StepError
            If the step does not call the model or, in training mode, calls no `backward()`; if the weights are not
            finite, or nothing can be trained.
        Exception
            Whatever `fn` raises. The lab is then as it was before the call, weights and optimizer included.
        """
        self._check_usable("run a step")
        with answered(_NOT_BEGUN):
            check_weights(self.module)
            begun = Experiment.begin(self.module, fn, n, watch, source)
        return self._run(begun, progress=progress, memory=memory)

    def record(self, train: Callable[[], object]) -> Run:
        """Let a loop of somebody else train the model, and write each step of its optimizer into the ledger as a run.

        A step goes from its first forward in training mode to the end of the optimizer's step: accumulated batches are
        one step, and evaluation, logging and saving are in none. Its loss is the sum of what `backward()` was called
        on, with a gradient scaler the scaled one. On a CPU the run has no step memory, which takes steps of its own.

        Parameters
        ----------
        train
            What trains, such as a Trainer's `train`; it is called once, without arguments. What it has changed stays,
            also after a failure.

        Returns
        -------
        Run
            The record, also in `lab.runs`. If the training fails or is interrupted after a step, the run with the steps
            that were made is in the ledger, and the exception goes on.

        Raises
        ------
        StepError
            If the loop did not train this model.
        Exception
            Whatever `train` raises.

        Examples
        --------
        >>> run = lab.record(trainer.train)
        """
        self._check_usable("record a training")
        if not callable(train):
            raise StepError(
                f"A training must be something to call, not a {type(train).__name__}.",
                fix="Pass the function, do not call it: lab.record(trainer.train).",
            )
        experiment = Experiment(train, 1, Snapshot(self.module))
        recording = LoopRecording(
            self.module, self._engine, self._takeover.original_forward, experiment, self._progress
        )
        self._recording, number = recording, self.runs.next_number
        try:
            with self._log.during_run(number):
                run = recording.run(number, self._options, show=False)
        finally:
            self._recording = None
        if run.step_memory_bytes is None:
            run = replace(run, no_step_memory=_RECORDED)
        self.runs.add(run)
        self._notify("runs")
        self._notify("status")
        if isinstance(recording.failure, KeyboardInterrupt):
            kept = f"its {len(run.steps):,} steps so far are run {number}, and what it has changed stays"
            say(recording.failure, f"Stopped the training; {kept}.")
        if recording.failure is not None:
            raise recording.failure
        return run

    @interrupts_kept()
    def rerun(
        self, n: int | None = None, *, memory: bool | None = None, progress: bool = True, **changes: object
    ) -> Run:
        """Go back to the start of the last step call and do it again.

        Parameters
        ----------
        n
            How many steps; by default as many as before.
        memory
            Whether to measure the run's step memory, as for `step`.
        progress
            Whether to show a progress bar on a terminal.
        **changes
            Options, and `engine`, for this call only, as `set` takes them; afterwards the lab has its own again, also
            if the call fails or is interrupted. `set` itself changes what every later call runs with.

        Raises
        ------
        StepError
            If no step has run yet.
        OptionError
            If a change is refused; nothing has run then.
        Exception
            Whatever the step raises. Weights and optimizer are then as they were before this call.

        Examples
        --------
        >>> lab.rerun(memory_level=1)
        >>> lab.rerun(engine="eager")
        """
        self._check_usable("rerun")
        again = self._last_experiment().times(n)
        kept = self._configuration
        wished = kept.tried(changes, self.have)
        with answered(_NOT_BEGUN):
            before = Snapshot(self.module, again.start.stateful)
        try:
            if changes:
                self._configure(wished)
            return self._run(again, progress=progress, memory=memory, before=before)
        finally:
            if changes:
                self._configure(kept)

    def restore(self) -> Lab:
        """Go back to the start of the last step call: weights, buffers, gradients, optimizers, random state.

        Raises
        ------
        StepError
            If no step has run yet.
        """
        self._check_usable("restore")
        self._last_experiment().start.put_back()
        self._notify("options")  # as after `set`: who follows the lab has shown what holds now
        return self

    # ---- the end ------------------------------------------------------------------------------------------------

    def unwrap(self, *, forget: bool = False) -> torch.nn.Module:
        """Give the model its own forward back and free ONNX Runtime's sessions; weights stay as trained.

        Parameters
        ----------
        forget
            Whether to drop the exports and gradient graphs of the model as well. They hold no weights, are otherwise
            kept as long as the model lives, and let the next lab of the same model start with a new session only.

        Returns
        -------
        torch.nn.Module
            The model.
        """
        if self._wrapped:
            self._check_usable("unwrap")
            self._takeover.release()
            self._ort.close(forget=forget)
            self._wrapped = False
            self._notify("status")
        return self.module

    def _headline(self) -> str:
        """Name the model, the engine, the options that differ from the defaults and the number of runs."""
        parts = tuple(self._ort.engines) if isinstance(self._ort, PartsEngine) else ()
        only = f"only {names(parts)}, " if parts else ""
        return (
            f"{self.name}: {type(self.module).__name__}, {only}engine={self.engine!r}, {self.status.state}, "
            f"runs={len(self.runs)}, {self._options!r}"
        )

    # ---- parts ------------------------------------------------------------------------------------------------

    def _run(
        self,
        experiment: Experiment,
        *,
        progress: bool,
        sweep: int = 0,
        memory: bool | Run | None = None,
        before: Snapshot | None = None,
    ) -> Run:
        """Run an experiment and keep the run.

        Parameters
        ----------
        experiment
            The step.
        progress
            Whether the cell or the terminal shows a bar.
        sweep
            Number of the sweep that the run is made for; 0 for none.
        memory
            Whether to measure the step memory, None unless the step draws from an iterator; or a run of the same
            configuration that has it.
        before
            What to put back if a step fails or Ctrl-C stops it, where that is not the start; the start is put back
            first, then.
        """
        self._recording = recording = Recording(
            self.module, self._engine, self._takeover.original_forward, experiment, self._progress
        )
        number = self.runs.next_number
        try:
            if before is not None:
                experiment.start.put_back()
            with self._log.during_run(number), self._listening() as drop:
                # Of ranks that train together, those that were stopped would have a run that the others lack.
                partial = not sweep and not self._shares_steps()
                run = recording.run(number, self._options, show=progress, partial=partial)
                if recording.interrupt is not None:
                    drop()
        except BaseException as error:
            (before or experiment.start).put_back()
            if isinstance(error, KeyboardInterrupt):
                say(error, _NOT_BEGUN)
            raise
        finally:
            self._recording = None
        run = replace(run, sweep=sweep)
        self._experiment = experiment
        if recording.interrupt is not None:
            (before or experiment.start).put_back()
            self._keep(replace(run, no_step_memory="Ctrl-C stopped the run."))
            raise say(recording.interrupt, _stopped(run))
        try:
            run = self._with_step_memory(run, experiment, memory)
        except KeyboardInterrupt as interrupt:
            run = replace(run, no_step_memory="You interrupted its measurement.")
            say(interrupt, f"Stopped the measurement of step memory; all steps are kept as run {number}.")
            raise
        finally:  # the steps have been made, whatever becomes of the measurement
            self._keep(run)
        return run

    def _keep(self, run: Run) -> None:
        self.runs.add(run)
        self._notify("runs")
        self._notify("status")

    @contextmanager
    def _listening(self) -> Iterator[Callable[[], None]]:
        """Keep what ONNX Runtime says when a step goes wrong with the messages, not among the user's output."""
        if self._engine.name != "ort":
            yield lambda: None
            return
        with step_messages(self._log) as drop:
            yield drop

    def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # What a measurement switches is not what the user has switched.
        told = self._observers and not isinstance(self._recording, Measuring)
        before = self.status if told else None
        try:
            if self._recording is None:
                outputs = self._engine.forward(args, kwargs)
            else:
                outputs = self._recording.forward(args, kwargs)
        finally:
            self._executed_by = self._engine.executed_by
            if before is not None and self.status != before:
                self._notify("status")
        return outputs

    def _built(self, done: Initialization) -> None:
        if self._recording is not None:
            self._recording.built(done)

    def _choose(self, engine: str) -> OrtEngine | PartsEngine | Baseline:
        chosen = self._ort if engine == "ort" else self._baselines.get(engine)
        if chosen is None:
            hold = self._takeover
            chosen = baseline(engine, self.module, hold.original_forward, hold.run_original, self._built)
            # The layers of a model are looked for each time: the user may have changed them.
            if engine_kind(engine) != "checkpoint":
                self._baselines[engine] = chosen
        if isinstance(self._ort, PartsEngine):
            # As long as PyTorch runs the model, nothing of ours is in the way of its parts: torch.compile would stop.
            (self._ort.take if engine == "ort" else self._ort.release)()
        return chosen

    def _last_experiment(self) -> Experiment:
        if self._experiment is None:
            raise StepError(
                "There is no step to go back to.",
                why="No step has run to its end in this lab yet.",
                fix="Run one: %%ort_step -n 20, or lab.step(fn, n=20).",
            )
        return self._experiment

    def _check_usable(self, what: str) -> None:
        if not self._wrapped:
            raise WrapError(
                f"This lab cannot {what}: its model is unwrapped.",
                fix="Wrap it again: lab = ortlab.wrap(model).",
            )
        if self._recording is not None:
            raise StepError(
                f"The lab cannot {what} while a step is running.", fix="Do it before the step or after it."
            )

    def _report_progress(self, text: str, fraction: float) -> None:
        self._progress.report(text, fraction)

    def _tell_progress(self, text: str, fraction: float) -> None:
        self._notify(f"progress:{text}:{fraction:.3f}")

    def _notify(self, event: str) -> None:
        for observer in list(self._observers):
            observer(event)


def _stopped(run: Run) -> str:
    """Say in one line what Ctrl-C has left of a run."""
    kept = f"kept as run {run.number}" + (" (partial)" if run.is_partial else "")
    return (
        f"Stopped after {len(run.steps):,} of {run.planned_steps:,} steps; {kept}. "
        "The lab is as it was before; rerun with %ort_rerun, or lab.rerun()."
    )
