"""Graph optimizers written in Python: functions that change the gradient graph before its session is made.

1.19.2 keeps them in a table that belongs to the whole process (``ortmodule/graph_optimizer_registry.py``). Its own
three get there while modules are imported, if an environment variable is set then, and stay until the process ends.
Here they are in the table for good, and each build runs those whose switch is on.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.build_environment import acts
from ortlab.engine.patching import replace
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable

    from onnx import GraphProto

SWITCHES: Final = {
    "optimize_graph_for_aten_efficient_attention": "efficient_attention",
    "optimize_graph_for_flash_attention": "flash_attention",
    "optimize_graph_for_slice_scel": "triton",  # registered whenever onnxruntime.training.ort_triton is imported
}
"""The optimizers that 1.19.2 brings, and the switch that each of them belongs to."""

_ATTENTION: Final = ("efficient_attention", "flash_attention")
_NOT_FOUND: Final = (
    "{0} has found no attention that it knows in this graph, and changed nothing. It knows attention that is "
    "written out and divides by a constant; scaled_dot_product_attention is for sdpa_fallback, other forms are for "
    "an optimizer of your own: ortlab.register_graph_optimizer."
)


def install() -> None:
    """Let the options of a build choose among ORT's optimizers. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule.graph_optimizer_registry import GraphOptimizerRegistry

    # Registers itself; below torch 2.3 the operators take other arguments (graph_optimizers/__init__.py).
    from onnxruntime.training.ortmodule.graph_optimizers import _aten_attn  # noqa: F401

    replace(GraphOptimizerRegistry, "optimize_all", _run_chosen)


def register(
    function: Callable[[GraphProto], None], *, modules: str = "all", devices: str = "all", priority: int = 0
) -> None:
    """Put an optimizer into ORT's table; one of the same name, from a cell that is run again, is replaced.

    `function` changes a graph in place. `modules` are names of the classes that it is meant for, `devices` "cpu",
    "cuda" or "rocm": several with "|" between them, or "all". Those with a higher `priority` run first.
    """
    unregister(function)
    _registry().register(modules, devices, priority, function)


def unregister(function: Callable[[GraphProto], None]) -> None:
    """Take an optimizer, or one of the same name, out of ORT's table; does nothing if there is none."""
    table = _registry()._OPTIMIZER_FUNCS
    for module, entries in list(table.items()):
        table[module] = [entry for entry in entries if _name(entry[0]) != _name(function)]
        if not table[module]:
            del table[module]


def registered(module_name: str) -> tuple[tuple[str, str], ...]:
    """Describe the user's optimizers for a class of module as entries of a `Schema`: graphs depend on them."""
    entries = [entry for entry in _for_module(module_name) if not _switch(entry[0])]
    return tuple(
        (f"graph optimizer {_name(function)}", f"{id(function)} for {devices}, priority {priority}")
        for function, devices, priority in entries
    )


def _run_chosen(_original: Callable[..., None]) -> Callable[..., None]:
    def optimize_all(module_name: str, device: str, graph: GraphProto) -> None:
        entries = [
            entry for entry in _for_module(module_name) if entry[1] == "all" or device in entry[1].split("|")
        ]
        # Sorting keeps the order of registration among equals, as ORT does.
        for function, _, _ in sorted(entries, key=lambda entry: entry[2], reverse=True):
            switch = _switch(function)
            if not switch:
                _run_users(function, graph)
            elif acts(switch):
                before = len(graph.node)
                function(graph)
                if switch in _ATTENTION and len(graph.node) == before:
                    warnings.warn(_NOT_FOUND.format(switch), stacklevel=2)

    return optimize_all


def _run_users(function: Callable[[GraphProto], Any], graph: GraphProto) -> None:
    try:
        function(graph)
    except Exception as error:
        raise BuildError(
            f"The graph optimizer {_name(function)} failed: {type(error).__name__}: {error}",
            why="It is run on each gradient graph, before the session is made.",
            fix="Correct it and register it again, or leave it out: ortlab.unregister_graph_optimizer(it).",
        ) from error


def _switch(function: Callable[[GraphProto], Any]) -> str:
    """Name the switch that one of ORT's optimizers belongs to; empty for a user's."""
    from_ort = function.__module__.startswith("onnxruntime.")
    return SWITCHES.get(function.__name__, "") if from_ort else ""


def _for_module(name: str) -> list[tuple[Callable[[GraphProto], None], str, int]]:
    table = _registry()._OPTIMIZER_FUNCS
    return [*table.get("all", ()), *table.get(name, ())]


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _registry() -> Any:
    from onnxruntime.training.ortmodule.graph_optimizer_registry import GraphOptimizerRegistry

    return GraphOptimizerRegistry
