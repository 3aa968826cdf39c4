"""The recompute plans that ORT offers for the present graph, and what each of them costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Final

from ortlab.analyses.builds import builds, engine_of
from ortlab.analyses.memory import memory
from ortlab.analyses.profiling import profile
from ortlab.errors import OptionError
from ortlab.memory.plan import merged
from ortlab.memory.plan_reading import with_measured_density
from ortlab.memory.recompute import KnownCosts, PlanCost, best_costs, costs_key, predicted_costs
from ortlab.memory.trace import lifetimes
from ortlab.options.configuration import NOTHING_RECOMPUTED
from ortlab.options.options import setting_words
from ortlab.studies.sweep_run import sweep

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.memory.plan import MemoryPlan
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment

_LEAST_STEPS: Final = 3
"""Steps of a run that is timed: the first one is not counted."""


def plan(
    bench: Bench,
    part: str | None = None,
    *,
    level: int | None = None,
    costs: bool = False,
    measure: int = 0,
    rounds: int = 3,
    progress: bool = True,
) -> MemoryPlan:
    """Read what ORT keeps for backward and which recompute plans it offers; with `costs`, what each of them costs.

    Parameters
    ----------
    part
        Path of a wrapped part of the model; None for the whole model, or for all its parts together.
    level
        A memory level, 0 to 2: what it would recompute, without setting it.
    costs
        Whether to profile the last step without plans, and to simulate what each plan takes off its peak and adds
        to its time. From then on `plan` and the panel show these columns for this step.
    measure
        With costs: how many plans to run as well, those with the most bytes off the peak for each ms, in turns with
        none, as a sweep in `lab.sweeps`; the memory of each is measured.
    rounds
        Runs of each plan that is measured.
    progress
        Whether to show a progress bar on a terminal.

    Raises
    ------
    OptionError
        If there is no such part or level; with costs, if the engine is not "ort" or several parts are wrapped.
    BuildError
        If no step has run in this lab yet, or ONNX Runtime cannot build the training graph.
    """
    if costs or measure:
        if part is not None or level is not None:
            raise OptionError(
                "Costs are of all the plans of a model.",
                fix="Leave part and level out: lab.plan(costs=True).",
            )
        return _plan_costs(bench, measure, rounds=rounds, progress=progress)
    if level is not None:
        level = bench.options.replace(memory_plan=(), memory_level=level).memory_level
    with builds(bench, part) as found:
        plans = {path: _plan(bench, one, path, level) for path, one in found.executions.items()}
        again = any(one.repeats_forward for one in found.executions.values())
    single = len(plans) == 1 and not found.missing
    read = next(iter(plans.values())) if single else merged(plans, missing=found.missing)
    return replace(read, note=" ".join(filter(None, (found.note, _beside(bench, again)))))


def _beside(bench: Bench, again: bool) -> str:  # noqa: FBT001 - what it asks
    """Say what the switch `recompute` does, which is no plan of ORT's; empty where it is off."""
    if not again:
        return ""
    return (
        f"{setting_words('recompute', bench.options.recompute)} is on. ORT's plans are for what is kept beside it; "
        "where they would repeat a node that it repeats, they are not applied."
    )


def _plan(bench: Bench, execution: Execution, path: str, level: int | None) -> MemoryPlan:
    from ortlab.engine.recompute_plans import plans_of

    read = with_measured_density(plans_of(execution, bench.module, path, level=level), bench.runs)
    return bench.known_costs.written_into(read, costs_key(execution, bench.experiment))


def _plan_costs(bench: Bench, measure: int, *, rounds: int, progress: bool) -> MemoryPlan:
    """Profile the last step, predict what each plan takes off its peak and adds to its time, and run the best."""
    bench.check_usable("price plans")
    experiment = bench.last_experiment()
    plain = bench.configuration.changed({"engine": "ort", **NOTHING_RECOMPUTED}, bench.have)
    with bench.set_as_before():
        bench.configure(plain)
        step = profile(bench, progress=progress)
        ordered = profile(bench, memory_efficient_order=True, progress=progress)
        engine_of(bench, None, "plans")
        with builds(bench) as found:
            execution = found.only[1]
            places, key = execution.recompute_places(), costs_key(execution, experiment)
        offered = plan(bench)
        by_order = float(lifetimes(step).peak - lifetimes(ordered).peak)
        costs = predicted_costs(step, ordered, places, [row.config for row in offered.rows])
        if measure:
            best = best_costs(costs, measure, beyond=by_order)
            costs |= _measured(bench, best, experiment, rounds, progress=progress)
        bench.known_costs = KnownCosts(key, costs, by_order)
        return bench.known_costs.written_into(offered, bench.known_costs.key)


def _measured(
    bench: Bench, costs: Mapping[str, PlanCost], experiment: Experiment, rounds: int, *, progress: bool
) -> dict[str, PlanCost]:
    """Measure the memory of plans, and run them in turns with none."""
    plans = [config.split(",") for config in costs]
    before = memory(bench, memory_plan=[])
    savings = [before.peak_bytes - memory(bench, memory_plan=one).peak_bytes for one in plans]
    made = sweep(
        bench,
        [{"memory_plan": one} for one in plans],
        n=max(experiment.count, _LEAST_STEPS),
        rounds=rounds,
        progress=progress,
    )
    baseline = made.baseline.runs
    points = {point.configuration.options.memory_plan: point for point in made.points if point.configuration}
    measured = {}
    for (config, cost), saving, one in zip(costs.items(), savings, plans, strict=True):
        runs = points[tuple(one)].runs
        added = [_step_ms(run) - _step_ms(other) for run, other in zip(runs, baseline, strict=False)]
        measured[config] = replace(
            cost, measured_saving_bytes=float(saving), measured_cost_ms=median(added) if added else None
        )
    return measured


def _step_ms(run: Run) -> float:
    """Return the middle time of a run's steps without the first one, in ms."""
    times = [step.total_ms for step in run.steps]
    return median(times[1:] or times)
