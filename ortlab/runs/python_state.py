"""State of a step in Python: counters, dicts of averages, generators of random numbers, wherever the step reaches them.

What has a `state_dict` of its own is kept by that (`Snapshot`); here is the rest: what closures, globals and attributes
of the user's objects and classes hold, numbers of the model's parts, and hooks. Put back is what steps have changed;
what the user has changed between them stays. Lists that are only appended to, and numbers that are only counted up, are
records of what has happened and decide nothing: they go on.
"""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ortlab.engine.random_state import GENERATORS, put_state, state_of
from ortlab.engine.tracing import baked_in
from ortlab.engine.tracing.baked_in import global_names, used_names
from ortlab.engine.tracing.reached import is_installed, is_object, written_by_users

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
_OF_EVERY_MODULE: Final = baked_in.OF_EVERY_MODULE - {"_is_full_backward_hook"}
_OF_TENSORS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
_NO_STATE: Final = (io.IOBase, torch.utils.data.dataloader._BaseDataLoaderIter)  # noqa: SLF001
"""Iterators that are no loss: a file that a step writes to, and one whose batches a run's data digest tells."""

_OURS: Final = ("ortlab.", "onnxruntime.")
"""Modules whose hooks an engine puts on and off by itself."""


_Key: TypeAlias = tuple[int, str]
"""The id of an owner, and the name of what it holds; "" for the content of a container, an array or a generator, and
`_HOOKS` for the hooks of a module, a tensor or an optimizer."""

_HOOKS: Final = "hooks of"


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
    """What a step has in Python, with `state_dict` and `load_state_dict`, so that a snapshot keeps it."""

    # `is_kept` says what has a state that is kept otherwise; `found` are such objects that were reached. `unkept` says
    # what cannot be put back.

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
                key: owner
                for key, (_, owner) in (before | after).items()
                if before.get(key, (None,))[0] != after.get(key, (None,))[0]
            }

    def _walk(self) -> _Walk:
        return _Walk(self._step, self._module, self._is_kept, self._used)

    def state_dict(self) -> dict[str, Any]:
        """Return the present state; what it refers to is not copied yet, but for arrays and generators."""
        walk = self._walk()
        return {
            "names": [(_Held(table), name, _plain_or_held(value)) for table, name, value in walk.names],
            "members": [(_Held(owner), set(table)) for owner, table in (*walk.owners, *walk.parts)],
            "hooks": [(_Held(one), _Held(hooks)) for one in walk.hooked if (hooks := _hooks_of(one))],
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: C901, PLR0912 - one case each
        """Put a copy of a state back, in place."""
        for held, members in state["members"]:
            table = vars(held.thing)
            for name in [one for one in table if one not in members and (id(table), one) in self._of_steps]:
                del table[name]
        for held, name, value in state["names"]:
            if (_owner_id(held.thing), name) in self._of_steps:
                held.thing[name] = _unheld(value)
        hooks = {id(held.thing): kept.thing for held, kept in state["hooks"]}
        for (number, name), owner in self._of_steps.items():
            if name == _HOOKS:
                _put_hooks(owner, hooks.get(number, {}))
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


class _Named:
    """The cell of a closure as a table with one name, or a class as one with those of its members."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __setitem__(self, name: str, value: object) -> None:
        setattr(self.owner, name if isinstance(self.owner, type) else "cell_contents", value)


def _owner_id(table: Any) -> int:
    return id(table.owner if isinstance(table, _Named) else table)


def _marks(walk: _Walk) -> dict[_Key, tuple[object, object]]:
    """Return for each thing that may change what tells whether it has, and its owner."""
    marks: dict[_Key, tuple[object, object]] = {}
    for _, members in walk.parts:  # a tensor that hides a parameter, as pruning puts one there
        for name, value in members.items():
            if isinstance(value, torch.Tensor):
                marks[id(members), name] = (id(value), members)
    for one in walk.hooked:
        marks[id(one), _HOOKS] = ([*_hooks_of(one)], one)
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
        self.hooked: list[Any] = []
        self.parts: list[tuple[object, Mapping[str, Any]]] = []
        tensors = [*module.parameters(), *module.buffers()]
        self._seen.update((id(one), one) for one in tensors)
        self._room = _SPARE_BYTES + 2 * sum(one.nbytes for one in tensors)
        namespace = getattr(step, "namespace", None)
        if namespace is None:
            self._look(step, "the step", 0)
        else:  # a cell of a notebook
            self._read_code(step.code, namespace, 0)  # type: ignore[attr-defined]
        self.hooked += tensors
        for part in module.modules():
            self._look_at_part(part)

    def _name(self, table: Any, name: str, value: Any, label: str, depth: int) -> None:
        """Look at what a name stands for, if the step reads it."""
        if self._used is not None and name not in self._used:
            return
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            return  # a result; kept, it would keep its whole graph
        if not isinstance(value, (types.ModuleType, type, types.FunctionType)):
            self.names.append((table, name, value))
        self._look(value, label, depth + 1)

    def _look(self, value: Any, label: str, depth: int) -> None:  # noqa: C901, PLR0912 - one case each
        kind = type(value)
        if kind in baked_in.PLAIN or id(value) in self._seen or len(self._seen) > _MOST or depth > _DEEPEST:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._look_at_function(value, depth)
        elif isinstance(value, (types.MethodType, functools.partial)):
            for name in ("__self__", "__func__", "func", "args", "keywords"):
                self._look(getattr(value, name, None), label, depth + 1)
        elif isinstance(value, random.SystemRandom):  # has no state
            self.endless.append(f"{label}, a {kind.__name__}")
        elif isinstance(value, (torch.Generator, *GENERATORS)):
            self.generators.append(value)
        elif hasattr(kind, "__next__") and is_installed(kind) and not isinstance(value, _NO_STATE):
            of = " of itertools" if kind.__module__ == "itertools" else ""
            self.endless.append(f"{label}, a {kind.__name__}{of}")
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            self._look_at_array(value, label)
        elif isinstance(value, (*_CONTAINERS, tuple)):
            self._look_at_container(value, label, depth)
        elif value is self._module:
            return
        elif isinstance(value, type):
            self._look_at_class(value, depth)
        elif self._is_kept(value):
            self.found.append(value)
            if isinstance(value, torch.optim.Optimizer):
                self.hooked.append(value)
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
            self._name(_Named(cell), name, baked_in.content(cell), name, depth)
        for value in (*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values()):
            self._look(value, f"a default of {inner.__name__}", depth + 1)
        self._read_code(inner.__code__, inner.__globals__, depth)

    def _read_code(self, code: types.CodeType, table: dict[str, Any], depth: int) -> None:
        self.codes.append(code)
        for name in global_names(code):
            if name in table:
                self._name(table, name, table[name], name, depth)

    def _look_at_class(self, kind: type, depth: int) -> None:
        if is_installed(kind):
            return
        for function in baked_in.functions_of(kind).values():
            self._look(function, kind.__name__, depth)
        for name, value in vars(kind).items():
            if not name.startswith("__") and (
                type(value) in baked_in.PLAIN or isinstance(value, _CONTAINERS)
            ):
                self._name(_Named(kind), name, value, f"{kind.__name__}.{name}", depth)

    def _look_at_part(self, part: torch.nn.Module) -> None:
        """Look at the numbers and texts of a part of the model that its forward, or that of a library, may read."""
        for kind in type(part).__mro__:
            self._look(kind, "", 0)
        table = vars(part)
        self.parts.append((part, table))
        self.hooked.append(part)
        of_library = is_installed(type(part))
        for name, value in table.items():
            if name in _OF_EVERY_MODULE or type(value) not in baked_in.PLAIN:
                continue
            if of_library or self._used is None or name in self._used:
                self.names.append((table, name, value))

    def _look_at_object(self, value: Any, label: str, depth: int) -> None:
        for kind in type(value).__mro__:
            self._look(kind, label, depth)
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


def _tables_of_hooks(owner: Any) -> dict[str, dict[int, Any]]:
    if isinstance(owner, torch.Tensor):
        found = {name: getattr(owner, name, None) for name in _OF_TENSORS}
    else:
        found = {name: one for name, one in vars(owner).items() if "_hooks" in name}
    return {name: one for name, one in found.items() if isinstance(one, dict)}


def _hooks_of(owner: Any) -> dict[tuple[str, int], Any]:
    """Return the hooks of a module, a tensor or an optimizer, but for those of an engine."""
    found = {
        (name, key): hook for name, table in _tables_of_hooks(owner).items() for key, hook in table.items()
    }
    # Beside the table of hooks stand tables of flags ("with kwargs"), under the same keys.
    ours = {key for (_, key), hook in found.items() if str(getattr(hook, "__module__", "")).startswith(_OURS)}
    return {place: hook for place, hook in found.items() if place[1] not in ours}


def _put_hooks(owner: Any, kept: Mapping[tuple[str, int], Any]) -> None:
    """Take away the hooks that are not kept, and put back those that are missing."""
    tables = _tables_of_hooks(owner)
    for name, key in _hooks_of(owner).keys() - kept.keys():
        del tables[name][key]
    for (name, key), hook in kept.items():
        tables[name].setdefault(key, hook)


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
