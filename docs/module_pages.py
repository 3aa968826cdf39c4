"""A page for each family of records and of modules: what their docstrings say, and a table of the pages.

What is left out of a module's page is what nobody outside it calls.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

Families = dict[str, tuple[str, str]]

RECORDS: Families = {
    "runs": (
        "Runs",
        """
        .. automodule:: ortlab.records.runs
        .. automodule:: ortlab.records.record_files
           :members: JsonRecord
        """,
    ),
    "comparison": (
        "Comparisons",
        """
        .. automodule:: ortlab.records.comparison
        .. autofunction:: ortlab.records.verdicts.cautions
        """,
    ),
    "messages": (
        "Messages and log levels",
        """
        .. automodule:: ortlab.records.messages
        .. automodule:: ortlab.options.log_levels
        """,
    ),
    "preflight": (
        "Pre-flight",
        """
        .. automodule:: ortlab.records.preflight
        """,
    ),
    "sweeps": (
        "Sweeps and engines",
        """
        .. automodule:: ortlab.studies.sweep
        .. automodule:: ortlab.studies.sweep_run
           :members: POINTS_MAX, read_grid, read_point, each_value
        .. automodule:: ortlab.studies.engine_comparison
        """,
    ),
    "bisections": (
        "Bisections",
        """
        .. automodule:: ortlab.studies.bisection
        .. automodule:: ortlab.studies.bisection_search
           :members: smallest_sets, smallest_set
        """,
    ),
    "budgets": (
        "Budgets and batch sizes",
        """
        .. automodule:: ortlab.studies.budget
        .. automodule:: ortlab.studies.batch_size
        """,
    ),
    "plans": (
        "Plans",
        """
        .. automodule:: ortlab.memory.plan
           :exclude-members: Choice, Totals, merged
        .. automodule:: ortlab.memory.saved_plans
        .. automodule:: ortlab.memory.dialects
           :exclude-members: sentence, operators, read_log, Log, read_matrix, FeatureMatrix, Feature, LoggedPlan,
               StartUp, read_summaries, Alleviation, Subgraph, Pattern
        """,
    ),
    "old_plans": (
        "Plans in old logs",
        """
        .. automodule:: ortlab.memory.insight
           :members: MemoryInsight, Row, Option, SavedOutput, read
        .. autofunction:: ortlab.memory.dialects.read_log
        .. autoclass:: ortlab.memory.dialects.Log
        .. autofunction:: ortlab.memory.dialects.read_matrix
        .. autoclass:: ortlab.memory.dialects.FeatureMatrix
        .. autoclass:: ortlab.memory.dialects.Feature
        .. autoclass:: ortlab.memory.dialects.LoggedPlan
        .. autoclass:: ortlab.memory.dialects.StartUp
        .. autofunction:: ortlab.memory.dialects.read_summaries
        .. autoclass:: ortlab.memory.dialects.Alleviation
        .. autoclass:: ortlab.memory.dialects.Subgraph
        .. autoclass:: ortlab.memory.dialects.Pattern
        """,
    ),
    "saved_activations": (
        "Saved activations",
        """
        .. automodule:: ortlab.memory.saved_activations
        """,
    ),
    "memory": (
        "Measured memory",
        """
        .. automodule:: ortlab.memory.measured
        .. automodule:: ortlab.records.memory_phases
        .. automodule:: ortlab.memory.device_snapshot
        """,
    ),
    "parity": (
        "Parity",
        """
        .. automodule:: ortlab.parity.parity
        .. automodule:: ortlab.records.activation_statistics
        """,
    ),
    "density": (
        "Density",
        """
        .. automodule:: ortlab.records.density
        """,
    ),
    "graphs": (
        "Graphs and their differences",
        """
        .. automodule:: ortlab.graphs.stages
        .. autoclass:: ortlab.graphs.nodes.Value
        .. automodule:: ortlab.graphs.diff
        """,
    ),
    "flops": (
        "FLOPs",
        """
        .. automodule:: ortlab.graphs.flops
        .. automodule:: ortlab.graphs.flop_formulas
        """,
    ),
    "ranks": (
        "Ranks",
        """
        .. automodule:: ortlab.ranks.ledgers
           :members: RankLedger, RankRun, Ranks
        .. automodule:: ortlab.ranks.cluster_records
           :members: RankOutput, RankError, RankStatus, ClusterStatus
        """,
    ),
}

MODULES: Families = {
    "wrapping": (
        "Wrapping and losses",
        """
        .. automodule:: ortlab.runs.wrapping
           :members: Layer, Fault, WrapperOrder, wrapper_order
        .. automodule:: ortlab.runs.loss
           :members: with_loss, without_loss, has_loss, TokenLoss
        .. automodule:: ortlab.runs.parts
           :members: find_parts
        .. automodule:: ortlab.checks.preflight
           :members: preflight
        .. automodule:: ortlab.records.status
        """,
    ),
    "options": (
        "Options",
        """
        .. automodule:: ortlab.options.options
           :members: Options, table
        .. automodule:: ortlab.options.configuration
        """,
    ),
    "scripts": (
        "ORTModule's scripts and optimizers",
        """
        .. automodule:: ortlab.ortmodule
           :no-members:
        .. autoclass:: ortlab.ortmodule.ORTModule
           :no-members:
        .. autoproperty:: ortlab.ortmodule.ORTModule.lab
        .. autoproperty:: ortlab.ortmodule.ORTModule.module
        .. autofunction:: ortlab.ortmodule.load_from_json
        .. automodule:: ortlab.optim
        .. automodule:: ortlab.checks.recipes
        """,
    ),
    "subscribers": (
        "Subscribers and folders",
        """
        .. autofunction:: ortlab.engine.subscriptions.inspect_activation
        .. automodule:: ortlab.engine.tensor_subscriber
        .. automodule:: ortlab.parity.folder_comparison
        .. automodule:: ortlab.parity.upstream_folders
           :members: ActivationStep, ActivationFolder, read_folder, merge_folders
        .. automodule:: ortlab.parity.function_check_run
        """,
    ),
    "processes": (
        "Processes that train together",
        """
        .. automodule:: ortlab.ranks
           :members: Cluster, latest
        .. automodule:: ortlab.ranks.balancing
        .. automodule:: ortlab.engine.samplers
           :members: samplers
        """,
    ),
    "graph_optimizers": (
        "Graph optimizers of your own",
        """
        .. automodule:: ortlab.engine.graph_optimizers
           :members: register_graph_optimizer, unregister_graph_optimizer
        """,
    ),
    "kernels": (
        "Triton and tuning",
        """
        .. automodule:: ortlab.graphs.triton_kernels
        .. automodule:: ortlab.records.tuning_results
        """,
    ),
    "checks": (
        "Doctor, self-test and errors",
        """
        .. automodule:: ortlab.errors
        .. automodule:: ortlab.checks.doctor
        .. automodule:: ortlab.records.checks
        .. automodule:: ortlab.checks.selftest
           :members: run_selftest, write, facts
        .. automodule:: ortlab.checks.headline
        """,
    ),
    "rendering": (
        "Rendering",
        """
        .. automodule:: ortlab.render.text
        .. automodule:: ortlab.render.html
        .. automodule:: ortlab.render.plots
        .. automodule:: ortlab.render.pages
           :members: plot
        .. automodule:: ortlab.render.sweep_page
           :members: sweep_plot, engines_plot
        .. automodule:: ortlab.render.budget_page
           :members: budget_plot
        .. automodule:: ortlab.render.batch_size_page
           :members: batch_size_plot
        .. automodule:: ortlab.render.parity_pages
           :members: parity_plot
        .. automodule:: ortlab.render.density_page
           :members: density_plot
        .. automodule:: ortlab.render.profile_pages
           :members: flops_plot, savings_plot
        .. automodule:: ortlab.render.ranks_pages
           :members: balance_plot
        .. automodule:: ortlab.render.activations_page
           :members: activations_plot
        .. automodule:: ortlab.render.memory_pages
           :members: measurement_plot, phases_plot
        """,
    ),
}


def write(folder: Path) -> None:
    """Write the pages into the folders `records` and `modules`, and a table of each of the two."""
    for kind, families in (("records", RECORDS), ("modules", MODULES)):
        (folder / kind).mkdir(exist_ok=True)
        rows = ["| | |", "|---|---|"]
        for name, (title, directives) in families.items():
            text = f"# {title}\n\n```{{eval-rst}}\n{inspect.cleandoc(directives)}\n```\n"
            (folder / kind / f"{name}.md").write_text(text, encoding="utf-8")
            rows.append(f"| [{title}](_generated/{kind}/{name}.md) | {_says(directives)} |")
        (folder / f"{kind}.md").write_text("\n".join([*rows, ""]), encoding="utf-8")


def modules() -> list[str]:
    """Every module that has a place on a page, in their order."""
    families = [*RECORDS.values(), *MODULES.values()]
    return [name for _, directives in families for name in re.findall(r"automodule:: (\S+)", directives)]


def _says(directives: str) -> str:
    """Return what the first module of a page says of itself."""
    (first, *_) = re.findall(r"automodule:: (\S+)", directives)
    sentence = (importlib.import_module(first).__doc__ or "").partition("\n\n")[0]
    return re.sub(r"\s+", " ", sentence).replace("|", "\\|").replace("``", "`").strip()
