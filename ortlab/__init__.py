"""Experiment with ONNX Runtime Training in a notebook: `%load_ext ortlab`, or `ortlab.wrap(model)`.

Importing this package imports neither torch nor onnxruntime; both are loaded when a model is wrapped.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.checks.doctor import doctor
    from ortlab.checks.preflight import preflight
    from ortlab.checks.recipes import recipe
    from ortlab.engine.graph_optimizers import register_graph_optimizer, unregister_graph_optimizer
    from ortlab.errors import OrtlabError
    from ortlab.graphs.onnx_files import open_graph
    from ortlab.graphs.viewer.document import embed_graph
    from ortlab.lab.lab import Lab, wrap
    from ortlab.loading import load
    from ortlab.notebook.widgets.graph_display import show_graph
    from ortlab.notebook.widgets.panel import panel
    from ortlab.options.options import Options
    from ortlab.render.pages import plot
    from ortlab.runs.loss import TokenLoss, with_loss, without_loss

__version__ = "0.1.0"

_HOMES = {
    "Lab": "ortlab.lab.lab",
    "Options": "ortlab.options.options",
    "OrtlabError": "ortlab.errors",
    "TokenLoss": "ortlab.runs.loss",
    "embed_graph": "ortlab.graphs.viewer.document",
    "doctor": "ortlab.checks.doctor",
    "load": "ortlab.loading",
    "open_graph": "ortlab.graphs.onnx_files",
    "panel": "ortlab.notebook.widgets.panel",
    "plot": "ortlab.render.pages",
    "preflight": "ortlab.checks.preflight",
    "recipe": "ortlab.checks.recipes",
    "register_graph_optimizer": "ortlab.engine.graph_optimizers",
    "show_graph": "ortlab.notebook.widgets.graph_display",
    "unregister_graph_optimizer": "ortlab.engine.graph_optimizers",
    "with_loss": "ortlab.runs.loss",
    "without_loss": "ortlab.runs.loss",
    "wrap": "ortlab.lab.lab",
}

__all__ = [
    "Lab",
    "Options",
    "OrtlabError",
    "TokenLoss",
    "doctor",
    "embed_graph",
    "load",
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
    """Register the magics; `%load_ext ortlab` calls it."""
    from ortlab.notebook import magics

    magics.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Put back what was there before; `%unload_ext ortlab` calls it."""
    from ortlab.notebook import magics

    magics.unload(shell)
