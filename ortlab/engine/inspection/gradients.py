"""Ask PyTorch for the gradient of each operator that it shall run inside a graph, once and on its own.

An operator may have a derivative that only raises: torch's "not implemented", or an operator of the user's without
`register_autograd`. Autograd says so in the backward, which a pre-flight does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ortlab.engine.tracing.traced_values import function_name
from ortlab.records.findings import Finding, Kind

if TYPE_CHECKING:
    from ortlab.engine.inspection.places import Places


class GradientsAsked(TorchFunctionMode):
    """Differentiate the operators `names`, without namespace, of a forward in PyTorch, on copies of their inputs."""

    def __init__(self, names: Collection[str], places: Places, report: Callable[[Finding], None]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._places = places
        self._report = report

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`, and ask for its gradient if it is one of the operators."""
        kwargs = kwargs or {}
        if operator_name(function) in self._names:
            self._ask(function, args, kwargs)
        return function(*args, **kwargs)

    def _ask(self, function: Any, args: Any, kwargs: Any) -> None:
        given: list[torch.Tensor] = []

        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            copy = value.detach().clone()
            if value.requires_grad and value.is_floating_point():
                given.append(copy.requires_grad_())
            return copy

        with torch.enable_grad():
            args, kwargs = _pytree.tree_map(copied, (args, kwargs))
            results = _pytree.tree_leaves(function(*args, **kwargs))
            ends = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
            if not given or not ends:
                return
            try:
                torch.autograd.grad(ends, given, [torch.zeros_like(one) for one in ends], allow_unused=True)
            except (RuntimeError, NotImplementedError) as error:
                why = str(error).strip().splitlines()[0].rstrip(".")
                self._report(
                    Finding.of(
                        Kind.NO_GRADIENT,
                        f"`{operator_name(function)}` has no gradient, in PyTorch neither: {why}.",
                        self._places.here(),
                        "Detach its input if none is meant, or register a gradient for it.",
                    )
                )


def operator_name(function: Any) -> str:
    """Return the name of an operator without namespace, overload and the underscore of an in-place one."""
    if isinstance(function, torch._ops.OpOverload):
        name = str(function._schema.name).rpartition("::")[2]
    elif isinstance(function, torch._ops.OpOverloadPacket):
        name = function.__name__
    else:
        name = function_name(function)
    return name if name.startswith("_") else name.removesuffix("_")
