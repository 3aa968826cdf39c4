"""What a trace bakes into a graph besides tensors' sizes and dtypes: numbers, constants, code and its names.

Values are read in two ways. `state` makes something that is compared at every step: quick, and exact about objects as
long as it is held. `describe` makes text that means the same in another process.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import types
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range}
)
"""Types whose values are compared as they are."""

CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)
"""Classes of containers; those that are derived from them, such as OrderedDict, count as well."""

_SETS: Final = (set, frozenset)

FUNCTIONS: Final = frozenset(
    {types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial}
)

_LONGEST: Final = 64
"""Longer containers of other than plain values are told apart by identity and length."""

_LONGEST_PLAIN: Final = 4096
"""Longer ones are tables of words, and told apart in the same way."""

_FEW_BYTES: Final = 4096
"""Tensors up to here are compared by content, too: what is written through `.data` or numpy counts no version."""

_DEEPEST: Final = 4


OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has, whose changes torch itself makes."""


class Same:
    """An object as it was at one moment: equal to nothing but itself, unchanged."""

    __slots__ = ("thing", "version")

    def __init__(self, thing: object, version: int = 0) -> None:
        self.thing = thing
        self.version = version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing and self.version == other.version

    __hash__ = None  # type: ignore[assignment] # it is compared, never looked up


def matters(value: object) -> bool:
    """Tell whether an attribute with this value can end up in a graph."""
    kind = type(value)
    return kind in PLAIN or kind in FUNCTIONS or isinstance(value, (torch.Tensor, *CONTAINERS, *_OTHERS))


_OTHERS: Final = (np.ndarray, np.generic, enum.Enum)


def is_fixed(value: object) -> bool:
    """Tell whether an object has the same state for ever."""
    kind = type(value)
    if kind in (tuple, frozenset):
        return all(map(is_fixed, value))  # type: ignore[call-overload]
    return (
        kind in PLAIN
        or isinstance(value, (np.generic, enum.Enum, type))
        or kind in FUNCTIONS - {functools.partial}
    )


def holds_few(value: object) -> bool:
    """Tell whether an object has the same state as long as it holds the same items: a few that are fixed."""
    if not isinstance(value, CONTAINERS) or len(value) > _LONGEST:
        return False
    return all(map(is_fixed, (*value, *value.values()) if isinstance(value, dict) else value))


def state(value: object, depth: int = 0) -> object:  # noqa: PLR0911 - one case each
    """Return what is equal as long as a trace would find the same value; `depth` counts the containers around it."""
    kind = type(value)
    if kind in PLAIN:
        return (kind, value) if kind in (bool, int, float) else value  # 1 == 1.0 == True
    if kind in FUNCTIONS and kind is not functools.partial:
        return getattr(value, "__func__", value)
    if isinstance(value, CONTAINERS) and depth < _DEEPEST:
        if len(value) > _LONGEST:
            return _state_of_long(value)
        items = value.items() if isinstance(value, dict) else value
        return (kind, [state(item, depth + 1) for item in items])
    if isinstance(value, torch.Tensor):
        if value.nbytes <= _FEW_BYTES and kind is torch.Tensor and value.device.type == "cpu":
            return (Same(value, 0 if value.is_inference() else value._version), _content(value))
        return Same(value, 0 if value.is_inference() else value._version)
    if isinstance(value, np.ndarray):
        return (kind, value.dtype.str, value.shape, _checksum(value))
    if isinstance(value, (np.generic, enum.Enum)):
        return (kind, repr(value))
    if kind is functools.partial:
        return (value.func, state(value.args, depth), state(value.keywords, depth))  # type: ignore[attr-defined]
    return kind


def states(values: Collection[object]) -> list[object]:
    """Return what is equal as long as each of some values has the same state; quick where most are plain."""
    kinds = list(map(type, values))
    plain = [value for value, kind in zip(values, kinds, strict=True) if kind in PLAIN]
    others = [state(value) for value, kind in zip(values, kinds, strict=True) if kind not in PLAIN]
    return [kinds, plain, others]  # 1 == 1.0 == True, but their kinds differ


def _state_of_long(value: Any) -> object:
    """Return the state of a container with many items: of plain ones their values, of others only how many."""
    if len(value) <= _LONGEST_PLAIN and not isinstance(value, dict):
        items = tuple(value)
        kinds = tuple(map(type, items))
        if PLAIN.issuperset(kinds):
            return (type(value), kinds, items)
    return Same(value, len(value))


def _content(tensor: torch.Tensor) -> bytes | None:
    try:
        return tensor.detach().numpy().tobytes()
    except (RuntimeError, TypeError):  # sparse, quantised, of a type that numpy lacks, or without data
        return None


def _checksum(array: np.ndarray[Any, Any]) -> int:
    if array.dtype.hasobject:
        return id(array)
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def describe(value: object, depth: int = 0) -> str:  # noqa: PLR0911 - one case each
    """Return text that tells values apart in every process; `depth` counts the containers and closures around it."""
    kind = type(value)
    if kind in PLAIN:
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)} {digest_of_tensor(value)}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"array {value.dtype.str} {list(value.shape)} {content[:16]}"
    if isinstance(value, (np.generic, enum.Enum)):
        return repr(value)
    if isinstance(value, CONTAINERS) and depth < _DEEPEST:
        if isinstance(value, Mapping):
            inside = ", ".join(f"{key!r}: {describe(item, depth + 1)}" for key, item in value.items())
        else:
            texts = [describe(item, depth + 1) for item in value]
            inside = ", ".join(sorted(texts) if isinstance(value, _SETS) else texts)
        return f"{kind.__name__}({inside})"
    if kind is functools.partial:
        parts = (value.func, value.args, value.keywords)  # type: ignore[attr-defined]
        return f"partial{tuple(describe(part, depth + 1) for part in parts)}"
    if kind in FUNCTIONS:
        name = getattr(value, "__qualname__", kind.__name__)
        return f"{name} {digest_of_code(value, depth)}"
    return f"a {kind.__qualname__}"


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's dtype and values."""
    digest = hashlib.sha256(str(tensor.dtype).encode())
    try:
        plain = tensor.detach().cpu().contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    except (RuntimeError, TypeError):  # sparse, quantised, or without data
        digest.update(f"{id(tensor)} {tensor!r}".encode())
    return digest.hexdigest()[:16]


def digest_of_code(function: object, depth: int = 0) -> str:
    """Return a digest of a function's code, defaults and closure; of a builtin one its name."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    digest = hashlib.sha256(_written(code).encode())
    if depth < _DEEPEST:
        contents = map(content, cells(function))
        for value in (function.__defaults__, function.__kwdefaults__, *contents):  # type: ignore[attr-defined]
            digest.update(describe(value, depth + 1).encode())
    return digest.hexdigest()[:16]


def _written(code: types.CodeType) -> str:
    """Write code out. `marshal` would write it otherwise each time that a constant of it gets another owner."""
    constants = [_written(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts]
    names = (
        code.co_filename,
        code.co_name,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
    )
    numbers = (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    lines = (code.co_firstlineno, code.co_linetable)
    exceptions = getattr(code, "co_exceptiontable", b"")  # since Python 3.11
    return repr((code.co_code, exceptions, constants, names, numbers, lines))


def cells(function: object) -> tuple[types.CellType, ...]:
    """Return the cells of a function's closure."""
    return getattr(getattr(function, "__func__", function), "__closure__", None) or ()


def content(cell: types.CellType) -> object:
    """Return what a cell holds; None for one that is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def functions_of(kind: type) -> dict[str, Any]:
    """Return the functions in a class's own body: methods, static and class methods, getters of properties."""
    found = {}
    for name, value in vars(kind).items():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if type(inner) is types.FunctionType:
            found[name] = inner
    return found


def closures(functions: Iterable[object]) -> list[types.CellType]:
    """Return the cells of some functions and of the functions in these, as decorators leave them."""
    pending, found = list(functions), dict[int, types.CellType]()
    while pending:
        for cell in cells(pending.pop()):
            if id(cell) not in found:
                found[id(cell)] = cell
                if type(content(cell)) in FUNCTIONS:
                    pending.append(content(cell))
    return list(found.values())


# ---- the names in code ---------------------------------------------------------------------------------------------


_BETWEEN: Final = frozenset(("CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG"))
_FILLING: Final = frozenset(("append", "add", "update", "extend", "clear"))
_NEAR: Final = 4
"""Instructions from one that adds to one that stores."""


class Names(NamedTuple):
    """The names in code, also in functions inside it."""

    all: frozenset[str]  # of attributes and variables, and texts that may be such names
    paths: tuple[tuple[str, ...], ...]  # global names with the attributes that follow
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]  # leading dots, module, and what is taken from it
    any_of: frozenset[str]  # what `getattr` is called on with a name that is computed


@lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """Return the names in code; it is read once."""
    names, any_of = set(code.co_names), set[str]()
    paths: dict[tuple[str, ...], None] = {}
    imports: dict[tuple[int, str, tuple[str, ...]], None] = {}
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _BETWEEN]
    for position, one in enumerate(instructions):
        if one.opname == "IMPORT_NAME":
            level, parts = (instructions[position - back].argval for back in (2, 1))
            imports[level, str(one.argval), parts or ()] = None
        # Names that nobody can write are those by which pytest reaches itself from an assertion.
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and str(one.argval).isidentifier():
            path = [str(one.argval)]
            for after in instructions[position + 1 :]:
                if after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                    break
                path.append(str(after.argval))
            paths[tuple(path)] = None
            if path == ["getattr"]:
                any_of |= _object_of_getattr(instructions[position + 1 :])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            names |= inner.all
            any_of |= inner.any_of
            paths |= dict.fromkeys(inner.paths)
            imports |= dict.fromkeys(inner.imports)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return Names(frozenset(names), tuple(paths), tuple(imports), frozenset(any_of))


def reads_itself(function: types.FunctionType) -> bool:
    """Tell whether a method asks for attributes of its own object by names that it computes."""
    code = function.__code__
    return code.co_argcount > 0 and code.co_varnames[0] in names_in(code).any_of


def _object_of_getattr(instructions: list[dis.Instruction]) -> set[str]:
    """Return the name of what `getattr` is asked of, by the instructions behind it; nothing if it asks for a text."""
    found = [*_plain_loads(instructions)]
    if not found:
        return set()
    asked, *rest = instructions[len(found) :]
    default = [*_plain_loads(rest)] or [one for one in rest[:1] if one.opname == "LOAD_CONST" or one.arg == 0]
    is_text = asked.opname == "LOAD_CONST" and any(
        after.opname.startswith("CALL") for after in (rest[0], rest[len(default)])
    )
    return set() if is_text else {str(found[-1].argval)}


def _plain_loads(instructions: list[dis.Instruction]) -> Iterator[dis.Instruction]:
    """Yield the loads of a name and its attributes with which some instructions begin."""
    for position, one in enumerate(instructions):
        if not one.opname.startswith(
            "LOAD_ATTR" if position else ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
        ):
            return
        yield one


def global_names(code: types.CodeType) -> set[str]:
    """Return the names of globals that code reads, also in functions inside it."""
    return {path[0] for path in names_in(code).paths}


@lru_cache(maxsize=1024)
def used_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of variables and attributes that code reads, but for ``self.n += 1`` and ``found.append``."""
    found: set[str] = set()
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _BETWEEN]
    for position, one in enumerate(instructions):
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            after = instructions[position + 1 : position + 2 + _NEAR]
            adds = len(after) > 1 and after[1].opname.startswith(("BINARY_", "INPLACE_"))
            adds &= any(
                other.opname.startswith("STORE_") and other.argval == one.argval for other in after[2:]
            )
            if not adds and not (after and after[0].argval in _FILLING):
                found.add(str(one.argval))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= used_names(constant)
        elif isinstance(constant, str):
            found.add(constant)
    return frozenset(found)
