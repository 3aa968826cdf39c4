"""What each recompute plan takes off the peak of a step and what it adds to its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ortlab.memory.lifetimes import lifetimes
from ortlab.memory.recompute import with_places

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.memory.plan import MemoryPlan
    from ortlab.memory.recompute_places import RecomputePlaces
    from ortlab.memory.trace import Trace
    from ortlab.runs.experiment import Experiment


@dataclass(frozen=True)
class PlanCost:
    """What one plan does to a step, all its places recomputed."""

    # Off the peak; predicted by simulation. Negative where the peak rises: ORT orders all nodes differently once there
    # is a plan, and what is recomputed needs memory as well.
    peak_saving_bytes: float
    cost_ms: float  # added to the step; predicted as the time of the nodes that run twice
    measured_saving_bytes: float | None = None  # None until it is measured, as is the next
    measured_cost_ms: float | None = None


def predicted_costs(
    plain: Trace, ordered: Trace, places: RecomputePlaces, configs: Iterable[str]
) -> dict[str, PlanCost]:
    """Predict what each of some plans does on its own.

    `plain` is a profiled step without plans, as it runs, and `ordered` the same in the order that ORT gives to sessions
    with plans. Plans of one configuration, with commas between them, are predicted together; those without places are
    left out.
    """
    peak = lifetimes(plain).peak
    found = {}
    for config in configs:
        acting = [place for part in config.split(",") for place in places.of(part)]
        if acting:
            trace = with_places(ordered, acting)
            found[config] = PlanCost(float(peak - lifetimes(trace).peak), trace.recomputed_ms)
    return found


def best_costs(costs: Mapping[str, PlanCost], count: int, *, beyond: float = 0.0) -> dict[str, PlanCost]:
    """Return the `count` plans with the most bytes off the peak for each ms, best first.

    `beyond` is how many bytes any plan takes off, by the order of nodes that comes with it; they are no plan's merit.
    """
    saving = [
        (config, cost.peak_saving_bytes - beyond, cost)
        for config, cost in costs.items()
        if cost.peak_saving_bytes > beyond
    ]
    saving.sort(key=lambda one: -one[1] / max(one[2].cost_ms, 1e-9))
    return {config: cost for config, _, cost in saving[:count]}


@dataclass(frozen=True)
class KnownCosts:
    """Costs of plans, and the graph and step that they were found for."""

    key: object = None  # what `costs_key` gave then
    costs: Mapping[str, PlanCost] = field(default_factory=dict)  # by configuration of the plan
    # What any plan takes off the peak, because ORT orders nodes differently once there is one; predicted.
    by_order_bytes: float = 0.0

    def written_into(self, plan: MemoryPlan, key: object) -> MemoryPlan:
        """Return a plan with these costs if they are of the same graph and step; else the plan as it is."""
        if not self.costs or key != self.key:
            return plan
        rows = tuple(
            replace(row, **vars(self.costs[row.config])) if row.config in self.costs else row
            for row in plan.rows
        )
        return replace(plan, rows=rows, order_saving_bytes=self.by_order_bytes)


def costs_key(execution: Execution, experiment: Experiment | None) -> object:
    """Return what costs depend on: the gradient graph, and the step with its start."""
    step = None if experiment is None else (experiment.step, experiment.start.digest)
    return execution.built.digest, step
