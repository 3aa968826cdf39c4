"""Experiment with ONNX Runtime Training in a notebook: `%load_ext ortlab`, or `ortlab.wrap(model)`.

Importing this package imports neither torch nor onnxruntime; both are loaded when a model is wrapped.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.blame.blame import Blame
    from ortlab.budgets.budget import Budget
    from ortlab.comparison import Comparison
    from ortlab.doctor import examine
    from ortlab.engine.tensor_subscriber import TensorSubscriber
    from ortlab.errors import OrtlabError
    from ortlab.graph_optimizers import register_graph_optimizer, unregister_graph_optimizer
    from ortlab.graphs.onnx_files import open_graph
    from ortlab.graphs.stages import Graph
    from ortlab.hunting.batch_hunt import BatchHunt
    from ortlab.lab import Lab
    from ortlab.loss import with_loss, without_loss
    from ortlab.memory.plan import MemoryPlan
    from ortlab.memory.stash import Stash
    from ortlab.memory.trace import Trace
    from ortlab.options import Options
    from ortlab.parity.folder_comparison import compare_folders
    from ortlab.parity.function_check import check_functions
    from ortlab.parity.inspection import inspect_activation
    from ortlab.parity.record import Parity
    from ortlab.parity.upstream_folders import merge_folders
    from ortlab.preflights.preflight import Preflight
    from ortlab.preflights.running import preflight
    from ortlab.ranks.ranks import Ranks
    from ortlab.recipes import Recipe, recipe
    from ortlab.render.figures import plot
    from ortlab.runs import Ledger, Run
    from ortlab.status import Status
    from ortlab.sweeps.sweep import Sweep
    from ortlab.token_loss import TokenLoss
    from ortlab.viewer.embedded import embed_graph
    from ortlab.widgets.graph_display import show_graph
    from ortlab.widgets.graph_view import GraphView
    from ortlab.widgets.panel import Panel, panel
    from ortlab.wrapped import wrap

__version__ = "0.1.0"

_HOMES = {
    "BatchHunt": "ortlab.hunting.batch_hunt",
    "Blame": "ortlab.blame.blame",
    "Budget": "ortlab.budgets.budget",
    "Comparison": "ortlab.comparison",
    "Graph": "ortlab.graphs.stages",
    "GraphView": "ortlab.widgets.graph_view",
    "Lab": "ortlab.lab",
    "Ledger": "ortlab.runs",
    "MemoryPlan": "ortlab.memory.plan",
    "Options": "ortlab.options",
    "OrtlabError": "ortlab.errors",
    "Panel": "ortlab.widgets.panel",
    "Parity": "ortlab.parity.record",
    "Preflight": "ortlab.preflights.preflight",
    "Recipe": "ortlab.recipes",
    "Ranks": "ortlab.ranks.ranks",
    "Run": "ortlab.runs",
    "Stash": "ortlab.memory.stash",
    "TensorSubscriber": "ortlab.engine.tensor_subscriber",
    "Trace": "ortlab.memory.trace",
    "Status": "ortlab.status",
    "Sweep": "ortlab.sweeps.sweep",
    "TokenLoss": "ortlab.token_loss",
    "check_functions": "ortlab.parity.function_check",
    "compare_folders": "ortlab.parity.folder_comparison",
    "inspect_activation": "ortlab.parity.inspection",
    "merge_folders": "ortlab.parity.upstream_folders",
    "embed_graph": "ortlab.viewer.embedded",
    "examine": "ortlab.doctor",
    "open_graph": "ortlab.graphs.onnx_files",
    "panel": "ortlab.widgets.panel",
    "plot": "ortlab.render.figures",
    "preflight": "ortlab.preflights.running",
    "recipe": "ortlab.recipes",
    "register_graph_optimizer": "ortlab.graph_optimizers",
    "show_graph": "ortlab.widgets.graph_display",
    "unregister_graph_optimizer": "ortlab.graph_optimizers",
    "with_loss": "ortlab.loss",
    "without_loss": "ortlab.loss",
    "wrap": "ortlab.wrapped",
}

__all__ = [
    "BatchHunt",
    "Blame",
    "Budget",
    "Comparison",
    "Graph",
    "GraphView",
    "Lab",
    "Ledger",
    "MemoryPlan",
    "Options",
    "OrtlabError",
    "Panel",
    "Parity",
    "Preflight",
    "Ranks",
    "Recipe",
    "Run",
    "Stash",
    "Status",
    "Sweep",
    "TensorSubscriber",
    "TokenLoss",
    "Trace",
    "check_functions",
    "compare_folders",
    "embed_graph",
    "examine",
    "inspect_activation",
    "merge_folders",
    "open_graph",
    "panel",
    "plot",
    "preflight",
    "recipe",
    "register_graph_optimizer",
    "show_graph",
    "unregister_graph_optimizer",
    "with_loss",
    "without_loss",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return [*globals(), *__all__]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics and the display of records; `%load_ext ortlab` calls it."""
    from ortlab import magics

    magics.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Put back what was there before; `%unload_ext ortlab` calls it."""
    from ortlab import magics

    magics.unload(shell)
