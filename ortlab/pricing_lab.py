"""What a lab does to tell what recompute plans cost: profile a step, predict, and run plans against none in turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.memory.lifetimes import lifetimes
from ortlab.memory.plan_costs import KnownCosts, PlanCost, best_costs, costs_key, predicted_costs

if TYPE_CHECKING:
    from ortlab.configuration import Configuration
    from ortlab.engine.ort import OrtEngine
    from ortlab.experiment import Experiment
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.memory.plan import MemoryPlan
    from ortlab.memory.recompute_places import RecomputePlaces
    from ortlab.memory.trace import Trace
    from ortlab.options import Need
    from ortlab.runs import Run
    from ortlab.sweeps.sweep import Sweep

_LEAST_STEPS: Final = 3
"""Steps of a run that is timed: the first one is not counted."""


class PricingLab(ABC):
    """The base of `Lab` that prices plans; the abstract parts are the lab's."""

    have: frozenset[Need]

    def __init__(self) -> None:
        super().__init__()
        self._known_costs = KnownCosts()

    def plan_costs(self, measure: int = 0, *, rounds: int = 3, progress: bool = True) -> MemoryPlan:
        """Tell what each recompute plan takes off the peak of the last step, and what it costs.

        The step is profiled without plans; the effect of each plan on it is simulated. From then on `plan` and the
        panel show these columns for this step.

        Parameters
        ----------
        measure
            How many plans to run as well: those with the most bytes off the peak for each ms. They are run in turns
            with none, as a sweep in `lab.sweeps`, and its memory is measured by `measure_memory`.
        rounds
            Runs of each of them.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        MemoryPlan
            The plans with their costs. Afterwards, also after a failure, the lab is as it was before.

        Raises
        ------
        OptionError
            If the engine is not "ort", or several parts of the model are wrapped.
        StepError
            If no step has run yet, or one is running.
        Exception
            Whatever the step raises.

        Examples
        --------
        >>> lab.plan_costs().table()
        >>> lab.plan_costs(measure=3)
        """
        self._check_usable("price plans")
        configuration, experiment = self.configuration, self._last_experiment()
        if configuration.engine != "ort":
            raise OptionError(
                f"Engine {configuration.engine!r} has no recompute plans.", fix='Set engine="ort" first.'
            )
        plain = configuration.changed({"memory_plan": [], "memory_level": 0}, self.have)
        try:
            self.configure(plain)
            step = self.profile(progress=progress)
            ordered = self.profile(memory_efficient_order=True, progress=progress)
            engine = self._engine_of(None, "plans")
            places = engine.execution.recompute_places()
            plan = self.plan()
            by_order = float(lifetimes(step).peak - lifetimes(ordered).peak)
            costs = predicted_costs(step, ordered, places, [row.config for row in plan.rows])
            if measure:
                best = best_costs(costs, measure, beyond=by_order)
                costs |= self._measured(best, experiment, rounds, progress=progress)
            self._known_costs = KnownCosts(costs_key(engine, experiment), costs, by_order)
            return self._known_costs.written_into(plan, self._known_costs.key)
        finally:
            self.configure(configuration)

    def recompute_places(self, part: str | None = None) -> RecomputePlaces:
        """Return every place where a plan recomputes, as ORT tells it for the present graph.

        Parameters
        ----------
        part
            Path of a wrapped part of the model; it has to be given where several parts are wrapped.

        Raises
        ------
        OptionError
            If there is no such part, or there are several.
        BuildError
            If nothing has been built yet for the present options.
        """
        return self._engine_of(part, "plans").execution.recompute_places()

    def _measured(
        self, costs: Mapping[str, PlanCost], experiment: Experiment, rounds: int, *, progress: bool
    ) -> dict[str, PlanCost]:
        plans = [config.split(",") for config in costs]
        before = self.measure_memory(memory_plan=[])
        savings = [before.peak_bytes - self.measure_memory(memory_plan=plan).peak_bytes for plan in plans]
        sweep = self.sweep(
            [{"memory_plan": plan} for plan in plans],
            n=max(experiment.count, _LEAST_STEPS),
            rounds=rounds,
            progress=progress,
        )
        baseline = sweep.baseline.runs
        measured = {}
        points = {
            point.configuration.options.memory_plan: point for point in sweep.points if point.configuration
        }
        for (config, cost), saving, plan in zip(costs.items(), savings, plans, strict=True):
            runs = points[tuple(plan)].runs
            added = [_step_ms(run) - _step_ms(other) for run, other in zip(runs, baseline, strict=False)]
            measured[config] = replace(
                cost, measured_saving_bytes=float(saving), measured_cost_ms=median(added) if added else None
            )
        return measured

    @property
    @abstractmethod
    def configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def configure(self, configuration: Configuration) -> object:
        """Take over engine and switches as a whole."""

    @abstractmethod
    def plan(self, part: str | None = None) -> MemoryPlan:
        """Read the plans."""

    @abstractmethod
    def profile(self, *, memory_efficient_order: bool = False, progress: bool = True) -> Trace:
        """Profile the last step."""

    @abstractmethod
    def measure_memory(
        self,
        fn: Callable[[], object] | None = None,
        *,
        steps: int = 2,
        watch: Iterable[object] = (),
        **changes: object,
    ) -> MemoryMeasurement:
        """Measure the last step's memory."""

    @abstractmethod
    def sweep(self, grid: object, *, n: int | None, rounds: int, progress: bool) -> Sweep:
        """Run configurations in turns."""

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...

    @abstractmethod
    def _engine_of(self, part: str | None, has: str) -> OrtEngine: ...


def _step_ms(run: Run) -> float:
    """Return the middle time of a run's steps without the first one, in ms."""
    times = [step.total_ms for step in run.steps]
    return median(times[1:] or times)
