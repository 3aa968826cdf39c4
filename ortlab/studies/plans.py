"""The recompute plans that ORT offers for the present graph, and what each of them costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ortlab.analyses.builds import builds, engine_of
from ortlab.analyses.memory import memory
from ortlab.analyses.profiling import profile
from ortlab.errors import OptionError
from ortlab.memory.layer_planner import LayerPlanner
from ortlab.memory.plan import merged
from ortlab.memory.plan_reading import with_measured_density
from ortlab.memory.recompute import (
    KnownCosts,
    PlanCost,
    best_costs,
    costs_key,
    predicted_costs,
    predicted_savings,
)
from ortlab.memory.trace import lifetimes
from ortlab.options.configuration import NOTHING_RECOMPUTED
from ortlab.options.options import setting_words
from ortlab.options.switches import ALL_BUT_MATMULS
from ortlab.studies.sweep_run import sweep

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.memory.plan import MemoryPlan, PlanRow
    from ortlab.memory.trace import Trace
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment

WORDS: Final = (("layers",), ("layers:1/2",), ("layers but linear",), (ALL_BUT_MATMULS,))
"""Values of the switch `recompute` that stand in each plan."""

_FRONT: Final = 6
"""So many sets of layers of the planner stand in a plan with costs."""

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
    """Read which recompute plans ORT offers, and what ortlab can recompute itself; with `costs`, what each costs.

    Parameters
    ----------
    part
        Path of a wrapped part of the model; None for the whole model, or for all its parts together.
    level
        A memory level, 0 to 2: what it would recompute, without setting it.
    costs
        Whether to profile the last step without plans, and to simulate what each plan takes off its peak and adds
        to its time. From then on `plan` and the panel show these columns for this step, and among what ortlab
        recomputes the sets of layers of which none needs less memory and costs no more.
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
    from ortlab.engine.recompute_words import recomputed_rows

    read = plans_of(execution, bench.module, path, level=level)
    rows = recomputed_rows(execution, path, (*WORDS, *filter(None, (bench.options.recompute,))))
    read = with_measured_density(replace(read, recomputed=tuple(rows)), bench.runs)
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
        recomputed = _recomputed(execution, step, ordered)
        costs |= {row.config: cost for row, cost in recomputed.items()}
        if measure:
            changes = {row.config: row.switches for row in (*offered.rows, *recomputed)}
            best = best_costs(costs, measure, beyond=by_order)
            costs |= _measured(bench, best, changes, experiment, rounds, progress=progress)
        open_rows = [row.config for row in offered.rows if row.saving_bytes is None]
        savings = predicted_savings(places, open_rows, ordered.sizes)
        bench.known_costs = KnownCosts(key, costs, by_order, tuple(recomputed), savings)
    if bench.options.memory_plan and not bench.options.recompute:
        return plan(bench)  # which says what is on
    priced = bench.known_costs.written_into(offered, bench.known_costs.key)
    on = bench.options.recompute
    rows = (replace(row, enabled=tuple(row.switches["recompute"]) == on) for row in priced.recomputed)
    return replace(priced, recomputed=tuple(rows))


def _recomputed(execution: Execution, step: Trace, ordered: Trace) -> dict[PlanRow, PlanCost]:
    """Return values of `recompute`, those of the planner of layers among them, with what they are predicted to cost."""
    # `step` is a profiled step in which nothing is recomputed, and `ordered` the same in the order of one that does.
    from ortlab.engine.recompute_words import made_again, recomputed_rows

    planner = LayerPlanner(ordered, made_again(execution.built, execution.module, execution.user_inputs))
    front = [one.words for one in planner.front() if one.ranges]
    some = {front[round(place)]: None for place in np.linspace(0, len(front) - 1, _FRONT) if front}
    plain, kept, found = lifetimes(step), _kept_bytes(ordered), {}
    for row, values in recomputed_rows(execution, "", (*WORDS, *some)).items():
        trace = planner.with_words(row.switches["recompute"], values)
        cost = PlanCost(float(plain.peak - lifetimes(trace).peak), trace.recomputed_ms)
        found[replace(row, saving_bytes=float(kept - _kept_bytes(trace)))] = cost
    return dict(sorted(found.items(), key=lambda one: (one[1].cost_ms, one[0].config)))


def _kept_bytes(trace: Trace) -> int:
    return sum(one.size for one in lifetimes(trace).kept)


def _measured(
    bench: Bench,
    costs: Mapping[str, PlanCost],
    changes: Mapping[str, dict[str, Any]],
    experiment: Experiment,
    rounds: int,
    *,
    progress: bool,
) -> dict[str, PlanCost]:
    """Measure the memory of plans, and run them in turns with none."""
    plans = [changes[config] for config in costs]
    before = memory(bench)
    savings = [before.peak_bytes - memory(bench, **one).peak_bytes for one in plans]
    made = sweep(bench, plans, n=max(experiment.count, _LEAST_STEPS), rounds=rounds, progress=progress)
    baseline = made.baseline.runs
    points = {
        (*point.configuration.options.memory_plan, *point.configuration.options.recompute): point
        for point in made.points
        if point.configuration
    }
    measured = {}
    for (config, cost), saving, one in zip(costs.items(), savings, plans, strict=True):
        runs = points[tuple(next(iter(one.values())))].runs
        added = [_step_ms(run) - _step_ms(other) for run, other in zip(runs, baseline, strict=False)]
        measured[config] = replace(
            cost, measured_saving_bytes=float(saving), measured_cost_ms=median(added) if added else None
        )
    return measured


def _step_ms(run: Run) -> float:
    """Return the middle time of a run's steps without the first one, in ms."""
    times = [step.total_ms for step in run.steps]
    return median(times[1:] or times)
