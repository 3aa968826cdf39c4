"""Watch a trace for values that a graph would hold for ever: numbers and branches that are made of data.

Torch's tracer warns of each tensor that becomes a Python number, and most of those are sizes, which ortlab binds an
export to (`ortlab.engine.tracing.arguments`). What matters is whether data had a part in it. So what is known
without data is followed here: sizes, constants, and what is computed of these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ortlab.engine.tracing.source_lines import in_onnx_runtime
from ortlab.engine.tracing.traced_values import (
    FACTS,
    SIZES,
    flat,
    function_name,
    holds_numbers,
    is_certain_of_uniform,
)
from ortlab.records.preflight import Finding, Kind

if TYPE_CHECKING:
    from ortlab.engine.inspection.places import Places

_BRANCHES: Final = frozenset({"__bool__", "__contains__", "equal", "allclose", "is_nonzero", "__len__"})
_LIKE: Final = frozenset({"zeros_like", "ones_like", "new_zeros", "new_ones", "new_empty", "empty_like"})
"""Functions that take no value from the tensor that they are given."""

_RANDOM: Final = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "multinomial", "normal"}
)


class FrozenValues(TorchFunctionMode):
    """Report what of the data a trace makes constant, with its place."""

    def __init__(self, places: Places, report: Callable[[Finding], None]) -> None:
        super().__init__()
        self._places = places
        self._report = report
        self._known: dict[int, torch.Tensor] = {}  # kept alive, so that ids stay theirs
        self._uniform: dict[int, torch.Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_tracing_state() is None:
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        self._look(function_name(function), args, kwargs, result)
        return result

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the block."""
        try:
            with self:
                yield
        finally:
            self._known, self._uniform = {}, {}

    def _look(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given = [one for one in flat((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in flat(result) if isinstance(one, torch.Tensor)]
        known = all(id(one) in self._known for one in given)
        if name in SIZES or name in _LIKE or self._is_certain(name, args, given):
            self._known |= {id(one): one for one in made}
        elif made:
            self._follow(name, made, known=known and name not in _RANDOM)
            for one in made:
                self._look_at_result(name, one)
        elif given and not known and name not in FACTS and holds_numbers(result) and not in_onnx_runtime():
            self._frozen(name)
        if name == "register_hook":
            self._add(
                Kind.HOOK,
                "A hook on a tensor is set in the forward; ONNX Runtime does not run it.",
                "Change the gradient in an autograd Function instead.",
            )

    def _follow(self, name: str, made: list[torch.Tensor], *, known: bool) -> None:
        for one in made:
            if known:
                self._known[id(one)] = one
            else:  # data may have been written into it
                self._known.pop(id(one), None)
                if one._is_view() and one._base is not None and name.endswith(("_", "__setitem__")):
                    self._known.pop(id(one._base), None)
            if name in {"rand", "rand_like"}:
                self._uniform[id(one)] = one

    def _is_certain(self, name: str, args: Any, given: list[torch.Tensor]) -> bool:
        """Tell whether a limit alone decides a comparison with a number from [0, 1), as in transformers' layer drop."""
        if len(args) != 2 or not is_certain_of_uniform(name, args[1]):  # noqa: PLR2004
            return False
        return bool(given) and all(id(one) in self._uniform for one in given)

    def _look_at_result(self, name: str, made: torch.Tensor) -> None:
        if made.layout is not torch.strided or made.is_nested:
            kind = str(made.layout).removeprefix("torch.")
            self._add(
                Kind.LAYOUT,
                f"`{name}` makes a tensor of layout {kind}, which ONNX Runtime cannot hold.",
                "Use dense tensors here, or leave this module to PyTorch.",
            )

    def _frozen(self, name: str) -> None:
        plain = name.strip("_")
        if name in _BRANCHES:
            self._add(
                Kind.BRANCH,
                "The forward takes a branch that depends on data; the graph keeps the one that this batch took.",
                "Choose with torch.where, or leave this module to PyTorch.",
            )
        else:
            self._add(
                Kind.NUMBER,
                f"`{plain}` makes a Python value of data; the graph keeps that of this batch.",
                "Compute with the tensor itself, or leave this module to PyTorch.",
            )

    def _add(self, kind: Kind, what: str, fix: str) -> None:
        self._report(Finding.of(kind, what, self._places.here(), fix))
