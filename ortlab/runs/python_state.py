"""State of a step in Python: counters, dicts of averages, generators of random numbers, wherever the step reaches them.

What has a `state_dict` of its own is kept by that (`Snapshot`); here is the rest: what closures, globals and attributes
of the user's objects hold. Put back is what steps have changed; what the user has changed between them stays. Lists
that are only appended to, and numbers that are only counted up, are records of what has happened and decide nothing:
they go on.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ortlab.engine.random_state import GENERATORS, put_state, state_of
from ortlab.engine.tracing import baked_in
from ortlab.engine.tracing.reached import global_names, is_object, used_names, written_by_users

_DEEPEST: Final = 6
_MOST: Final = 5_000
"""Objects that are looked at: those of a step are some dozens."""

_LONGEST: Final = 2_000
"""Longer containers are tables of data; what their items hold is not looked at."""

_LARGEST: Final = 20_000
"""Longer ones are not copied; a run says where a step has changed one, as far as its length and first items tell."""

_SPARE_BYTES: Final = 2**26
"""Tensors and arrays are copied up to twice the bytes of the model and this: averages are, large data is not."""

_CONTAINERS: Final = (list, dict, set, deque)
_ENDLESS: Final = (itertools.count, itertools.cycle)
_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))


_Key: TypeAlias = tuple[int, str]
"""The id of an owner, and the name of what it holds; "" for the content of a container, an array or a generator."""


class _Held:
    """A reference that a deep copy keeps, instead of copying the object."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __deepcopy__(self, memo: object) -> _Held:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment] # it is compared, never looked up


class PythonState:
    """What a step has in Python, with `state_dict` and `load_state_dict`, so that a snapshot keeps it.

    `is_kept` says what has a state that is kept otherwise; `found` are such objects that were reached. `unkept` says
    what cannot be put back.
    """

    def __init__(
        self, step: Callable[..., object], module: torch.nn.Module, is_kept: Callable[[object], bool]
    ) -> None:
        self._step = step
        self._module = module
        self._is_kept = is_kept
        self._lost: dict[str, None] = {}
        self._of_steps: dict[_Key, object] = {}  # what steps change, with its owner, whose id it holds
        codes = _Walk(step, module, is_kept, None).codes
        self._used = frozenset(name for code in codes for name in used_names(code))
        walk = self._walk()
        self.found = walk.found
        self._endless = walk.endless

    @property
    def unkept(self) -> tuple[str, ...]:
        """What a way back to the start does not reach, by the names in the step."""
        return (*self._endless, *self._lost)

    @contextmanager
    def steps_watched(self) -> Iterator[None]:
        """Let steps run in the block: what is other after it is theirs."""
        before = _marks(self._walk())
        try:
            yield
        finally:
            after = _marks(self._walk())
            self._of_steps |= {
                key: owner for key, (mark, owner) in after.items() if before.get(key, (None,))[0] != mark
            }

    def _walk(self) -> _Walk:
        return _Walk(self._step, self._module, self._is_kept, self._used)

    def state_dict(self) -> dict[str, Any]:
        """Return the present state; what it refers to is not copied yet, but for arrays and generators."""
        walk = self._walk()
        return {
            "names": [(_Held(table), name, _plain_or_held(value)) for table, name, value in walk.names],
            "members": [(_Held(owner), set(table)) for owner, table in walk.owners],
            "containers": [
                (_Held(one), [_pair_or_held(one, item) for item in _items(one)]) for one in walk.containers
            ],
            "arrays": [
                (_Held(one), one.detach() if isinstance(one, torch.Tensor) else one.copy())
                for one in walk.arrays
            ],
            "large": [(_Held(one), label, _version(one)) for one, label in walk.large],
            "generators": [(_Held(one), state_of(one)) for one in walk.generators],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: C901 - one case each
        """Put a copy of a state back, in place."""
        for held, members in state["members"]:
            table = vars(held.thing)
            for name in [one for one in table if one not in members and (id(table), one) in self._of_steps]:
                del table[name]
        for held, name, value in state["names"]:
            if (_owner_id(held.thing), name) in self._of_steps:
                held.thing[name] = _unheld(value)
        for held, items in state["containers"]:
            if (id(held.thing), "") in self._of_steps:
                _refill(held.thing, [_unheld(item) for item in items])
        for held, value in state["arrays"]:
            if (id(held.thing), "") in self._of_steps:
                _write_array(held.thing, value)
        for held, label, version in state["large"]:
            if (id(held.thing), "") in self._of_steps and _version(held.thing) != version:
                self._lost[f"{label}, which is too large to keep a copy of"] = None
        for held, value in state["generators"]:
            if (id(held.thing), "") in self._of_steps:
                put_state(held.thing, value)


class _Cell:
    """The cell of a closure as a table with one name."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __setitem__(self, _: str, value: object) -> None:
        self.cell.cell_contents = value


def _owner_id(table: Any) -> int:
    return id(table.cell if isinstance(table, _Cell) else table)


def _marks(walk: _Walk) -> dict[_Key, tuple[object, object]]:
    """Return for each thing that may change what tells whether it has, and its owner."""
    marks: dict[_Key, tuple[object, object]] = {}
    for table, name, value in walk.names:
        marks[_owner_id(table), name] = (_plain_or_held(value), table)
    for one in walk.containers:
        marks[id(one), ""] = ([_pair_or_held(one, item) for item in _items(one)], one)
    for one in walk.arrays:
        marks[id(one), ""] = (_version(one) if isinstance(one, torch.Tensor) else one.tobytes(), one)
    for one, _ in walk.large:
        marks[id(one), ""] = (_version(one), one)
    for one in walk.generators:
        marks[id(one), ""] = (
            repr(state_of(one)) if not isinstance(one, torch.Generator) else state_of(one).tolist(),
            one,
        )
    return marks


class _Walk:
    """One way through everything that a step reaches."""

    def __init__(
        self,
        step: Callable[..., object],
        module: torch.nn.Module,
        is_kept: Callable[[object], bool],
        used: frozenset[str] | None,
    ) -> None:
        self._module = module
        self._is_kept = is_kept
        self._used = used  # names that are followed; None for all
        self._seen: dict[int, object] = {}
        self.codes: list[types.CodeType] = []
        self.found: list[Any] = []
        self.names: list[tuple[Any, str, Any]] = []
        self.owners: list[tuple[object, Mapping[str, Any]]] = []
        self.containers: list[Any] = []
        self.arrays: list[Any] = []
        self.large: list[tuple[Any, str]] = []
        self.generators: list[Any] = []
        self.endless: list[str] = []
        tensors = [*module.parameters(), *module.buffers()]
        self._seen.update((id(one), one) for one in tensors)
        self._room = _SPARE_BYTES + 2 * sum(one.nbytes for one in tensors)
        namespace = getattr(step, "namespace", None)
        if namespace is None:
            self._look(step, "the step", 0)
        else:  # a cell of a notebook
            self._read_code(step.code, namespace, 0)  # type: ignore[attr-defined]
        for part in module.modules():
            for name, value in vars(part).items():
                if name not in _OF_EVERY_MODULE and type(value) in baked_in.PLAIN:
                    self._name(vars(part), name, value, name, 0)

    def _name(self, table: Any, name: str, value: Any, label: str, depth: int) -> None:
        """Look at what a name stands for, if the step reads it."""
        if self._used is not None and name not in self._used:
            return
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            return  # a result; kept, it would keep its whole graph
        if not isinstance(value, (types.ModuleType, type, types.FunctionType)):
            self.names.append((table, name, value))
        self._look(value, label, depth + 1)

    def _look(self, value: Any, label: str, depth: int) -> None:  # noqa: C901 - one case each
        kind = type(value)
        if kind in baked_in.PLAIN or id(value) in self._seen or len(self._seen) > _MOST or depth > _DEEPEST:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._look_at_function(value, depth)
        elif isinstance(value, (types.MethodType, functools.partial)):
            for name in ("__self__", "__func__", "func", "args", "keywords"):
                self._look(getattr(value, name, None), label, depth + 1)
        elif isinstance(value, (torch.Generator, *GENERATORS)):
            self.generators.append(value)
        elif isinstance(value, _ENDLESS):
            self.endless.append(f"{label}, a {kind.__name__} of itertools")
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            self._look_at_array(value, label)
        elif isinstance(value, (*_CONTAINERS, tuple)):
            self._look_at_container(value, label, depth)
        elif isinstance(value, type) or value is self._module:
            return
        elif self._is_kept(value):
            self.found.append(value)
        elif is_object(value) or (
            kind.__module__.startswith("torch.utils.data") and hasattr(value, "__dict__")
        ):
            self._look_at_object(value, label, depth)

    def _look_at_container(self, value: Any, label: str, depth: int) -> None:
        if not isinstance(value, tuple):
            if len(value) > _LARGEST:
                self.large.append((value, label))
            else:
                self.containers.append(value)
        if len(value) > _LONGEST:
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            self._look(item, f"{label}[{key!r}]", depth + 1)

    def _look_at_function(self, function: types.FunctionType, depth: int) -> None:
        inner = inspect.unwrap(function)
        if not isinstance(inner, types.FunctionType) or not written_by_users(inner):
            return
        for name, cell in zip(inner.__code__.co_freevars, baked_in.cells(inner), strict=True):
            self._name(_Cell(cell), name, baked_in.content(cell), name, depth)
        for value in (*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values()):
            self._look(value, f"a default of {inner.__name__}", depth + 1)
        self._read_code(inner.__code__, inner.__globals__, depth)

    def _read_code(self, code: types.CodeType, table: dict[str, Any], depth: int) -> None:
        self.codes.append(code)
        for name in global_names(code):
            if name in table:
                self._name(table, name, table[name], name, depth)

    def _look_at_object(self, value: Any, label: str, depth: int) -> None:
        for kind in type(value).__mro__:
            for function in baked_in.functions_of(kind).values():
                self._look(function, label, depth)
        table = getattr(value, "__dict__", None)
        if table is not None:
            self.owners.append((value, table))
            for name, inner in list(table.items()):
                self._name(table, name, inner, f"{label}.{name}", depth)

    def _look_at_array(self, value: Any, label: str) -> None:
        if isinstance(value, torch.Tensor):
            if (
                value.grad_fn is not None
                or value.is_inference()
                or value.is_meta
                or value.layout is not torch.strided
            ):
                return
            if value.nbytes > self._room:
                self.large.append((value, label))
                return
        elif value.dtype.hasobject or value.nbytes > self._room:
            return
        self._room -= value.nbytes
        self.arrays.append(value)


def _version(value: Any) -> int:
    """Return what is another number after a tensor, or a long container, has changed."""
    if isinstance(value, torch.Tensor):
        return value._version  # noqa: SLF001 - the name that torch's own documents give it
    items = value.values() if isinstance(value, dict) else value
    return hash((len(value), *map(id, itertools.islice(items, _LARGEST))))


def _write_array(array: Any, value: Any) -> None:
    if isinstance(array, torch.Tensor):
        with torch.no_grad():
            array.copy_(value)
    elif array.flags.writeable:
        array[...] = value


def _plain_or_held(value: Any) -> Any:
    return value if type(value) in baked_in.PLAIN else _Held(value)


def _pair_or_held(container: Any, item: Any) -> Any:
    return (
        (_plain_or_held(item[0]), _plain_or_held(item[1]))
        if isinstance(container, dict)
        else _plain_or_held(item)
    )


def _unheld(item: Any) -> Any:
    if type(item) is tuple:
        return tuple(map(_unheld, item))
    return item.thing if isinstance(item, _Held) else item


def _items(container: Any) -> Iterator[Any]:
    yield from container.items() if isinstance(container, dict) else container


def _refill(container: Any, items: list[Any]) -> None:
    if len(container) == len(items) and all(map(_is_same, _items(container), items)):
        return
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(items)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is tuple and all(map(_is_same, one, other)))
