"""What a lab does to tell what recompute plans cost: profile a step, predict, and run plans against none in turns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Final

from ortlab.lab.remembered_graph import RememberedGraph
from ortlab.memory.lifetimes import lifetimes
from ortlab.memory.plan_costs import KnownCosts, PlanCost, best_costs, costs_key, predicted_costs

if TYPE_CHECKING:
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.memory.plan import MemoryPlan
    from ortlab.memory.trace import Trace
    from ortlab.options.options import Need
    from ortlab.records.runs import Run
    from ortlab.runs.experiment import Experiment
    from ortlab.studies.sweep import Sweep

_LEAST_STEPS: Final = 3
"""Steps of a run that is timed: the first one is not counted."""


class PricingLab(RememberedGraph):
    """The base of `Lab` that prices plans; the abstract parts are the lab's."""

    have: frozenset[Need]

    def __init__(self) -> None:
        super().__init__()
        self._known_costs = KnownCosts()

    def _plan_costs(self, measure: int = 0, *, rounds: int = 3, progress: bool = True) -> MemoryPlan:
        """Tell what each recompute plan takes off the peak of the last step, and what it costs; see `Lab.plan`."""
        self._check_usable("price plans")
        configuration, experiment = self._configuration, self._last_experiment()
        plain = configuration.changed({"engine": "ort", "memory_plan": [], "memory_level": 0}, self.have)
        try:
            self._configure(plain)
            step = self.profile(progress=progress)
            ordered = self.profile(memory_efficient_order=True, progress=progress)
            self._engine_of(None, "plans")
            with self._graphs() as found:
                execution = found.only[1]
                places, key = execution.recompute_places(), costs_key(execution, experiment)
            plan = self.plan()
            by_order = float(lifetimes(step).peak - lifetimes(ordered).peak)
            costs = predicted_costs(step, ordered, places, [row.config for row in plan.rows])
            if measure:
                best = best_costs(costs, measure, beyond=by_order)
                costs |= self._measured(best, experiment, rounds, progress=progress)
            self._known_costs = KnownCosts(key, costs, by_order)
            return self._known_costs.written_into(plan, self._known_costs.key)
        finally:
            self._configure(configuration)

    def _measured(
        self, costs: Mapping[str, PlanCost], experiment: Experiment, rounds: int, *, progress: bool
    ) -> dict[str, PlanCost]:
        plans = [config.split(",") for config in costs]
        before = self.memory(memory_plan=[])
        savings = [before.peak_bytes - self.memory(memory_plan=plan).peak_bytes for plan in plans]
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

    @abstractmethod
    def plan(self, part: str | None = None) -> MemoryPlan:
        """Read the plans."""

    @abstractmethod
    def profile(self, *, memory_efficient_order: bool = False, progress: bool = True) -> Trace:
        """Profile the last step."""

    @abstractmethod
    def memory(
        self,
        fn: Callable[[], object] | None = None,
        *,
        n: int = 2,
        watch: Iterable[object] = (),
        **changes: object,
    ) -> MemoryMeasurement:
        """Measure the last step's memory."""

    @abstractmethod
    def sweep(self, grid: object, *, n: int | None, rounds: int, progress: bool) -> Sweep:
        """Run configurations in turns."""


def _step_ms(run: Run) -> float:
    """Return the middle time of a run's steps without the first one, in ms."""
    times = [step.total_ms for step in run.steps]
    return median(times[1:] or times)
