"""Which page a record gets: the one place that `text` and `html` ask."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

from ortlab.graphs.diff import GraphDiff
from ortlab.graphs.flop_savings import FlopSavings
from ortlab.graphs.flops import Flops
from ortlab.graphs.graph_set import GraphSet
from ortlab.graphs.onnx_files import FileGraph
from ortlab.graphs.stages import Graph
from ortlab.graphs.triton_kernels import TritonKernel, TritonKernels
from ortlab.graphs.viewer.embedded import EmbeddedGraph
from ortlab.memory.device_snapshot import MemorySnapshot
from ortlab.memory.measured import MemoryMeasurement
from ortlab.memory.plan import MemoryPlan
from ortlab.memory.saved_activations import SavedActivations
from ortlab.memory.saved_plans import SavedPlans
from ortlab.memory.trace import Trace
from ortlab.options.catalogue import OptionList
from ortlab.options.options import Options
from ortlab.parity.functions import FunctionReport
from ortlab.parity.record import Parity
from ortlab.ranks import Cluster
from ortlab.ranks.balancing import Balance
from ortlab.ranks.cluster_records import ClusterStatus
from ortlab.ranks.ledgers import Ranks
from ortlab.records.checks import Report
from ortlab.records.comparison import Comparison
from ortlab.records.density_report import DensityReport
from ortlab.records.memory_phases import MemoryPhases
from ortlab.records.messages import Messages
from ortlab.records.preflight import Preflight
from ortlab.records.recipe import Recipe
from ortlab.records.runs import Ledger, Run
from ortlab.records.selftest import SelfTest
from ortlab.records.status import Status
from ortlab.records.tuning_results import TuningResults
from ortlab.render.activations_page import activations_page
from ortlab.render.balance_page import balance_page
from ortlab.render.batch_size_page import batch_size_page
from ortlab.render.bisection_page import bisection_page
from ortlab.render.budget_page import budget_page
from ortlab.render.density_page import density_page
from ortlab.render.engines_page import engines_page
from ortlab.render.flops_page import flops_page, savings_page
from ortlab.render.function_page import function_page
from ortlab.render.graph_diff_page import graph_diff_page
from ortlab.render.graph_forms import embedded_page, file_page, with_picture
from ortlab.render.graph_page import graph_page, graph_set_page
from ortlab.render.lab_pages import report_page, status_page
from ortlab.render.memory_page import measurement_page, phases_page
from ortlab.render.message_pages import messages_page
from ortlab.render.option_list_page import option_list_page
from ortlab.render.option_pages import options_page
from ortlab.render.parity_page import parity_page
from ortlab.render.plan_page import plan_page
from ortlab.render.preflight_page import preflight_page
from ortlab.render.ranks_page import cluster_page, ranks_page
from ortlab.render.recipe_page import recipe_page
from ortlab.render.run_pages import comparison_page, ledger_page, run_page
from ortlab.render.saved_plans_page import saved_plans_page
from ortlab.render.selftest_page import selftest_page
from ortlab.render.snapshot_page import snapshot_page
from ortlab.render.sweep_page import sweep_page
from ortlab.render.trace_page import trace_page
from ortlab.render.triton_page import kernel_page, kernels_page
from ortlab.render.tuning_page import tuning_page
from ortlab.studies.batch_size_search import BatchSizeSearch
from ortlab.studies.bisection import Bisection
from ortlab.studies.budget import Budget
from ortlab.studies.engine_comparison import EngineComparison
from ortlab.studies.sweep import Sweep

if TYPE_CHECKING:
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
