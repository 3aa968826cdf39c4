"""Which page and which figure a record gets."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

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
from ortlab.records.preflight import Preflight
from ortlab.records.runs import Ledger, Run
from ortlab.records.status import Status
from ortlab.records.tuning_results import TuningResults
from ortlab.render.activations_page import activations_page, activations_plot
from ortlab.render.batch_size_page import batch_size_page, batch_size_plot
from ortlab.render.bisection_page import bisection_page
from ortlab.render.budget_page import budget_page, budget_plot
from ortlab.render.check_pages import preflight_page, recipe_page, report_page, selftest_page
from ortlab.render.comparison_page import comparison_page
from ortlab.render.density_page import density_page, density_plot
from ortlab.render.graph_pages import (
    embedded_page,
    file_page,
    graph_diff_page,
    graph_page,
    graph_set_page,
    with_picture,
)
from ortlab.render.lab_pages import messages_page, option_list_page, options_page, status_page
from ortlab.render.memory_pages import (
    measurement_page,
    measurement_plot,
    phases_page,
    phases_plot,
    snapshot_page,
)
from ortlab.render.parity_pages import function_page, parity_page, parity_plot
from ortlab.render.plan_pages import plan_page, saved_plans_page
from ortlab.render.profile_pages import (
    flops_page,
    flops_plot,
    kernel_page,
    kernels_page,
    savings_page,
    savings_plot,
    trace_page,
    tuning_page,
)
from ortlab.render.ranks_pages import balance_page, balance_plot, cluster_page, ranks_page, ranks_plot
from ortlab.render.run_pages import ledger_page, run_page
from ortlab.render.sweep_page import engines_page, engines_plot, sweep_page, sweep_plot
from ortlab.studies.batch_size import BatchSizeSearch
from ortlab.studies.bisection import Bisection
from ortlab.studies.budget import Budget
from ortlab.studies.engine_comparison import EngineComparison
from ortlab.studies.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.render.page import Page


@singledispatch
def compose(record: object) -> Page:
    """Make the page of a record; raise TypeError for a type without a page."""
    known = ", ".join(sorted(kind.__name__ for kind in record_types()))
    message = f"There is no page for a {type(record).__name__}; records that have one: {known}."
    raise TypeError(message)


def record_types() -> tuple[type, ...]:
    """Return the types of the records that have a page."""
    return tuple(kind for kind in compose.registry if kind is not object)


compose.register(Run, run_page)

compose.register(Ledger, ledger_page)

compose.register(Comparison, comparison_page)

compose.register(Options, options_page)

compose.register(Status, status_page)

compose.register(MemoryPlan, plan_page)

compose.register(SavedPlans, saved_plans_page)

compose.register(SavedActivations, activations_page)

compose.register(Trace, trace_page)

compose.register(MemoryMeasurement, measurement_page)

compose.register(MemoryPhases, phases_page)

compose.register(MemorySnapshot, snapshot_page)

compose.register(Graph, lambda graph: with_picture(graph, graph_page(graph)))

compose.register(GraphSet, graph_set_page)

compose.register(FileGraph, lambda graph: file_page(graph, with_picture(graph, graph_page(graph))))

compose.register(EmbeddedGraph, lambda shown: embedded_page(shown, compose(shown.graph)))

compose.register(Report, report_page)

compose.register(OptionList, option_list_page)

compose.register(Messages, messages_page)

compose.register(Sweep, sweep_page)

compose.register(EngineComparison, engines_page)

compose.register(Preflight, preflight_page)

compose.register(Recipe, recipe_page)

compose.register(TritonKernels, kernels_page)

compose.register(TritonKernel, kernel_page)

compose.register(TuningResults, tuning_page)

compose.register(SelfTest, selftest_page)

compose.register(FunctionReport, function_page)

compose.register(Parity, parity_page)

compose.register(Budget, budget_page)

compose.register(BatchSizeSearch, batch_size_page)

compose.register(DensityReport, density_page)

compose.register(Flops, flops_page)

compose.register(FlopSavings, savings_page)

compose.register(Balance, balance_page)

compose.register(Ranks, ranks_page)

compose.register(ClusterStatus, cluster_page)

compose.register(Cluster, lambda cluster: cluster_page(cluster.status()))

compose.register(Bisection, bisection_page)

compose.register(GraphDiff, graph_diff_page)


@singledispatch
def plot(record: object) -> Figure:
    """Draw a record.

    Parameters
    ----------
    record
        A `Sweep`: step time against peak memory. A `SavedActivations`: what each layer keeps for backward.
        `EngineComparison`: step time against the memory that a step needs. A `Budget`: what plans cost against the
        peak. `BatchSizeSearch`: samples per second and peak memory against the batch.

        `Parity`: distances over the depth of the model and over the steps.
        `MemoryMeasurement`: the phases of a step. `MemoryPhases`: memory at the points of the steps.
        `DensityReport`: the density of each input. `Flops`: FLOPs by module. `FlopSavings`: with a switch and without.
        `Balance`: tokens of each rank, step by step. `Ranks`: where the time of each goes, and its memory.

    Returns
    -------
    matplotlib.figure.Figure
        `ortlab.plot(record).savefig("figure.svg")` saves it.

    Raises
    ------
    TypeError
        If there is no figure for a record of this type.
    """
    known = ", ".join(sorted(kind.__name__ for kind in plot.registry if kind is not object))
    message = f"There is no figure for a {type(record).__name__}; records that have one: {known}."
    raise TypeError(message)


plot.register(Sweep, sweep_plot)

plot.register(SavedActivations, activations_plot)

plot.register(MemoryMeasurement, measurement_plot)

plot.register(MemoryPhases, phases_plot)

plot.register(EngineComparison, engines_plot)

plot.register(Parity, parity_plot)

plot.register(Budget, budget_plot)

plot.register(BatchSizeSearch, batch_size_plot)

plot.register(DensityReport, density_plot)

plot.register(Flops, flops_plot)

plot.register(FlopSavings, savings_plot)

plot.register(Balance, balance_plot)

plot.register(Ranks, ranks_plot)
