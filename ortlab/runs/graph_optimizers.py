"""Graph optimizers of your own: Python functions that change the gradient graph before ONNX Runtime gets it.

`register_graph_optimizer` is ORTModule's, made for notebooks: a cell can be run again, the graph is rebuilt at the next
step, and a failure names the function. `onnxruntime.training.ortmodule.graph_optimizers.utils` has a matcher for
patterns such as attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from ortlab.errors import OptionError

if TYPE_CHECKING:
    from onnx import GraphProto

GraphOptimizer: TypeAlias = "Callable[[GraphProto], Any]"
"""Changes an ONNX graph in place; what it returns is ignored."""


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
    modules, known = target_modules, {"all", "cpu", "cuda", "rocm"}
    if not set(devices.split("|")) <= known:
        raise OptionError(
            f"There is no device {devices!r} for a graph optimizer.",
            fix="Devices: all, or some of cpu, cuda and rocm with | between them.",
        )

    def register(function: GraphOptimizer) -> GraphOptimizer:
        from ortlab.engine import graph_optimizers, load

        load()
        graph_optimizers.register(function, modules=modules, devices=devices, priority=priority)
        return function

    return register


def unregister_graph_optimizer(function: GraphOptimizer) -> None:
    """Leave a function out of the graphs that are built from now on; present labs rebuild theirs.

    Parameters
    ----------
    function
        One that was registered; if it was not, nothing happens.
    """
    from ortlab.engine import graph_optimizers, load

    load()
    graph_optimizers.unregister(function)
