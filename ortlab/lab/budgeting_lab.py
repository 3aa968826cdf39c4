"""What a lab does for a budget: profile and measure a step, choose plans, run and time them, and leave them on."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import OptionError
from ortlab.records.verdicts import interval
from ortlab.runs.experiment import Experiment
from ortlab.runs.interrupts import interrupts_kept, say
from ortlab.runs.measure import synchronizer
from ortlab.runs.snapshot import Snapshot
from ortlab.studies.budget import MET, Budget, Compared, Prediction, Timing
from ortlab.studies.budget_request import Request, read_request

if TYPE_CHECKING:
    import torch

    from ortlab.engine.ort import OrtEngine
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.memory.plan import MemoryPlan
    from ortlab.memory.trace import Trace
    from ortlab.options.configuration import Configuration
    from ortlab.options.options import Need
    from ortlab.runs.progress import Progress
    from ortlab.studies.budget_planning import Ground
    from ortlab.studies.budget_simulation import SimulatedStep
    from ortlab.studies.engine_comparison import EngineComparison

_STAGES: Final = 10
"""Parts of the work that are told: profile, simulate, measure, choose, the trials with choices between, time, curve."""

_STEPS: Final = 2
"""Steps that each measurement of memory is the highest of."""

_TIMED_STEPS: Final = 4
"""Steps of each turn that are timed; there are two turns of either side."""

_UNTIMED_STEPS: Final = 2
"""Steps before them in each turn: the first builds, and finds the heap as the other side has left it."""


class BudgetingLab(ABC):
    """The base of `Lab` that chooses plans for a budget; the abstract parts are the lab's."""

    module: torch.nn.Module
    name: str
    have: frozenset[Need]
    _progress: Progress

    def __init__(self) -> None:
        super().__init__()
        self.budgets: list[Budget] = []
        self._known: tuple[Configuration, Experiment, SimulatedStep] | None = None

    @interrupts_kept()
    def budget(
        self,
        limit: str | int | None = None,
        *,
        device: str | int | None = None,
        apply: bool = True,
        verify: bool = True,
        timed: bool = True,
        curve: bool = True,
        candidates: EngineComparison | None = None,
        progress: bool = True,
    ) -> Budget:
        """Switch on the recompute plans that cost least time within an amount of step memory.

        Step memory is what a step needs above its start. The last step is profiled and measured without plans; from
        that is predicted what plans save and cost. The chosen plans are run from the step's start, measured, and
        timed in turns with none. If they miss, plans that save more are run, and at last the lowest that plans are
        predicted to reach, the largest savings ticked by hand, and the memory levels.

        Parameters
        ----------
        limit
            What a step may need: a share of what it needs without plans, "70%"; so much less, "-30%"; or an amount,
            "400 MiB" or bytes.
        device
            Instead: what the whole process (on a CPU) or torch's allocator (on CUDA) may hold, "6 GiB". What it holds
            at the start of a step is taken off.
        apply
            Whether the lab keeps the plans switched on where they were measured to meet the budget, on ONNX Runtime.
            Otherwise, and whenever something fails, options and engine are afterwards as before; weights, optimizer,
            random state and ledger always are.
        verify
            Whether to run the plans. Without, all but the step without plans is predicted, and nothing is applied.
        timed
            Whether to time some twenty steps in turns, with and without the plans. Else time is predicted only.
        curve
            Whether to predict other budgets as well.
        candidates
            What `compare_engines` has measured of the same step, to be shown beside the plans.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        Budget
            The record, also in `lab.budgets`. If nothing fits, it holds the plans that come closest, and why.

        Raises
        ------
        OptionError
            If the budget has no unit, is no share from 0 to 100 %, or both a limit and a device; if a device holds
            more before a step than it may hold, or several parts of the model are wrapped.
        StepError
            If no step has run yet, a step is running, or memory cannot be told on this system.
        KeyboardInterrupt
            If the user interrupts; the lab is then as it was before.
        Exception
            Whatever the step raises.

        Examples
        --------
        >>> lab.budget("70%")
        >>> lab.budget("400 MiB", apply=False).switches
        {'memory_plan': ['Gelu+:1:-1']}
        """
        request = read_request(limit, device)
        self._check_usable("choose plans for a budget")
        experiment = self._last_experiment()
        engine = self._engine_to_plan()
        configuration = kept = self._configuration
        plain = configuration.changed({"engine": "ort", "memory_plan": [], "memory_level": 0}, self.have)
        try:
            with self._progress.task(_STAGES, show=progress) as bar:
                done = itertools.count(0)

                def tell(what: str) -> None:
                    bar.begin(what, next(done))

                self._configure(plain)
                found = self._answered(request, plain, experiment, engine, tell, verify=verify, curve=curve)
                found = self._with_times(found, plain, experiment, tell, timed=timed)
            found = replace(found, compared=_compared(candidates), before=_differing(configuration, plain))
            if apply and found.outcome == MET:
                kept = plain.changed(found.switches, self.have)
                found = replace(found, applied=True)
        except KeyboardInterrupt as interrupt:
            say(
                interrupt,
                "Stopped the budget; no plans are chosen, and the lab is as it was before. "
                "Ask again: what is known of the step is kept.",
            )
            raise
        finally:  # profiles and measurements have put back what they trained, each by itself
            self._configure(kept)
        self.budgets.append(found)
        return found

    def _answered(
        self,
        request: Request,
        plain: Configuration,
        experiment: Experiment,
        engine: OrtEngine,
        tell: Callable[[str], None],
        *,
        verify: bool,
        curve: bool,
    ) -> Budget:
        from ortlab.studies.budget_planning import answer

        ground = self._ground(plain, experiment, engine, tell)
        if request.device_bytes is not None:
            _check_room(request.device_bytes, ground.held_bytes, ground.device)

        def run(prediction: Prediction) -> int:
            return self.memory(n=_STEPS, **prediction.switches).rise_bytes

        return answer(ground, request, run if verify else None, tell, curve=curve)

    def _with_times(
        self,
        found: Budget,
        plain: Configuration,
        experiment: Experiment,
        tell: Callable[[str], None],
        *,
        timed: bool,
    ) -> Budget:
        """Add how long a step takes without the plans, and with them where they were run."""
        if found.best is not None and timed:
            tell("Timing steps with and without the plans")
            changed = plain.changed(found.switches, self.have)
            found = replace(found, timing=self._timed(plain, changed, experiment))
            step_ms = median(found.timing.without_ms) if found.timing else None
        elif found.answer.plans or found.answer.memory_level:
            step_ms = median(self._times(plain, experiment, _TIMED_STEPS))
        else:
            return found
        return replace(found, without=replace(found.without, step_ms=step_ms))

    def _ground(
        self, plain: Configuration, experiment: Experiment, engine: OrtEngine, tell: Callable[[str], None]
    ) -> Ground:
        """Profile the step without plans, once for each step call and configuration, and measure it each time.

        What else has come into the process since, such as matplotlib, is in every later measurement.
        """
        from ortlab.memory.lifetimes import lifetimes
        from ortlab.studies.budget_planning import Ground
        from ortlab.studies.budget_search import choose
        from ortlab.studies.budget_simulation import SimulatedStep

        if self._known is None or self._known[0] != plain or self._known[1] is not experiment:
            tell("Profiling a step")
            trace = self.profile(memory_efficient_order=True, progress=False)
            usual = lifetimes(self.profile(1, progress=False)).peak
            tell("Simulating plans")
            places = engine.execution.recompute_places()
            step = SimulatedStep(trace, places, usual, _together(self.plan()))
            choose(step, 0.0)  # the solver's libraries are in the process before that is measured
            self._known = (plain, experiment, step)
        tell("Measuring a step without plans")
        copy_bytes = Snapshot(self.module, experiment.start.stateful).number_of_bytes
        measured = self.memory(n=_STEPS)
        peaks = {phase.phase: phase.peak_bytes - measured.start_bytes for phase in measured.step.phases}
        beyond = peaks.pop("optimizer", 0)
        return Ground(
            model=self.name,
            step=self._known[2],
            without=Compared("without plans", measured.rise_bytes),
            within_bytes=max(peaks.values(), default=0),
            beyond_bytes=beyond,
            kind=measured.label,
            device=measured.device,
            # While it measures, the lab has a copy of weights and optimizer state to go back to.
            held_bytes=max(0, measured.start_bytes - copy_bytes),
        )

    def _timed(self, plain: Configuration, changed: Configuration, experiment: Experiment) -> Timing:
        """Time steps in turns: without plans, with them for twice as long, and without again."""
        before = self._times(plain, experiment, _TIMED_STEPS)
        with_plans = self._times(changed, experiment, 2 * _TIMED_STEPS)
        without = (*before, *self._times(plain, experiment, _TIMED_STEPS))
        low, high = interval(with_plans, without)
        return Timing(without, with_plans, low, high)

    def _times(self, configuration: Configuration, experiment: Experiment, count: int) -> tuple[float, ...]:
        """Return the times of some steps in ms, after those of the same turn that do not count."""
        device = next((tensor.device for tensor in self.module.parameters()), None)
        synchronize = None if device is None else synchronizer(device)
        times = array("d")  # no list: those that a step names have their content back afterwards

        def step() -> object:
            start = time.perf_counter()
            result = experiment.step()
            if synchronize is not None:
                synchronize()
            times.append(1000 * (time.perf_counter() - start))
            return result

        present, before = self._configuration, Snapshot(self.module, experiment.start.stateful)
        try:
            self._configure(configuration)
            self._repeat(
                Experiment(step, count, experiment.start), _UNTIMED_STEPS + count, "Timing", progress=False
            )
        finally:
            before.put_back()
            self._configure(present)
        return tuple(times[_UNTIMED_STEPS:])

    def _engine_to_plan(self) -> OrtEngine:
        engines = self._engines(None)
        if len(engines) > 1:
            raise OptionError(
                "A budget is for a model that is wrapped as a whole, or for one part of it.",
                why=f"Several parts are wrapped: {', '.join(engines)}.",
                fix="Wrap one part: lab.unwrap(), then ortlab.wrap(model, only=[...]).",
            )
        return next(iter(engines.values()))

    @property
    @abstractmethod
    def _configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def _configure(self, configuration: Configuration) -> object:
        """Take over engine and switches as a whole."""

    @abstractmethod
    def profile(
        self,
        n: int = 3,
        *,
        part: str | None = None,
        memory_efficient_order: bool = False,
        progress: bool = True,
    ) -> Trace:
        """Run the last step again while ORT's profiler watches."""

    @abstractmethod
    def memory(
        self,
        fn: Callable[[], object] | None = None,
        *,
        n: int = 2,
        watch: Iterable[object] = (),
        **changes: object,
    ) -> MemoryMeasurement:
        """Measure what a step needs."""

    @abstractmethod
    def plan(self, part: str | None = None) -> MemoryPlan:
        """Read the plans."""

    @abstractmethod
    def _repeat(self, experiment: Experiment, count: int, what: str, *, progress: bool) -> None: ...

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...

    @abstractmethod
    def _engines(self, part: str | None) -> dict[str, OrtEngine]: ...

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...


def _check_room(asked_bytes: int, held_bytes: int, device: str) -> None:
    if asked_bytes > held_bytes:
        return
    what = "This process, with Python, libraries and weights," if device == "cpu" else f"Torch on {device}"
    raise OptionError(
        f"The device budget of {asked_bytes:,} bytes leaves a step nothing.",
        why=f"{what} holds {held_bytes:,} bytes at the start of a step.",
        fix='Give more, or ask for step memory, which leaves the rest aside: lab.budget("70%").',
    )


def _together(plan: MemoryPlan) -> list[str]:
    """Return the plans that ORT offers only together, without their counts."""
    return [
        ",".join(part.rsplit(":", 1)[0] for part in row.config.split(","))
        for row in plan.rows
        if "," in row.config
    ]


def _differing(before: Configuration, plain: Configuration) -> dict[str, Any]:
    """Return the engine and the plans that a lab has, where it is not ONNX Runtime without any."""
    found: dict[str, Any] = {} if before.engine == plain.engine else {"engine": before.engine}
    if before.options.memory_plan:
        found["memory_plan"] = list(before.options.memory_plan)
    if before.options.memory_level:
        found["memory_level"] = before.options.memory_level
    return found


def _compared(candidates: EngineComparison | None) -> tuple[Compared, ...]:
    """Take over what candidates needed, where both their memory and their time were measured."""
    return tuple(
        Compared(candidate.name, int(candidate.rise_bytes), candidate.point.step_ms)
        for candidate in candidates or ()
        if candidate.rise_bytes > 0 and candidate.outcome is not None
    )
