"""What a forward carries from one call to the next in Python: counters, flags, hidden states kept in attributes.

A graph holds what an attribute was when it was traced, and leaves it as it is. ORTModule 1.19.2 trains with that value
for ever, without a word. So a forward that changes something it reads again is refused, and so is one whose first call
computes something else than later ones, as with an initialisation by the first batch. What is only counted up is said.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ortlab.engine.patching import replace
from ortlab.engine.random_state import RandomState
from ortlab.engine.tracing import baked_in
from ortlab.engine.tracing.graph_inputs import Buffers
from ortlab.engine.tracing.reached import MISSING, Reached, Variable
from ortlab.engine.tracing.traced_values import FACTS, SIZES, function_name
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
        before = Moment(module)
        try:
            exported = original(flattened_module=flattened_module, **kwargs)
            first = Moment(module)
            if before.differing(first):
                _look_closer(before, first, flattened_module, inputs)
        except BaseException:
            before.put_back()
            raise
        return exported

    return export_model


def _look_closer(before: Moment, first: Moment, flattened: Any, inputs: Sequence[Any]) -> None:
    """Run the forward again: what changes once more is carried along, what does not was settled by the first call."""

    def run() -> list[Any]:
        """Return what the forward returns for these inputs, and the inputs, since it may write to them."""
        copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in inputs]
        return [flattened(*copies), copies]

    with _as_it_is(flattened, first):
        with _as_it_is(flattened):
            run()  # a trace may leave tensors where there are numbers otherwise
        second = Moment(flattened._original_module)
        with _Used(second.tensors) as used:
            settled = run()
        again = second.changed()
    _check(again, used, first.reached)
    labels = before.differing(first) - {one.label for one in again}
    if not labels:
        return
    with _as_it_is(flattened, first):
        before.put_back()
        unsettled = run()
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


class Moment:
    """Attributes of a module's parts, and what else its forward reaches, as they are at one moment."""

    # With `writes`, a tensor has changed where it was written to, too; otherwise where it is another one.

    def __init__(self, module: torch.nn.Module, *, writes: bool = False) -> None:
        self.reached = Reached(module)
        self._state = baked_in.state if writes else _state
        self._writes = writes
        self._owners: list[tuple[Any, str]] = [
            (part, f"self.{{}} of {type(part).__name__}") for part in module.modules()
        ]
        self._config = module.__dict__.get("config")
        self._owners += [(self._config, "config.{}")] if hasattr(self._config, "__dict__") else []
        self._names = [set(vars(owner)) for owner, _ in self._owners]
        found = [*self._attributes(), *self.reached.variables]
        # A first call may put hooks on: transformers does, to give out hidden states.
        self._hooks = [
            (table, dict(table))
            for part in module.modules()
            for name, table in vars(part).items()
            if name in baked_in.OF_EVERY_MODULE and "_hooks" in name and isinstance(table, dict)
        ]
        self._known = [
            _Known(one, value, _content_of(value), self._state(value))
            for one in found
            if baked_in.matters(value := one.value) and type(value) not in baked_in.FUNCTIONS
        ]
        self.tensors = [one.value for one in self._known if isinstance(one.value, torch.Tensor)]

    def _attributes(self) -> Iterator[Variable]:
        for owner, label in self._owners:
            for name in vars(owner):
                own = owner is self._config or name not in baked_in.OF_EVERY_MODULE
                if own and not name.startswith("_ortlab"):
                    yield Variable(owner, vars(owner), name, label.format(name))

    def differing(self, later: Moment) -> set[str]:
        """Return the labels of what has another value at a later moment."""
        mine = {(id(one.variable.table), one.variable.name): one.state for one in self._known}
        return {
            one.label
            for one in later._known
            if one.state != mine.get((id(one.variable.table), one.variable.name), MISSING)
        }

    def added(self) -> list[Variable]:
        """Return the attributes that there are now and were not then."""
        names = {id(owner): names for (owner, _), names in zip(self._owners, self._names, strict=True)}
        return [
            one
            for one in self._attributes()
            if one.name not in names[id(one.owner)] and baked_in.matters(one.value)
        ]

    def changed(self) -> list[_Known]:
        """Return what has another value now."""
        return [
            one
            for one in self._known
            if (
                one.variable.value is not one.value
                if isinstance(one.value, torch.Tensor) and not self._writes
                else self._state(one.variable.value) != one.state
            )
        ]

    def put_back(self) -> None:
        """Give everything the value that it had, containers their content, and take out what was not there."""
        for one in self._known:
            value = _refilled(one.value, one.content)
            if one.variable.value is not value:
                one.variable.put(value)
        for (owner, _), names in zip(self._owners, self._names, strict=True):
            for name in [
                name for name in vars(owner) if name not in names and not name.startswith("_ortlab")
            ]:
                del vars(owner)[name]
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
def _as_it_is(flattened: Any, moment: Moment | None = None) -> Iterator[None]:
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


def _content_of(value: object) -> object:
    """Return a copy of what a container holds; None for other values."""
    return copy.copy(value) if isinstance(value, (list, dict, set)) else None


def _refilled(value: object, content: object) -> object:
    """Return a container with the content that `_content_of` has copied; another value as it is."""
    if isinstance(value, list) and isinstance(content, list):
        value[:] = content
    elif isinstance(value, (dict, set)) and isinstance(content, (dict, set)) and value != content:
        value.clear()
        value.update(content)  # type: ignore[arg-type] # of the same kind as the value
    return value


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two results of a forward are the same but for rounding."""
    pairs = zip(_pytree.tree_leaves(one), _pytree.tree_leaves(other), strict=False)
    return all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True)
        for a, b in pairs
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and not a.is_complex()
    )
