"""The bench: one wrapped model, its engines and its ledger; the one way to run its steps and put everything back."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet, ref

from ortlab.engine.baselines import Baseline, baseline
from ortlab.engine.build_log import step_messages
from ortlab.engine.installation import have as installed_needs
from ortlab.engine.ort import OrtEngine
from ortlab.engine.runtime_log import crashed_processes
from ortlab.errors import OptionError, StepError, WrapError
from ortlab.memory.recompute import KnownCosts
from ortlab.options.configuration import Configuration, check_engine, engine_kind
from ortlab.options.option_files import with_files, with_usable_export_folder
from ortlab.options.options import Options, check_needs, declaration, unmet
from ortlab.options.variables import sources
from ortlab.records.messages import MessageLog
from ortlab.records.runs import EXECUTED_BY_PARTS, Coverage, Initialization, Ledger, Run
from ortlab.records.status import Status
from ortlab.runs.experiment import Snapshot
from ortlab.runs.interrupts import interrupts_kept, protected, say
from ortlab.runs.parts import PartsEngine, find_parts
from ortlab.runs.progress import Progress
from ortlab.runs.recording import Recording
from ortlab.runs.step_memory import Measuring, shares_steps, with_step_memory
from ortlab.runs.wrapping import Takeover, check_wrappable

if TYPE_CHECKING:
    import torch

    from ortlab.analyses.memory import Snapshotting
    from ortlab.lab.lab import Lab
    from ortlab.options.options import Need
    from ortlab.parity.folder_comparison import Subscription
    from ortlab.runs.experiment import Experiment
    from ortlab.runs.parts import Wishes
    from ortlab.runs.recording import LoopRecording
    from ortlab.studies.batch_size import BatchSizeSearch
    from ortlab.studies.bisection import Bisection
    from ortlab.studies.budget import Budget
    from ortlab.studies.budget_problem import SimulatedStep
    from ortlab.studies.sweep import Sweep

NOT_BEGUN: Final = "Stopped before the first step was done; nothing is kept, and the lab is as it was before."

Observer = Callable[[str], None]
"""Called with "options", "status", "runs" or "progress:<text>:<fraction>" after each change."""


_wrapped: list[ref[Bench]] = []
"""The benches of all labs that live and that `ortlab.wrap` has made, in that order."""


def latest() -> Bench | None:
    """Return the bench that was wrapped last and is not unwrapped; if all are, the last one; None if there is none."""
    living = [bench for bench in (reference() for reference in _wrapped) if bench is not None]
    return next((bench for bench in reversed(living) if bench.wrapped), living[-1] if living else None)


def bench_of(module: torch.nn.Module) -> Bench | None:
    """Return the bench that holds a module's forward; None if there is none."""
    benches = (reference() for reference in _wrapped)
    return next((one for one in benches if one and one.wrapped and one.takeover.holds(module)), None)


def _check_options(
    module: torch.nn.Module,
    options: Options,
    have: Collection[Need],
    again: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Raise OptionError for options that cannot act here, or where a model has not what `recompute` names."""
    check_needs(options, have)
    if options.recompute:
        from ortlab.engine.recompute_words import find_regions

        find_regions(module, options.recompute, again=again)


class Bench:
    """One wrapped model, and all that is needed to run its steps; `Lab` is what a user holds of it."""

    # What a lab can do is a function of a bench. It calls `check_usable` first, and does its work inside `as_before`.

    # Whether all was built for the present switches, until a call ran others: what it put aside is made again.
    unchanged = False

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
        check_wrappable(module)
        parts = None if only is None else find_parts(module, only)
        self.from_environment: Mapping[str, str] = {}
        notes: tuple[str, ...] = ()
        self.have: frozenset[Need] = installed_needs()
        if options is None:
            options, notes, idle = _options_of_environment(changes, self.have)
            found = sources(os.environ)
            self.from_environment = {name: found[name] for name in found if name not in {*changes, *idle}}
        self.notes = notes + crashed_processes()
        options = with_files(options.replace(**changes), Options().changed(options) + tuple(changes))
        engine = check_engine(engine)
        _check_options(module, options, self.have)
        # The model keeps its bench, and so its lab, as long as it lives: magics find a lab that has no name.
        self.lab: Lab | None = None
        self.module = module
        self.name = name
        self.runs = Ledger()
        self.options = options
        self.observers: list[Observer] = []
        self.experiment: Experiment | None = None  # the last step
        self.progress = Progress(self._tell_progress)
        # What runs steps just now; None between runs.
        self.recording: Recording | LoopRecording | Measuring | Snapshotting | None = None
        self.takeover = takeover = Takeover(module, self._forward)
        self.wrapped = True
        self.log = MessageLog()
        self.subscriptions: WeakSet[Subscription] = WeakSet()
        self.known_costs = KnownCosts()  # of plans, as last told
        # The last step without plans, as a budget simulates it.
        self.simulated: tuple[Configuration, Experiment, SimulatedStep] | None = None
        self.sweeps: list[Sweep] = []
        self.budgets: list[Budget] = []
        self.bisections: list[Bisection] = []
        self.batch_size_searches: list[BatchSizeSearch] = []
        told = (options, self.progress.stage, self._built, self.log)
        self.ort: OrtEngine | PartsEngine  # for the whole model or for parts of it, whichever engine is set
        try:
            if parts is None:
                self.ort = OrtEngine(module, takeover.run_original, *told, takeover.instance_forward)
            else:
                self.ort = PartsEngine(module, parts, takeover.run_original, *told)
        except BaseException:
            takeover.release()
            raise
        self._baselines: dict[str, Baseline] = {}
        self.executed_by = ""  # who executed the last call
        try:
            self.engine: Any = self.choose(engine)
        except BaseException:
            takeover.release()
            self.ort.close()
            raise

    # ---- engine and switches ------------------------------------------------------------------------------------

    @property
    def configuration(self) -> Configuration:
        """Engine and switches together; `configure` takes them over again."""
        return Configuration(self.engine.name, self.options)

    @protected
    def configure(self, configuration: Configuration, *, unchanged: bool = False) -> None:
        """Take over an engine and switches as a whole; `unchanged` is what `Bench.unchanged` is then."""
        self.check_usable("change options")
        options = configuration.options
        _check_options(self.module, options, self.have, self.ort.called_again)
        self.unchanged = unchanged
        self.engine = self.choose(configuration.engine)
        self.options = self.ort.options = options
        self.notify("options")
        self.notify("status")

    def choose(self, engine: str) -> OrtEngine | PartsEngine | Baseline:
        """Return the engine of a name, and let it run the model."""
        chosen = self.ort if engine == "ort" else self._baselines.get(engine)
        if chosen is None:
            hold = self.takeover
            chosen = baseline(engine, self.module, hold.original_forward, hold.run_original, self._built)
            # The layers of a model are looked for each time: the user may have changed them.
            if engine_kind(engine) != "checkpoint":
                self._baselines[engine] = chosen
        if isinstance(self.ort, PartsEngine):
            # As long as PyTorch runs the model, nothing of ours is in the way of its parts: torch.compile would stop.
            (self.ort.take if engine == "ort" else self.ort.release)()
        return chosen

    def engines(self, part: str | None) -> dict[str, OrtEngine]:
        """Return what builds graphs, by path of the part; the path is empty where the whole model is wrapped."""
        whole = {} if isinstance(self.ort, PartsEngine) else {"": self.ort}
        parts = self.ort.engines if isinstance(self.ort, PartsEngine) else {}
        if part is None:
            return whole or parts
        if part not in parts:
            names = (
                f"Parts: {', '.join(parts)}." if parts else "The model is wrapped as a whole: leave part out."
            )
            raise OptionError(f"There is no wrapped part {part!r}.", fix=names)
        return {part: parts[part]}

    # ---- steps --------------------------------------------------------------------------------------------------

    def run(
        self,
        experiment: Experiment,
        *,
        progress: bool,
        sweep: int = 0,
        memory: bool | Run | None = None,
        before: Snapshot | None = None,
    ) -> Run:
        """Run an experiment and keep the run."""
        # If a step fails or Ctrl-C stops it, `before` is put back, or without it the start of the experiment. With
        # `before`, the run begins by putting that start back. `sweep` is the number of a sweep, 0 for none. `memory`
        # says whether to measure the step memory (None: unless the step draws from an iterator), or is a run of the
        # same configuration that has it.
        self.recording = recording = self.recorder(experiment)
        number = self.runs.next_number
        try:
            if before is not None:
                experiment.start.put_back()
            with self.log.during_run(number), self._listening() as drop:
                # Of ranks that train together, those that were stopped would have a run that the others lack.
                partial = not sweep and not shares_steps()
                run = recording.run(number, self.options, show=progress, partial=partial)
                if recording.interrupt is not None:
                    drop()
        except BaseException as error:
            self.recording = None
            (before or experiment.start).put_back()
            if isinstance(error, KeyboardInterrupt):
                say(error, NOT_BEGUN)
            raise
        try:
            self.recording, self.experiment, run = None, experiment, replace(run, sweep=sweep)
            if recording.interrupt is not None:
                raise recording.interrupt
            run = with_step_memory(self, run, experiment, memory)
        except KeyboardInterrupt as interrupt:
            if recording.interrupt is not None:
                (before or experiment.start).put_back()
                run = replace(run, no_step_memory="Ctrl-C stopped the run.")
                say(interrupt, _stopped(run))
            else:
                run = replace(run, no_step_memory="You interrupted its measurement.")
                say(interrupt, f"Stopped the measurement of step memory; all steps are kept as run {number}.")
            raise
        finally:  # the steps have been made, whatever becomes of the measurement
            self.keep(run)
        return run

    def run_apart(self, experiment: Experiment, recording: Recording | None = None) -> Run:
        """Run an experiment as `recording` does it, and leave the ledger alone."""
        number = self.runs.next_number
        self.recording = recording = recording or self.recorder(experiment)
        try:
            with self.log.during_run(number):
                return recording.run(number, self.options, show=False)
        finally:
            self.recording = None

    def recorder(self, experiment: Experiment) -> Recording:
        """Return what runs an experiment on the present engine and writes it down."""
        return Recording(self.module, self.engine, self.takeover.original_forward, experiment, self.progress)

    def keep(self, run: Run) -> None:
        """Add a run to the ledger."""
        self.runs.add(run)
        self.notify("runs")
        self.notify("status")

    @contextmanager
    def as_before(self, experiment: Experiment, now: Snapshot | None = None) -> Iterator[Snapshot]:
        """Let the block run an experiment, and leave the bench as it is now, however the block ends."""
        # Puts back what `set_as_before` does, and weights, buffers, gradients, random state, and the optimizers that
        # the experiment names. The snapshot is yielded, so that more can be included; `now` is one that there is
        # already.
        before = Snapshot(self.module, experiment.start.stateful) if now is None else now
        # A second Ctrl-C that comes before the start is put back, means the first.
        with interrupts_kept(errors=False), self.set_as_before():
            try:
                yield before
            finally:
                before.put_back()

    @contextmanager
    def set_as_before(self) -> Iterator[None]:
        """Put back engine, switches, last step and who executed it, however the block ends."""
        recording, last, executed_by = self.recording, self.experiment, self.executed_by
        with self.configured_as_before():
            try:
                yield
            finally:
                self.recording, self.experiment, self.executed_by = recording, last, executed_by

    @contextmanager
    def configured_as_before(self) -> Iterator[None]:
        """Put back engine and switches, however the block ends."""
        configuration, unchanged = self.configuration, self.unchanged or not self.engine.pending_stage()
        try:
            yield
        finally:
            if self.configuration != configuration:
                self.configure(configuration, unchanged=unchanged)
            elif isinstance(self.ort, PartsEngine):
                self.choose(configuration.engine)  # parts may have been given back, and not been taken again
            self.unchanged = unchanged
            self.notify("status")

    def last_experiment(self) -> Experiment:
        """Return the last step; raise StepError if there is none."""
        if self.experiment is None:
            raise StepError(
                "There is no step to go back to.",
                why="No step has run to its end in this lab yet.",
                fix="Run one: %%ort_step -n 20, or lab.step(fn, n=20).",
            )
        return self.experiment

    def check_usable(self, what: str) -> None:
        """Refuse what cannot be done while a step runs, or once the model is unwrapped."""
        if not self.wrapped:
            raise WrapError(
                f"This lab cannot {what}: its model is unwrapped.",
                fix="Wrap it again: lab = ortlab.wrap(model).",
            )
        if self.recording is not None:
            raise StepError(
                f"The lab cannot {what} while a step is running.", fix="Do it before the step or after it."
            )

    # ---- what is told -------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """What the bench is doing now."""
        engine = self.engine
        pending = engine.pending_stage()
        if not self.wrapped:
            state = "unwrapped"
        elif engine.fallback_reason:
            state = "fallback"
        elif not pending or self.unchanged:
            state = "ready"
        else:
            # What ran last may be another engine's, of a rerun, while a build of this one is there.
            built = getattr(engine, "built_options", None) is not None
            ran = built or self.executed_by in (engine.name, EXECUTED_BY_PARTS)
            state = "rebuild pending" if ran else "not built"
        reason = engine.fallback_reason or getattr(engine, "rebuild_reason", "")
        coverage = engine.coverage if self.wrapped else Coverage()
        detail = getattr(engine, "detail", "")
        can_repeat = self.experiment is not None
        return Status(engine.name, state, self.executed_by, reason, pending, coverage, detail, can_repeat)

    def notify(self, event: str) -> None:
        """Tell all observers."""
        for observer in list(self.observers):
            observer(event)

    def _tell_progress(self, text: str, fraction: float) -> None:
        self.notify(f"progress:{text}:{fraction:.3f}")

    def _built(self, done: Initialization) -> None:
        if self.recording is not None:
            self.recording.built(done)

    def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # What a measurement switches is not what the user has switched.
        told = self.observers and not isinstance(self.recording, Measuring)
        before = self.status if told else None
        try:
            if self.recording is None:
                outputs = self.engine.forward(args, kwargs)
            else:
                outputs = self.recording.forward(args, kwargs)
        finally:
            self.executed_by = self.engine.executed_by
            if before is not None and self.status != before:
                self.notify("status")
        return outputs

    @contextmanager
    def _listening(self) -> Iterator[Callable[[], None]]:
        """Send what ONNX Runtime says when a step goes wrong to the messages, not to the user's output."""
        if self.engine.name != "ort":
            yield lambda: None
            return
        with step_messages(self.log) as drop:
            yield drop

    def note_wrapped(self) -> None:
        """Let `latest` find this bench, as long as it lives."""
        _wrapped.append(ref(self, _wrapped.remove))

    def unwrap(self, *, forget: bool) -> None:
        """Give the model its own forward back, and free sessions; see `Lab.unwrap`."""
        if self.wrapped:
            self.check_usable("unwrap")
            self.takeover.release()
            self.ort.close(forget=forget)
            self.wrapped = False
            self.notify("status")


def _options_of_environment(
    changes: Mapping[str, object], have: frozenset[Need]
) -> tuple[Options, tuple[str, ...], tuple[str, ...]]:
    """Read the switches that environment variables set, what the user is told of them, and which do nothing here."""
    # A variable of a GPU's job stays set where the same script runs on a CPU: it is passed over, and that is said.
    options, notes = Options.from_environment(os.environ)
    if options.export_cache_dir and "export_cache_dir" not in changes:
        options, note = with_usable_export_folder(options)
        notes += (note,)
    plain = Options()
    idle = {name: unmet(name, have) for name in options.changed(plain) if getattr(options, name)}
    idle = {name: why for name, why in idle.items() if why and not declaration(name).broken}
    variables = sources(os.environ)
    notes += tuple(f"{variables.get(name, name)} does nothing here: {why}" for name, why in idle.items())
    return options.replace(**{name: getattr(plain, name) for name in idle}), notes, tuple(idle)


def _stopped(run: Run) -> str:
    """Say in one line what Ctrl-C left of a run."""
    kept = f"kept as run {run.number}" + (" (partial)" if run.is_partial else "")
    return (
        f"Stopped after {len(run.steps):,} of {run.planned_steps:,} steps; {kept}. "
        "The lab is as it was before; rerun with %ort_rerun, or lab.rerun()."
    )
