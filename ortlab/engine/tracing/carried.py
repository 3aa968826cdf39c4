"""What a forward carries from one call to the next in Python: counters, flags, hidden states kept in attributes.

A graph holds what an attribute was when it was traced, and leaves it as it is. ORTModule 1.19.2 trains with that value
for ever, without a word. So a forward that changes something it reads again is refused, and so is one whose first call
computes something else than later ones, as with an initialisation by the first batch. What is only counted up is said.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ortlab.engine.inspection.changes import content_of, refilled
from ortlab.engine.patching import replace
from ortlab.engine.random_state import RandomState
from ortlab.engine.tracing import baked_in
from ortlab.engine.tracing.buffers import Buffers
from ortlab.engine.tracing.reached import MISSING, Reached, Variable
from ortlab.engine.tracing.traced_values import FACTS, SIZES, function_name
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))
_DEEPEST: Final = 3
_LONGEST: Final = 64


class CarriedStateError(BuildError):
    """Raised where a forward computes with what an earlier call of it has left in Python."""


def install() -> None:
    """Look at each export of ORTModule. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_export_model", _see_what_is_carried)


def _see_what_is_carried(original: Callable[..., Any]) -> Callable[..., Any]:
    def export_model(*, flattened_module: torch.nn.Module, **kwargs: Any) -> Any:
        module: Any = flattened_module._original_module
        inputs = kwargs["flatten_module_inputs"]
        before = _Moment(module)
        try:
            exported = original(flattened_module=flattened_module, **kwargs)
            first = _Moment(module)
            if before.differing(first):
                _look_closer(before, first, flattened_module, inputs)
        except BaseException:
            before.put_back()
            raise
        return exported

    return export_model


def _look_closer(before: _Moment, first: _Moment, flattened: Any, inputs: Sequence[Any]) -> None:
    """Run the forward again: what changes once more is carried along, what does not was settled by the first call."""
    with _as_it_is(flattened, first):
        with _as_it_is(flattened):
            flattened(*inputs)  # a trace may leave tensors where there are numbers otherwise
        second = _Moment(flattened._original_module)
        with _Used(second.tensors) as used:
            settled = flattened(*inputs)
        again = second.changed()
    _check(again, used, first.reached)
    labels = before.differing(first) - {one.label for one in again}
    if not labels:
        return
    with _as_it_is(flattened, first):
        before.put_back()
        unsettled = flattened(*inputs)
    if not _alike(settled, unsettled):
        raise CarriedStateError(
            f"The first call of this module computes something else than later ones: it settles {_listed(labels)}.",
            why="A graph holds one of the two.",
            fix="Call the model once before ONNX Runtime runs it: lab.set(engine='eager'), one step, then "
            "lab.set(engine='ort').",
        )


class _Known(NamedTuple):
    """A variable with its value at one moment."""

    variable: Variable
    value: Any
    content: Any  # a copy of what a container holds
    state: object

    @property
    def label(self) -> str:
        return self.variable.label


class _Moment:
    """Attributes of a module's parts, and what else its forward reaches, as they are at one moment."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.reached = Reached(module)
        owners: list[tuple[Any, str]] = [
            (part, f"self.{{}} of {type(part).__name__}") for part in module.modules()
        ]
        config = module.__dict__.get("config")
        owners += [(config, "config.{}")] if hasattr(config, "__dict__") else []
        found = [
            Variable(owner, vars(owner), name, label.format(name))
            for owner, label in owners
            for name in vars(owner)
            if not name.startswith("_ortlab") and (owner is config or name not in _OF_EVERY_MODULE)
        ]
        found += self.reached.variables
        self._tables = [(vars(owner), set(vars(owner))) for owner, _ in owners]
        # A first call may put hooks on: transformers does, to give out hidden states.
        self._hooks = [
            (table, dict(table))
            for part in module.modules()
            for name, table in vars(part).items()
            if name in _OF_EVERY_MODULE and "_hooks" in name and isinstance(table, dict)
        ]
        self._known = [
            _Known(one, value, content_of(value), _state(value))
            for one in found
            if baked_in.matters(value := one.value) and type(value) not in baked_in.FUNCTIONS
        ]
        self.tensors = [one.value for one in self._known if isinstance(one.value, torch.Tensor)]

    def differing(self, later: _Moment) -> set[str]:
        """Return the labels of what has another value at a later moment."""
        mine = {(id(one.variable.table), one.variable.name): one.state for one in self._known}
        return {
            one.label
            for one in later._known
            if one.state != mine.get((id(one.variable.table), one.variable.name), MISSING)
        }

    def changed(self) -> list[_Known]:
        """Return what has another value now; of a tensor, what is another tensor."""
        return [
            one
            for one in self._known
            if (
                one.variable.value is not one.value
                if isinstance(one.value, torch.Tensor)
                else _state(one.variable.value) != one.state
            )
        ]

    def put_back(self) -> None:
        """Give everything the value that it had, containers their content, and take out what was not there."""
        for one in self._known:
            value = refilled(one.value, one.content)
            if one.variable.value is not value:
                one.variable.put(value)
        for table, names in self._tables:
            for name in [name for name in table if name not in names]:
                del table[name]
        for table, hooks in self._hooks:
            if table != hooks:
                table.clear()
                table.update(hooks)


class _Used(TorchFunctionMode):
    """Notes which of some tensors a forward computes with."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._wanted = {id(one) for one in tensors}
        self.ids: set[int] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function_name(function) not in FACTS | SIZES:
            self.ids |= self._wanted & set(map(id, _pytree.tree_leaves((args, kwargs))))
        return function(*args, **kwargs)


@contextmanager
def _as_it_is(flattened: Any, moment: _Moment | None = None) -> Iterator[None]:
    """Let a forward run in the block and put buffers and random state back, and what a moment knows."""
    buffers, random = Buffers(flattened), RandomState.read()
    try:
        with torch.no_grad():
            yield
    finally:
        if moment is not None:
            moment.put_back()
        buffers.restore()
        random.put_back()


def _check(again: list[_Known], used: _Used, reached: Reached) -> None:
    """Refuse what changes in every call and is used; say what is only counted up."""
    tensors = [one for one in again if isinstance(one.value, torch.Tensor)]
    plain = [one for one in again if not isinstance(one.value, torch.Tensor)]
    carried = [one.label for one in tensors if id(one.value) in used.ids]
    carried += [one.label for one in plain if reached.uses(one.variable.name)]
    if carried:
        raise CarriedStateError(
            f"The forward changes {_listed(carried)} in every call, and uses it.",
            why="A graph holds the value of the call that was exported: every later step would compute with that one.",
            fix="Hand it in as an argument of the forward, or leave the module that owns it to PyTorch: "
            "ortlab.wrap(model, only=[...]), or lab.set(engine='eager').",
        )
    if plain:
        warnings.warn(
            f"The forward changes {_listed([one.label for one in plain])} in every call. ONNX Runtime does not run "
            "that line: it stays as it was after the export.",
            stacklevel=2,
        )


def _listed(labels: Iterable[str]) -> str:
    return ", ".join(sorted(set(labels)))


def _state(value: object, depth: int = 0) -> object:
    """Return the state of a value, where a tensor, which is another one after each call, counts for its kind."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if isinstance(value, baked_in.CONTAINERS) and depth < _DEEPEST and len(value) <= _LONGEST:
        items = value.values() if isinstance(value, dict) else value
        return [type(value), *(_state(item, depth + 1) for item in items)]
    return baked_in.state(value, depth)


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two results of a forward are the same but for rounding."""
    pairs = zip(_pytree.tree_leaves(one), _pytree.tree_leaves(other), strict=False)
    return all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True)
        for a, b in pairs
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and not a.is_complex()
    )
