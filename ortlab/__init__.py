"""Experiment with ONNX Runtime Training in a notebook: `%load_ext ortlab`, or `ortlab.wrap(model)`.

Importing this package imports neither torch nor onnxruntime; both are loaded when a model is wrapped.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.comparison import Comparison
    from ortlab.doctor import examine
    from ortlab.errors import OrtlabError
    from ortlab.graphs.stages import Graph
    from ortlab.lab import Lab, wrap
    from ortlab.memory.plan import MemoryPlan
    from ortlab.options import Options
    from ortlab.runs import Ledger, Run
    from ortlab.status import Status
    from ortlab.widgets.panel import Panel, panel

__version__ = "0.1.0"

_HOMES = {
    "Comparison": "ortlab.comparison",
    "Graph": "ortlab.graphs.stages",
    "Lab": "ortlab.lab",
    "Ledger": "ortlab.runs",
    "MemoryPlan": "ortlab.memory.plan",
    "Options": "ortlab.options",
    "OrtlabError": "ortlab.errors",
    "Panel": "ortlab.widgets.panel",
    "Run": "ortlab.runs",
    "Status": "ortlab.status",
    "examine": "ortlab.doctor",
    "panel": "ortlab.widgets.panel",
    "wrap": "ortlab.lab",
}

__all__ = [
    "Comparison",
    "Graph",
    "Lab",
    "Ledger",
    "MemoryPlan",
    "Options",
    "OrtlabError",
    "Panel",
    "Run",
    "Status",
    "examine",
    "panel",
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
