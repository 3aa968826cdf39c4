"""Graph optimizers of your own: Python functions that change the gradient graph before ONNX Runtime gets it.

`register_graph_optimizer` is ORTModule's, made for notebooks: a cell can be run again, the graph is rebuilt at the next
step, and a failure names the function. `onnxruntime.training.ortmodule.graph_optimizers.utils` has a matcher for
patterns such as attention.

1.19.2 keeps them in a table that belongs to the whole process (``ortmodule/graph_optimizer_registry.py``). Its own
three get there while modules are imported, if an environment variable is set then, and stay until the process ends.
Here they are in the table for good, and each build runs those whose switch is on, and yours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, overload

from ortlab.engine.build_environment import acts
from ortlab.engine.patching import replace
from ortlab.errors import BuildError, OptionError

if TYPE_CHECKING:
    from onnx import GraphProto

GraphOptimizer: TypeAlias = "Callable[[GraphProto], Any]"
"""Changes an ONNX graph in place; what it returns is ignored."""


class _Registered(NamedTuple):
    function: GraphOptimizer
    modules: list[str]
    devices: str
    priority: int


_USERS: Final[dict[str, _Registered]] = {}
"""By name, those of users; ORT's table has its own."""

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


@overload
def register_graph_optimizer(target_modules: GraphOptimizer) -> GraphOptimizer: ...
@overload
def register_graph_optimizer(
    target_modules: str = "all", devices: str = "all", priority: int = 0
) -> Callable[[GraphOptimizer], GraphOptimizer]: ...
def register_graph_optimizer(
    target_modules: str | GraphOptimizer = "all", devices: str = "all", priority: int = 0
) -> GraphOptimizer | Callable[[GraphOptimizer], GraphOptimizer]:
    """Have a function change each gradient graph that is built from now on, and those of present labs anew.

    Parameters
    ----------
    target_modules
        Names of the model classes it is meant for, with "|" between them, or "all". A function is registered at
        once, for all classes and devices, so that `@register_graph_optimizer` needs no brackets.
    devices
        "cpu", "cuda", "rocm", with "|" between them, or "all".
    priority
        Functions with a higher one run first.

    Returns
    -------
    callable
        The decorator, or the function if that was given; it stays as it is. One of the same name is replaced.

    Raises
    ------
    OptionError
        If a device is none of ORT's.

    Examples
    --------
    >>> @ortlab.register_graph_optimizer("BertModel|RobertaModel", devices="cuda")
    ... def fuse_attention(graph):
    ...     for nodes in GraphMatcher(graph).match_pattern(PATTERN): ...
    """
    if callable(target_modules):
        return register_graph_optimizer()(target_modules)
    if not set(devices.split("|")) <= {"all", "cpu", "cuda", "rocm"}:
        raise OptionError(
            f"There is no device {devices!r} for a graph optimizer.",
            fix="Devices: all, or some of cpu, cuda and rocm with | between them.",
        )

    def register(function: GraphOptimizer) -> GraphOptimizer:
        unregister_graph_optimizer(
            function
        )  # one of the same name, from a cell that is run again, is replaced
        _USERS[_name(function)] = _Registered(function, target_modules.split("|"), devices, priority)
        return function

    return register


def unregister_graph_optimizer(function: GraphOptimizer) -> None:
    """Leave a function out of the graphs that are built from now on; present labs rebuild theirs.

    Parameters
    ----------
    function
        One that was registered; if it was not, nothing happens.
    """
    _USERS.pop(_name(function), None)


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


def _run_users(function: GraphOptimizer, graph: GraphProto) -> None:
    try:
        function(graph)
    except Exception as error:
        raise BuildError(
            f"The graph optimizer {_name(function)} failed: {type(error).__name__}: {error}",
            why="It is run on each gradient graph, before the session is made.",
            fix="Correct it and register it again, or leave it out: ortlab.unregister_graph_optimizer(it).",
        ) from error


def _switch(function: GraphOptimizer) -> str:
    """Name the switch that one of ORT's optimizers belongs to; empty for a user's."""
    from_ort = function.__module__.startswith("onnxruntime.")
    return SWITCHES.get(function.__name__, "") if from_ort else ""


def _for_module(name: str) -> list[tuple[GraphOptimizer, str, int]]:
    from onnxruntime.training.ortmodule.graph_optimizer_registry import GraphOptimizerRegistry

    table = GraphOptimizerRegistry._OPTIMIZER_FUNCS
    users = [one for one in _USERS.values() if {"all", name} & {*one.modules}]
    return [
        *(entry for module in ("all", name) for entry in table.get(module, ())),
        *((one.function, one.devices, one.priority) for one in users),
    ]


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"
