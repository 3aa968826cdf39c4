"""The lab: one model under experiment, its switches, its steps and its runs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ortlab.comparison import Comparison, compare
from ortlab.engine.baselines import CompileEngine, EagerEngine
from ortlab.engine.installation import have as installed_needs
from ortlab.engine.ort import OrtEngine
from ortlab.errors import OptionError, StepError, WrapError
from ortlab.experiment import Experiment
from ortlab.graphs.stages import STAGES, Graph
from ortlab.memory.plan import MemoryPlan, read_plan
from ortlab.options import Effect, Options, check_needs, switches, unmet
from ortlab.recording import Recording
from ortlab.runs import Initialization, Ledger, Run
from ortlab.snapshot import Snapshot
from ortlab.status import Status
from ortlab.wrapping import Takeover, check_wrappable

if TYPE_CHECKING:
    import torch

    from ortlab.messages import Message
    from ortlab.options import Need

ENGINES: Final = ("ort", "eager", "compile")
"""ONNX Runtime, plain PyTorch, `torch.compile`."""

Observer = Callable[[str], None]
"""Called with "options", "status", "runs" or "progress:<text>:<fraction>" after each change."""

_latest: weakref.ref[Lab] | None = None


class Lab:
    """One model under experiment; `ortlab.wrap` makes it.

    Parameters
    ----------
    module
        The model. It keeps its identity: `lab.module is model`, and calling it runs the lab's engine.
    options
        The switches; by default those that the `ORTMODULE_*` environment variables set.
    engine
        "ort", "eager" or "compile".
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
    notes
        What the environment variables meant, one sentence each.

    Raises
    ------
    WrapError
        If the object cannot be wrapped.
    OptionError
        If an option is unknown, wrong, or needs something that is missing here.

    Examples
    --------
    >>> lab = ortlab.wrap(model)
    >>> run = lab.step(train_one_batch, n=20)
    >>> lab.set(memory_level=1).rerun()
    >>> lab.compare()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        options: Options | None = None,
        engine: str = "ort",
        name: str = "model",
        **changes: object,
    ) -> None:
        check_wrappable(module)
        self.notes: tuple[str, ...] = ()
        if options is None:
            options, self.notes = Options.from_environment(os.environ)
            if options.export_cache_dir:  # set for other programs, and no reason not to train in this one
                options = options.replace(export_cache_dir="")
                self.notes += (f"ORTMODULE_CACHE_DIR is ignored: {unmet('export_cache_dir', ())}",)
        options = options.replace(**changes)
        _check_engine(engine)
        self.have: frozenset[Need] = installed_needs()
        check_needs(options, self.have)
        self.module = module
        self.name = name
        self.runs = Ledger()
        self._options = options
        self._observers: list[Observer] = []
        self._experiment: Experiment | None = None
        self._recording: Recording | None = None
        self._takeover = Takeover(module, self._forward)
        self._wrapped = True
        forward = self._takeover.original_forward
        self._ort = OrtEngine(module, forward, options, self._report_progress, self._built)
        self._eager = EagerEngine(forward)
        self._compile = CompileEngine(forward, self._built)
        self._engine: OrtEngine | EagerEngine | CompileEngine = self._choose(engine)
        self._executed_by = ""
        global _latest  # noqa: PLW0603 - a notebook's magics act on the lab that was wrapped last
        _latest = weakref.ref(self)

    # ---- switches ---------------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The present switches; change them with `set`."""
        return self._options

    @property
    def engine(self) -> str:
        """The engine of the next step: "ort", "eager" or "compile"."""
        return self._engine.name

    def set(self, *, engine: str | None = None, **changes: object) -> Lab:
        """Change switches, or the engine; the next call rebuilds what they touch, and only that.

        Parameters
        ----------
        engine
            "ort", "eager" or "compile"; None leaves it.
        **changes
            Options by name, as in `lab.set(memory_level=1)`.

        Returns
        -------
        Lab
            The lab itself.

        Raises
        ------
        OptionError
            If an option or the engine is unknown, has a wrong value, contradicts another, or cannot act here.
            Nothing is changed then.
        StepError
            If a step is running.
        """
        self._check_usable("change options")
        options = self._options.replace(**changes)
        if engine is not None:
            _check_engine(engine)
        check_needs(options, self.have)
        _check_import_time(options, self._options)
        self._options = options
        self._ort.options = options
        if engine is not None:
            self._engine = self._choose(engine)
        self._notify("options")
        self._notify("status")
        return self

    # ---- steps ------------------------------------------------------------------------------------------------

    def step(
        self,
        fn: Callable[[], object],
        n: int = 1,
        *,
        watch: Iterable[object] = (),
        source: str = "",
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
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        Run
            The record, also in `lab.runs`.

        Raises
        ------
        StepError
            If the step does not call the model or, in training mode, calls no `backward()`.
        Exception
            Whatever `fn` raises. The lab is then as it was before the call, weights and optimizer included.
        """
        self._check_usable("run a step")
        return self._run(Experiment.begin(self.module, fn, n, watch, source), progress=progress)

    def rerun(self, n: int | None = None, *, progress: bool = True) -> Run:
        """Go back to the start of the last step call and do it again, with the present options and engine.

        Parameters
        ----------
        n
            How many steps; by default as many as before.
        progress
            Whether to show a progress bar on a terminal.

        Raises
        ------
        StepError
            If no step has run yet.
        Exception
            Whatever the step raises. Weights and optimizer are then as they were before this call.
        """
        self._check_usable("rerun")
        again = self._last_experiment().times(n)
        before = Snapshot(self.module, again.start.stateful)
        try:
            again.start.put_back()
            return self._run(again, progress=progress)
        except BaseException:
            before.put_back()
            raise

    def restore(self) -> Lab:
        """Go back to the start of the last step call: weights, buffers, gradients, optimizers, random state.

        Raises
        ------
        StepError
            If no step has run yet.
        """
        self._check_usable("restore")
        self._last_experiment().start.put_back()
        return self

    def compare(self, *numbers: int, baseline: int | None = None) -> Comparison:
        """Hold runs against a baseline: time with confidence interval, memory, loss.

        Parameters
        ----------
        *numbers
            Numbers of the runs; all of them if none is given.
        baseline
            Number of the run to compare with; by default the first.

        Raises
        ------
        LedgerError
            If a run is not there, or there are fewer than two.
        """
        runs = [self.runs.run(number) for number in numbers] if numbers else list(self.runs)
        return compare(runs, self.runs.run(baseline) if baseline is not None else None)

    # ---- looking ----------------------------------------------------------------------------------------------

    def plan(self) -> MemoryPlan:
        """Read what ORT keeps for backward and which recompute plans it offers.

        Raises
        ------
        BuildError
            If no training graph has been built yet for the present options.
        """
        execution = self._ort.execution
        report = execution.memory_report()
        return read_plan(
            report.savings,
            report.symbols,
            report.insight,
            memory_level=self._options.memory_level,
            enabled=self._options.memory_plan,
        )

    def graph(self, stage: str = "execution") -> Graph:
        """Return one of the ONNX graphs of the present build.

        Parameters
        ----------
        stage
            "exported", "processed", "optimized" (before the gradient), "gradient" or "execution".

        Raises
        ------
        OptionError
            If there is no such stage.
        BuildError
            If nothing has been built yet for the present options.
        """
        if stage not in STAGES:
            raise OptionError(f"There is no graph stage {stage!r}.", fix=f"Stages: {', '.join(STAGES)}.")
        execution = self._ort.execution
        mode = "training" if execution.training else "inference"
        return Graph(stage, mode, execution.serialized_graph(stage))

    @property
    def messages(self) -> tuple[Message, ...]:
        """What torch's exporter, ORTModule and ONNX Runtime said during the present builds."""
        return self._ort.messages

    @property
    def status(self) -> Status:
        """What the lab is doing now."""
        pending = self._engine.pending_stage()
        if not self._wrapped:
            state = "unwrapped"
        elif self._engine.fallback_reason:
            state = "fallback"
        elif not pending:
            state = "ready"
        else:
            state = "rebuild pending" if self._executed_by == self.engine else "not built"
        reason = self._engine.fallback_reason or getattr(self._engine, "rebuild_reason", "")
        return Status(self.engine, state, self._executed_by, reason, pending)

    def observe(self, callback: Observer) -> Callable[[], None]:
        """Call back after each change; returns a function that ends that."""
        self._observers.append(callback)

        def stop() -> None:
            if callback in self._observers:
                self._observers.remove(callback)

        return stop

    def unwrap(self) -> torch.nn.Module:
        """Give the model its own forward back and free ONNX Runtime's sessions; weights stay as trained.

        Returns
        -------
        torch.nn.Module
            The model.
        """
        if self._wrapped:
            self._check_usable("unwrap")
            self._takeover.release()
            self._ort.close()
            self._wrapped = False
            self._notify("status")
        return self.module

    def __repr__(self) -> str:
        """Show the model, the engine, the options that differ from the defaults and the number of runs."""
        return (
            f"Lab({self.name}: {type(self.module).__name__}, engine={self.engine!r}, {self.status.state}, "
            f"{self._options!r}, runs={len(self.runs)})"
        )

    # ---- parts ------------------------------------------------------------------------------------------------

    def _run(self, experiment: Experiment, *, progress: bool) -> Run:
        self._recording = Recording(self.module, self._engine, experiment, self._report_progress)
        try:
            run = self._recording.run(self.runs.next_number, self._options, show=progress)
        except BaseException:
            experiment.start.put_back()
            raise
        finally:
            self._recording = None
            self._report_progress("", 1.0)
        self._experiment = experiment
        self.runs.add(run)
        self._notify("runs")
        self._notify("status")
        return run

    def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        before = self.status if self._observers else None
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

    def _choose(self, engine: str) -> OrtEngine | EagerEngine | CompileEngine:
        engines: dict[str, OrtEngine | EagerEngine | CompileEngine] = {
            "ort": self._ort,
            "eager": self._eager,
            "compile": self._compile,
        }
        return engines[engine]

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
        self._notify(f"progress:{text}:{fraction:.3f}")

    def _notify(self, event: str) -> None:
        for observer in list(self._observers):
            observer(event)


def wrap(
    module: torch.nn.Module,
    *,
    options: Options | None = None,
    engine: str = "ort",
    name: str = "model",
    **changes: object,
) -> Lab:
    """Run a PyTorch model on ONNX Runtime, and make it the subject of a lab.

    The model keeps its identity, its parameters and its `state_dict` keys; only who runs its forward changes. The
    first call exports it and builds the gradient graph.

    Parameters
    ----------
    module
        Any `torch.nn.Module`. Wrap it before DDP or DeepSpeed are put around it.
    options
        The switches; by default those that the `ORTMODULE_*` environment variables set.
    engine
        "ort", "eager" or "compile".
    name
        What tables and errors call the model.
    **changes
        Switches by name, as in `ortlab.wrap(model, memory_level=1)`.

    Raises
    ------
    WrapError
        If the object cannot be wrapped.
    OptionError
        If an option is unknown, wrong, or needs something that is missing here.
    InstallError
        If the installed packages cannot train with ONNX Runtime.
    """
    return Lab(module, options=options, engine=engine, name=name, **changes)


def latest() -> Lab | None:
    """Return the lab that was wrapped last, or None if there is none (any more)."""
    return None if _latest is None else _latest()


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise OptionError(f"There is no engine {engine!r}.", fix=f"Engines: {', '.join(ENGINES)}.")


def _check_import_time(options: Options, before: Options) -> None:
    early = {switch.name: switch.env for switch in switches() if switch.effect is Effect.IMPORT}
    for name in options.changed(before):
        if name in early:
            value = getattr(options, name)
            raise OptionError(
                f"{name} cannot be changed now.",
                why="ONNX Runtime 1.19.2 reads it while it is imported, which has happened.",
                fix=f"Set the environment variable {early[name]}={int(value)} and restart the kernel.",
            )
