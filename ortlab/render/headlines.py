"""What a record is and the figure that it is for, in a few words: the inside of its repr."""

from __future__ import annotations

from functools import singledispatch

from ortlab import units
from ortlab.graphs.diff import GraphDiff
from ortlab.graphs.flops import Flops, FlopSavings
from ortlab.graphs.onnx_files import FileGraph
from ortlab.graphs.stages import Graph, GraphSet
from ortlab.graphs.triton_kernels import TritonKernel, TritonKernels
from ortlab.graphs.viewer.document import EmbeddedGraph
from ortlab.memory.device_snapshot import MemorySnapshot
from ortlab.memory.measured import MemoryMeasurement
from ortlab.memory.plan import MemoryPlan
from ortlab.memory.saved_activations import SavedActivations
from ortlab.memory.saved_plans import SavedPlans
from ortlab.memory.trace import Trace
from ortlab.options.catalogue import OptionList
from ortlab.options.options import Options
from ortlab.parity.parity import FunctionReport, Parity
from ortlab.ranks import Cluster
from ortlab.ranks.balancing import Balance
from ortlab.ranks.cluster_records import ClusterStatus
from ortlab.ranks.ledgers import Ranks
from ortlab.records.checks import Recipe, Report, SelfTest
from ortlab.records.comparison import Comparison
from ortlab.records.density import DensityReport
from ortlab.records.memory_phases import MemoryPhases
from ortlab.records.messages import Messages
from ortlab.records.preflight import Level, Preflight
from ortlab.records.runs import Ledger, Run
from ortlab.records.status import Status
from ortlab.records.tuning_results import TuningResults
from ortlab.studies.batch_size import BatchSizeSearch, plans_name
from ortlab.studies.bisection import Bisection
from ortlab.studies.budget import Budget
from ortlab.studies.engine_comparison import EngineComparison
from ortlab.studies.sweep import Sweep


@singledispatch
def headline(record: object) -> str:
    """Say in a few words what a record holds, any figure first; raise TypeError for a type without a headline."""
    message = f"There is no headline for a {type(record).__name__}."
    raise TypeError(message)


# ---- runs and what is made of them --------------------------------------------------------------------------------


@headline.register
def _run(run: Run) -> str:
    loss = run.losses[-1] if run.losses else None
    last = "" if loss is None else f", last loss {units.loss(loss)}"
    return f"{run.title}: {units.many(run.steps, 'step')}, {units.duration(run.step_ms)} each{last}"


@headline.register
def _ledger(ledger: Ledger) -> str:
    if not len(ledger):
        return "no runs"
    fell = sum(run.fell_back for run in ledger)
    fallback = f", {units.count(fell)} fell back to PyTorch" if fell else ""
    return f"{units.many(ledger, 'run')}{fallback}, the last: {_run(ledger[-1])}"


@headline.register
def _comparison(comparison: Comparison) -> str:
    return comparison.summary


@headline.register
def _sweep(sweep: Sweep) -> str:
    points, rounds = units.many(sweep.points, "point"), units.many(sweep.rounds, "round")
    done = f"{units.count(sweep.runs_done)} of {units.many(sweep.runs_planned, 'run')} done"
    return f"{sweep.number}: {sweep.model}, {points} in {rounds} of {units.many(sweep.count, 'step')}, {done}"


@headline.register
def _engines(candidates: EngineComparison) -> str:
    names = "; ".join(one.name for one in candidates)
    return f"{candidates.sweep.model}: {units.many(len(candidates), 'way')} to run the step: {names}"


@headline.register
def _bisection(bisection: Bisection) -> str:
    named = "; ".join(
        " with ".join(bisection.words(name) for name in one.names) for one in bisection.culprits
    )
    tried = f"{units.many(bisection.changes, 'change')}, {units.many(bisection.trials, 'trial')}"
    return (
        f"{bisection.number}: {bisection.model}, {bisection.metric}: {named or bisection.outcome} ({tried})"
    )


@headline.register
def _search(search: BatchSizeSearch) -> str:
    best = search.best
    found = f"best: batch {best.size}, {plans_name(best.plans)}" if best else "nothing timed"
    limit = f"limit {units.size(search.asked_bytes)} of {search.limit_of}"
    return f"{search.number}: {search.model}, {found} ({units.many(search.points, 'point')}, {limit})"


@headline.register
def _budget(budget: Budget) -> str:
    setting = budget.answer.setting
    plans = f", {setting}" if setting else ""
    if budget.plans and not setting:
        plans = f", {units.many(budget.plans, 'plan')}: {', '.join(budget.plans)}"
    return f"{budget.asked} for {budget.model}: {budget.outcome}{plans}"


@headline.register
def _parity(parity: Parity) -> str:
    first = parity.first
    found = (
        f"first difference in the {first.phase} of {first.module or 'the model'}"
        if first
        else "no difference"
    )
    tried = f"{units.many(parity.steps, 'step')}, {units.many(parity.pairs, 'tensor')}"
    return f"{parity.candidate} against {parity.reference}: {parity.model}, {found} ({tried})"


@headline.register
def _ranks(ranks: Ranks) -> str:
    missing = f", {units.many(ranks.missing, 'ledger')} missing" if ranks.missing else ""
    found = f"{units.many(ranks.ranks, 'rank')}, {units.many(ranks.numbers, 'run')} on all"
    return f"{found}, shown: {ranks.shown}{missing}"


# ---- memory -------------------------------------------------------------------------------------------------------


@headline.register
def _measurement(measured: MemoryMeasurement) -> str:
    needs = f"a step needs {units.size(measured.rise_bytes)} above its start"
    return f"{measured.engine}: {needs}, {measured.kind} on {measured.device}, {units.many(measured.steps, 'step')}"


@headline.register
def _phases(phases: MemoryPhases) -> str:
    read = f"{units.many(phases.readings, 'reading')} in {units.many(phases.steps, 'step')}"
    return f"{phases.source or 'memory at points'}: {read}"


@headline.register
def _snapshot(snapshot: MemorySnapshot) -> str:
    return (
        f"{units.size(snapshot.total_bytes)} in {units.many(snapshot.blocks, 'block')} on {snapshot.device}"
    )


@headline.register
def _plan(plan: MemoryPlan) -> str:
    recomputed = (row.config for row in plan.recomputed if row.enabled)
    on = ", ".join((*plan.enabled, *recomputed)) or "none"
    return f"{units.many(plan.rows, 'plan')} on offer, memory_level={plan.memory_level}, on: {on}"


@headline.register
def _saved_plans(saved: SavedPlans) -> str:
    on = ", ".join(saved.enabled) or "none"
    return f"{units.many(saved.rows, 'plan')} from {saved.source}, written as in {saved.dialect}, on: {on}"


@headline.register
def _activations(activations: SavedActivations) -> str:
    unknown = f", {units.count(len(activations.unknown))} of unknown size" if activations.unknown else ""
    rows = units.many(activations.rows, "activation")
    return f"{units.size(activations.total_bytes)} kept for backward, {rows}{unknown}"


@headline.register
def _trace(trace: Trace) -> str:
    forward, backward = units.duration(trace.forward_ms), units.duration(trace.backward_ms)
    kernels, steps = units.many(trace.nodes, "kernel"), units.many(trace.steps, "step")
    return f"forward {forward}, backward {backward}: {kernels}, {steps}"


# ---- graphs -------------------------------------------------------------------------------------------------------


@headline.register
def _graph(graph: Graph) -> str:
    of = f" of {graph.part}" if graph.part else ""
    return f"{graph.stage}{of}, {graph.mode}: {units.many(graph.node_count, 'node')}, opset {graph.opset}"


@headline.register
def _file_graph(graph: FileGraph) -> str:
    return f"{graph.path}: {units.many(graph.node_count, 'node')}, opset {graph.opset}"


@headline.register
def _graph_set(graphs: GraphSet) -> str:
    shown = ", ".join(f"{one.stage} {units.count(one.node_count)}" for one in graphs)
    return f"{graphs.mode}, nodes by stage: {shown}"


@headline.register
def _graph_diff(diff: GraphDiff) -> str:
    found = " ".join(diff.sentences) or "no difference"
    return f"{diff.before.name} against {diff.after.name}: {found}"


@headline.register
def _embedded(shown: EmbeddedGraph) -> str:
    refused = ", cannot be browsed" if shown.refused else ""
    return f"{headline(shown.graph)}{refused}"


@headline.register
def _flops(flops: Flops) -> str:
    total = units.flops(flops.total)
    return f"{total} a step: forward {units.flops(flops.forward)}, backward {units.flops(flops.backward)}"


@headline.register
def _savings(savings: FlopSavings) -> str:
    saved = f"{units.flops(savings.saved)} fewer, {units.percent(savings.share)}"
    return f"{savings.changed or 'two profiled steps'}: {saved}"


# ---- switches, messages, data, machines ---------------------------------------------------------------------------


@headline.register
def _options(options: Options) -> str:
    return ", ".join(f"{name}={getattr(options, name)!r}" for name in options.changed(Options()))


@headline.register
def _option_list(listed: OptionList) -> str:
    return f"{units.many(len(listed.switches), 'option')}: {', '.join(one.name for one in listed.switches)}"


@headline.register
def _status(status: Status) -> str:
    reason = f": {status.reason}" if status.reason else ""
    return f"engine={status.engine!r}, {status.state}{reason}"


@headline.register
def _messages(messages: Messages) -> str:
    return ", ".join(f"{number} {level}" for level, number in messages.counts.items()) or "none"


@headline.register
def _preflight(preflight: Preflight) -> str:
    counts = ", ".join(f"{len(preflight.of(level))} {level.value}" for level in Level)
    return f"{preflight.model}: ok={preflight.ok}, {counts}, parts={len(preflight.parts)}"


@headline.register
def _recipe(recipe: Recipe) -> str:
    missing = f", {units.many(recipe.missing, 'thing')} missing here" if recipe.missing else ""
    return f"{recipe.name}: {recipe.title}, {units.many(recipe.code.splitlines(), 'line')}{missing}"


@headline.register
def _functions(report: FunctionReport) -> str:
    found = "all agree" if report.ok else "some do not agree"
    return f"{report.model}: {units.many(report.checks, 'function')}, {found}"


@headline.register
def _density(report: DensityReport) -> str:
    shown = ", ".join(f"{row.kind} {row.name} {units.density(mean)}" for row, mean in report.density.means())
    return f"{report.source}: {shown or 'nothing was counted'}"


@headline.register
def _balance(record: Balance) -> str:
    without, having = (units.ratio(record.worst(epochs)) for epochs in (record.without, record.having))
    return f"{units.many(record.ranks, 'rank')}, worst step: max / mean {having}, without {without}"


@headline.register
def _cluster(cluster: Cluster) -> str:
    return f"{cluster.ranks}, {'running' if cluster.running else 'not running'}"


@headline.register
def _cluster_status(status: ClusterStatus) -> str:
    died = f", {status.died}" if status.died else ""
    return f"{len(status.running)} of {units.many(status.ranks, 'rank')} running over {status.backend}{died}"


@headline.register
def _report(report: Report) -> str:
    wrong = [check.name for check in report.checks if check.status == "fail"]
    found = f"failed: {', '.join(wrong)}" if wrong else "can train with ONNX Runtime"
    return f"{found}, {units.many(report.checks, 'check')}"


@headline.register
def _selftest(test: SelfTest) -> str:
    end = "interrupted" if test.interrupted else "ok" if test.ok else "not ok"
    return f"{test.device}: {end}, {units.many(test.findings, 'finding')}, {units.count(len(test.not_run))} not run"


@headline.register
def _kernel(kernel: TritonKernel) -> str:
    found = ", ".join(f"{name} {count}" for name, count in (kernel.operators or {}).items())
    return f"{kernel.number}: {found or 'operators not known'}"


@headline.register
def _kernels(kernels: TritonKernels) -> str:
    return f"{units.many(len(kernels), 'kernel')} in {kernels.folder}"


@headline.register
def _tuning(results: TuningResults) -> str:
    return f"{units.many(results.operators, 'tuned operator')} in {results.path}"
