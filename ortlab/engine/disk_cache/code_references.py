"""What the names in compiled code stand for, and which members of the user's classes and modules they reach."""

from __future__ import annotations

import dis
import functools
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ortlab.engine.disk_cache import Uncovered
from ortlab.engine.disk_cache.installed_code import (
    OWN,
    PYTHON,
    module_of_builtin,
    origin_of_class,
    origin_of_function,
    origin_of_module,
)

BUILTIN_KINDS: Final = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)
"""Classes of what C code defines."""

# What a module of Python's library may be for a forward to use it: one that computes from its arguments alone.
_PURE: Final = frozenset(
    """
    abc array bisect builtins cmath collections contextlib copy dataclasses decimal enum fractions
    functools heapq inspect io itertools json logging math numbers operator re statistics string
    struct textwrap types typing warnings
    """.split()  # noqa: SIM905 - so many words are easier to read without quotes
)
BANNED: Final = frozenset("breakpoint compile eval exec globals hash id input locals open __import__".split())  # noqa: SIM905 - so many words are easier to read without quotes
"""Functions whose results depend on more than their arguments, or that run code which is not here."""


MISSING: Final = object()
"""What a name stands for that stands for nothing yet."""


def references(code: types.CodeType, function: types.FunctionType) -> Iterator[tuple[str, Any, str]]:
    """Yield each name that code looks up outside itself, what it stands for, and an impure module on the way."""
    # The code is that of `function`, whose globals and closure are used, or of a function inside it. A name includes
    # the attributes of modules that follow it: "torch.nn.functional.gelu". It stands for `MISSING` if it stands for
    # nothing. The module is one of Python's library whose answers may differ each time; "" if there is none.
    instructions = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL")]
    seen: set[str] = set()
    for position, one in enumerate(instructions):
        found = _start(instructions, position, function)
        if not found:
            continue
        (value,) = found
        name, through = str(one.argval), ""
        for after in instructions[position + 1 :]:
            if not isinstance(value, types.ModuleType) or type(value).__name__ == "_OpNamespace":
                break
            through = through or impure(value)
            if after.opname not in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                break
            name += f".{after.argval}"
            value = getattr(value, str(after.argval), MISSING)
        if name not in seen:
            seen.add(name)
            yield name, value, through or impure(value)


def _start(
    instructions: list[dis.Instruction], position: int, function: types.FunctionType
) -> tuple[Any, ...]:
    """Return what an instruction looks up outside of the code, as a tuple of one; empty if nothing."""
    one = instructions[position]
    if one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
        builtins = function.__globals__.get("__builtins__", {})
        builtins = getattr(builtins, "__dict__", builtins)
        return (function.__globals__.get(one.argval, builtins.get(one.argval, MISSING)),)
    if one.opname == "IMPORT_NAME":
        return (_imported(str(one.argval), int(instructions[position - 2].argval), function),)
    if one.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        value = content_of(cells[one.argval]) if one.argval in cells else None
        return (value,) if isinstance(value, types.ModuleType) else ()  # others are described as cells
    return ()


def _imported(name: str, level: int, function: types.FunctionType) -> types.ModuleType:
    full = name
    if level:
        package = function.__globals__.get("__package__") or ""
        full = importlib.util.resolve_name("." * level + name, package) if package else f"{'.' * level}{name}"
    if full not in sys.modules:
        raise Uncovered(f"the module {full}, which {function.__qualname__} imports while it runs")
    return sys.modules[full]


def impure(value: object) -> str:
    """Return the module of Python's library that a value belongs to, if it may answer differently each time."""
    module = library_module(value)
    return module if module and module.partition(".")[0].lstrip("_") not in _PURE else ""


def library_module(value: object) -> str:
    """Return the module of Python's library that a value is or belongs to; empty for others."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
    elif isinstance(value, BUILTIN_KINDS):
        name = module_of_builtin(value)
    elif isinstance(value, (types.FunctionType, type)):
        name = value.__module__ or ""
        if origin_of_value(value) != PYTHON:
            return ""
    else:
        return ""
    return name if origin_of_module(name) == PYTHON else ""


def inner_function(value: object) -> Any:
    """Return the function in a decorated one of Python's library, None if there is none."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    if type(value).__name__ == "_lru_cache_wrapper":
        return value.__wrapped__  # type: ignore[attr-defined]
    return None


def content_of(cell: Any) -> Any:
    """Return what is in a cell of a closure; the cell itself if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # empty so far
        return cell


def words(constant: object) -> Iterator[str]:
    """Yield the texts in a constant that could be names, as those that `getattr` is given."""
    if isinstance(constant, str) and constant.isidentifier():
        yield constant
    elif isinstance(constant, (tuple, frozenset)):
        for part in constant:
            yield from words(part)


def origin_of_value(value: object) -> str:
    """Return where a function or class comes from; `OWN` for other objects."""
    if isinstance(value, types.FunctionType):
        return origin_of_function(value)
    if isinstance(value, type):
        return origin_of_class(value)
    return origin_of_module(module_of_builtin(value)) if isinstance(value, BUILTIN_KINDS) else OWN


_BY_ANY_NAME: Final = frozenset(
    ("getattr", "vars", "dir", "setattr", "delattr", "attrgetter", "methodcaller", "__dict__")
)
"""Names of what reaches attributes whose names do not stand in the code."""

# What every class has, and what runs only when an object is made, shown or copied.
_OF_EVERY_CLASS: Final = frozenset(
    """
    __module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__
    __annotate_func__ __annotations_cache__ __abstractmethods__ _abc_impl __firstlineno__
    __static_attributes__ __parameters__ __orig_bases__ __slots__ __match_args__ __dataclass_fields__
    __dataclass_params__ __repr__ __str__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __del__
    __sizeof__ __dir__ __format__ __jit_unused_properties__
    """.split()  # noqa: SIM905 - so many words are easier to read without quotes
)
_CONSTRUCTION: Final = frozenset(
    ("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__")
)

FUNCTION_LIKE: Final = (
    types.FunctionType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
)
"""Kinds of members that run only when they are named; nobody knows what reads a value of another kind."""


class Owner:
    """A class or a module of the user, whose members are described when code names them."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder = holder  # keeps its id
        self.name = name  # in the description
        self.members: Mapping[str, Any] = vars(holder)
        self.is_module = isinstance(holder, types.ModuleType)
        self.made_here = False
        self.described: set[str] = set()


class NamedMembers:
    """Owners that were reached, and the names in the code that was reached."""

    def __init__(self) -> None:
        self.names: set[str] = {"forward"}  # every name that stands in the code
        self.owners: dict[int, Owner] = {}  # the user's classes and modules, by their `id`

    def owner(self, holder: type | types.ModuleType, name: str) -> Owner:
        """Return the record of a class or a module, new if it was not reached before."""
        return self.owners.setdefault(id(holder), Owner(holder, name))

    def uses(self, name: str) -> bool:
        """Return whether the code names this, or may reach what it does not name."""
        return name in self.names or not _BY_ANY_NAME.isdisjoint(self.names)

    def not_yet_described(self) -> Iterator[tuple[Owner, str]]:
        """Yield each member that the code can reach, once, also those that become reachable meanwhile."""
        found = True
        while found:
            found = False
            for owner in list(self.owners.values()):
                for name in sorted(owner.members.keys() - owner.described):
                    if self._wants(owner, name, owner.members[name]):
                        owner.described.add(name)
                        found = True
                        yield owner, name

    def _wants(self, owner: Owner, name: str, value: object) -> bool:
        special = name.startswith("__") and name.endswith("__")
        if owner.is_module:
            return self.uses(name) and not special
        if name in _OF_EVERY_CLASS or (name in _CONSTRUCTION and not owner.made_here):
            return False
        return special or not isinstance(value, FUNCTION_LIKE) or self.uses(name)
