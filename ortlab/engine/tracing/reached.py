"""What a forward reads besides its modules' own attributes: global variables, and attributes of objects and classes.

A trace holds their values, so a forward that branches on ``settings.DEBUG`` or multiplies with ``self.cfg.scale`` has
to be traced anew once these are others. What counts is what stands in the code that `forward` can reach by names: other
variables of a notebook, and the rest of a large object, may change as they like. Where code computes a name, as
``getattr(settings, f"scale_{index}")`` does, all attributes of that object count.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from operator import not_
from typing import Any, Final, NamedTuple

import torch

from ortlab.engine.tracing import baked_in
from ortlab.engine.tracing.baked_in import names_in, reads_itself, used_names
from ortlab.engine.tracing.source_lines import is_model_code

MISSING: Final = object()
"""The value of a variable that is not there."""

_ANY_NAME: Final = frozenset(("vars", "__dict__", "asdict"))
"""Names of what reaches attributes whose names do not stand in the code."""

_READS_ANY: Final = frozenset(("__getattr__", "__getattribute__"))
"""Methods of a class that makes other attributes of the names in the code."""

_NAMESPACES: Final = (types.SimpleNamespace, argparse.Namespace)
_LIBRARIES: Final = frozenset(("torch", "numpy", "onnxruntime", "ortlab", *sys.stdlib_module_names))
_UNCHANGING: Final = frozenset((torch.nn.Module, torch.Tensor, object))
_CONSTRUCTION: Final = frozenset(("__init__", "__new__", "__post_init__", "__init_subclass__", "__del__"))

_MOST: Final = 200
"""Objects that are looked into: a forward that reads settings reaches a few."""

_LONGEST: Final = 64
"""Longer lists and dicts are not searched for objects."""


class Variable(NamedTuple):
    """A place that holds a value: a name in a table of names."""

    owner: object  # the object, class or module of Python that it belongs to
    table: Mapping[str, Any]
    name: str
    label: str  # to the user

    @property
    def value(self) -> Any:
        """The present value; `MISSING` if there is none."""
        return self.table.get(self.name, MISSING)

    def put(self, value: object) -> None:
        """Give it another value."""
        if isinstance(self.table, dict):
            self.table[self.name] = value
        elif isinstance(self.owner, type):
            setattr(self.owner, self.name, value)
        else:  # also of a frozen dataclass with slots
            object.__setattr__(self.owner, self.name, value)


class _Slots(Mapping[str, Any]):
    """The attributes of an object that has slots and no ``__dict__``."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        kinds = type(owner).__mro__
        found = [vars(kind).get("__slots__", ()) for kind in kinds]
        self._names = [name for one in found for name in ((one,) if isinstance(one, str) else one)]

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_object(value: object) -> bool:
    """Tell whether a value is an object of the user's whose attributes a forward may read, such as a config."""
    kind = type(value)
    if baked_in.matters(value) or isinstance(value, (type, types.ModuleType, torch.nn.Module)):
        return False
    library = kind.__module__.partition(".")[0] in _LIBRARIES
    if library and kind not in _NAMESPACES and not dataclasses.is_dataclass(kind):
        return False
    return hasattr(value, "__dict__") or any("__slots__" in vars(one) for one in kind.__mro__)


class Reached:
    """The variables that the forward of a module reaches, as its code and objects are now."""

    # `functions` are more functions that its forward consists of. The settings of the model, its `config`, are left to
    # the caller.

    def __init__(self, module: torch.nn.Module, functions: Iterable[object] = ()) -> None:
        self.variables: list[Variable] = []
        self.awaited: set[str] = set()  # modules that the forward imports, and that are not loaded yet
        self._names: set[str] = {"forward"}
        self._any_of: set[str] = set()
        self._functions: dict[int, types.FunctionType] = {}
        self._pending: list[types.FunctionType] = []
        self._classes: dict[type, None] = {}
        self._owners: dict[int, tuple[object, Mapping[str, Any], str]] = {}
        self._seen: set[tuple[int, str]] = set()
        self._settings = module.__dict__.get("config")
        parts = dict(module.named_modules())
        for function in functions:
            self._add_function(function)
        for part in parts.values():
            self._add_class(type(part))
            for table in (part.__dict__, part._forward_hooks, part._forward_pre_hooks):
                for value in table.values():
                    self._add_function(value)
        found = True
        while found:
            found = self._read_functions() | self._read_parts(parts) | self._read_owners()
        by_identity = [_by_identity(one.value) for one in self.variables]
        places = [(one.table, one.name) for one in self.variables]
        self._others = [*compress(places, by_identity)]
        self._compared = [*compress(places, map(not_, by_identity))]
        self.tables = [table for _, table, _ in self._owners.values()]
        self.functions = [*self._functions.values()]

    def values(self) -> tuple[list[object], list[object]]:
        """Return the objects whose values a trace would find, and those that count as what they are."""
        compared, others = (
            [table.get(name, MISSING) for table, name in places] for places in (self._compared, self._others)
        )
        return compared, others

    def described(self) -> Iterator[tuple[str, str]]:
        """Yield each variable and its value in words that mean the same in another process."""
        labels: dict[str, int] = {}
        for one in self.variables:
            value, times = one.value, labels.setdefault(one.label, 0)
            labels[one.label] += 1
            again = (
                f" ({times + 1})" if times else ""
            )  # as of a class that another one with its name inherits from
            yield one.label + again, "missing" if value is MISSING else baked_in.describe(value)

    def uses(self, name: str) -> bool:
        """Tell whether the code reads an attribute or a global of that name for more than to count it up or fill it."""
        return any(name in used_names(one.__code__) for one in self.functions)

    # ---- how it is found ----------------------------------------------------------------------------------------

    def _read_functions(self) -> bool:
        found = bool(self._pending)
        while self._pending:
            function = self._pending.pop()
            found_names = names_in(function.__code__)
            self._names |= found_names.all
            for path in found_names.paths:
                self._follow(function, path)
            if not is_installed(function):
                self._any_of |= found_names.any_of
                for imported in found_names.imports:
                    self._import(function, *imported)
            for name, cell in zip(function.__code__.co_freevars, baked_in.cells(function), strict=True):
                self._look_at(baked_in.content(cell), name)
        for kind in list(self._classes):
            for name, function in baked_in.functions_of(kind).items():
                special = name.startswith("__") and name.endswith("__") and name not in _CONSTRUCTION
                if special or name in self._names:
                    self._add_function(function)
        return found or bool(self._pending)

    def _read_parts(self, parts: Mapping[str, torch.nn.Module]) -> bool:
        before = len(self._owners)
        for path, part in parts.items():
            where = f"{path}." if path else ""
            for name, value in part.__dict__.items():
                if (
                    name not in baked_in.OF_EVERY_MODULE
                    and value is not self._settings
                    and name in self._names
                ):
                    self._look_at(value, f"{where}{name}", part.__dict__, name)
        return len(self._owners) > before

    def _read_owners(self) -> bool:
        found = False
        for owner, table, label in list(self._owners.values()):
            every = bool(_ANY_NAME & self._names) and not isinstance(owner, types.ModuleType)
            every |= label.rpartition(".")[2].removeprefix("global ") in self._any_of
            every |= not isinstance(owner, type) and any(
                name in _READS_ANY
                or (name in self._names and not is_installed(kind) and reads_itself(function))
                for kind in _own_classes(type(owner))
                for name, function in baked_in.functions_of(kind).items()
            )
            for name in list(table):
                wanted = every or name in self._names
                if wanted and not name.startswith("__") and (id(owner), name) not in self._seen:
                    self._seen.add((id(owner), name))
                    if isinstance(owner, type) and not _is_value(table[name]):
                        continue
                    found = True
                    self._add(Variable(owner, table, name, f"{label}.{name}"))
        return found

    def _follow(self, function: types.FunctionType, path: tuple[str, ...]) -> None:
        """Follow a global name, through modules of Python, to the variable that it stands for."""
        owner: Any = function.__globals__
        table: Mapping[str, Any] = function.__globals__
        for position, name in enumerate(path):
            value = table.get(name, MISSING)
            if isinstance(value, types.ModuleType) and position + 1 < len(path):
                if not _is_users(getattr(value, "__file__", None)):
                    return
                owner, table = value, vars(value)
                continue
            if value is MISSING or isinstance(value, types.ModuleType) or (id(table), name) in self._seen:
                return
            self._seen.add((id(table), name))
            if is_installed(function) and type(value) not in baked_in.PLAIN:  # a registry, which others fill
                self._add_function(value)
            else:
                self._add(Variable(owner, table, name, f"global {'.'.join(path[: position + 1])}"))
            return

    def _import(self, function: types.FunctionType, level: int, name: str, parts: tuple[str, ...]) -> None:
        """Look into the user's modules that a function imports while it runs."""
        try:
            full = importlib.util.resolve_name("." * level + name, function.__globals__.get("__package__"))
        except ImportError:  # which running it raises, too
            return
        outer = full.split(".")
        for one in (
            *(".".join(outer[: end + 1]) for end in range(len(outer))),
            *(f"{full}.{part}" for part in parts),
        ):
            module = sys.modules.get(one)
            if module is None:
                self.awaited.add(one)
            elif _is_users(file := getattr(module, "__file__", None)) and "-packages" not in str(file):
                self._owners.setdefault(id(module), (module, vars(module), one))

    def _add(self, variable: Variable) -> None:
        value = variable.value
        if isinstance(value, torch.nn.Module):
            return
        if isinstance(value, (type, types.FunctionType)):
            if not is_installed(value):
                self.variables.append(variable)
            self._look_at(value, variable.label)
        elif baked_in.matters(value) or is_object(value):
            self.variables.append(variable)
            self._look_at(value, variable.label)

    def _look_at(
        self, value: object, label: str, table: Mapping[str, Any] | None = None, name: str = ""
    ) -> None:
        """Look into a value that code reaches; `table` and `name` say where an object stands that may be replaced."""
        if isinstance(value, (list, tuple, dict)) and len(value) <= _LONGEST:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if is_object(item):
                    self._own(item, f"{label}[{key!r}]")
        elif isinstance(value, type):
            # The code of a Function runs in each step, so that a trace holds nothing of what it reads.
            held = (torch.nn.Module, torch.Tensor, torch.autograd.Function)
            if value not in self._classes and not issubclass(value, held):
                self._add_class(value)
        elif is_object(value):
            if table is not None and (id(table), name) not in self._seen:
                self._seen.add((id(table), name))
                self.variables.append(Variable(None, table, name, label))
            self._own(value, label)
        else:
            self._add_function(value)

    def _own(self, value: object, label: str) -> None:
        if id(value) in self._owners or len(self._owners) >= _MOST:
            return
        table = vars(value) if hasattr(value, "__dict__") else _Slots(value)
        self._owners[id(value)] = (value, table, label)
        self._add_class(type(value))

    def _add_class(self, kind: type) -> None:
        for body in _own_classes(kind):
            if body not in self._classes:
                self._classes[body] = None
                if not issubclass(body, enum.Enum) and not is_installed(body):
                    self._owners[id(body)] = (body, vars(body), body.__qualname__)

    def _add_function(self, value: object) -> None:
        # By type: what an object's own `__getattr__` answers, as that of `pytest.mark`, is no function of it.
        function: Any = (
            value.__func__ if isinstance(value, (types.MethodType, staticmethod, classmethod)) else value
        )
        function = function.func if isinstance(function, functools.partial) else function
        while isinstance(function, types.FunctionType) and id(function) not in self._functions:
            self._functions[id(function)] = function
            if is_model_code(function.__code__.co_filename):
                self._pending.append(function)
            function = getattr(function, "__wrapped__", None)


def _own_classes(kind: type) -> Iterator[type]:
    """Yield a class and those that it inherits from, but for classes of torch, numpy and Python."""
    for body in kind.__mro__:
        if body not in _UNCHANGING and body.__module__.partition(".")[0] not in _LIBRARIES:
            yield body


def _is_users(file: object) -> bool:
    return isinstance(file, str) and is_model_code(file) and not file.startswith(_PYTHON)


def is_installed(thing: type | types.FunctionType) -> bool:
    """Tell whether a class or function is of an installed package: nobody redefines it in a notebook."""
    if thing.__module__.partition(".")[0] in _LIBRARIES:
        return True
    file = str(getattr(sys.modules.get(thing.__module__), "__file__", ""))
    return "site-packages" in file or "dist-packages" in file


_PYTHON: Final = f"{sys.modules['os'].__file__}".removesuffix("os.py")
"""The folder of Python's library, where `site-packages` may be, too."""


def written_by_users(function: types.FunctionType) -> bool:
    """Tell whether a function is neither torch's, ONNX Runtime's or ours nor that of an installed package."""
    return is_model_code(function.__code__.co_filename) and not is_installed(function)


def _is_value(value: object) -> bool:
    """Tell whether a member of a class is a value, and no method, property or the like."""
    return (baked_in.matters(value) and type(value) not in baked_in.FUNCTIONS) or is_object(value)


def _by_identity(value: object) -> bool:
    return value is MISSING or not baked_in.matters(value) or type(value) in baked_in.FUNCTIONS
