"""What a trace bakes into a graph besides tensors' sizes and dtypes: numbers, constant tensors, and code.

Values are read in two ways. `state` makes something that is compared at every step: quick, and exact about objects as
long as it is held. `describe` makes text that means the same in another process.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

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
