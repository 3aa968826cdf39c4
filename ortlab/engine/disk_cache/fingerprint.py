"""A fingerprint of objects and code that is the same in each process, or says what it cannot describe.

A trace depends on everything that a module's forward can reach: its own code, functions that it names, constants and
settings of its modules. The user's code is described as Python compiled it, with the values that its names stand for
(file names and line numbers are left out, so that a notebook's cell is the same in the next kernel); code of installed
packages by version, see `ortlab.engine.disk_cache.installed_code`. What none of this can describe is refused by name.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import re
import types
import typing
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch

from ortlab.engine.disk_cache import Uncovered
from ortlab.engine.disk_cache.code_references import (
    BANNED,
    BUILTIN_KINDS,
    FUNCTION_LIKE,
    MISSING,
    NamedMembers,
    content_of,
    impure,
    inner_function,
    references,
    words,
)
from ortlab.engine.disk_cache.installed_code import (
    OWN,
    InstalledCode,
    module_of_builtin,
    origin_of_class,
    origin_of_function,
    origin_of_module,
)

_SIMPLE: Final = (
    *(bool, int, float, complex, str, bytes, bytearray, type(None), type(...), type(NotImplemented)),
    *(range, slice, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_ANNOTATION: Final = (
    types.GenericAlias,
    types.UnionType,
    typing.TypeVar,
    typing.ForwardRef,
    type(typing.Optional[int]),  # noqa: UP045 - its class is what is wanted
    type(typing.List[int]),  # noqa: UP006
    type(typing.Any),
)

# torch 2.4 has no class Buffer.
_PLAIN_TENSORS: Final = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor))

_PROCESS_LOCAL: Final = frozenset(("_original_object_hash",))
"""Attributes that differ in each process and that no forward reads: a `hash` in ``transformers.GenerationConfig``."""

_OPERATORS: Final = ("aten", "prim", "prims")
"""Namespaces of ``torch.ops`` that are torch's own."""


class Fingerprint:
    """Describe objects one after the other; `digest` closes the description."""

    # `known` has names of objects that are described elsewhere, by `id`; the caller keeps them alive.

    def __init__(self, known: Mapping[int, str] | None = None) -> None:
        self.installed = InstalledCode()
        self._tokens: list[str] = []
        self._known = dict(known or {})
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []
        self._named = NamedMembers()
        self._set_aside: list[tuple[str, str]] = []

    def add(self, *facts: object) -> None:
        """Add plain facts."""
        self._tokens += map(str, facts)

    def digest(self) -> str:
        """Describe what the names in the code that was reached stand for, and return SHA-256 of it all."""
        self._describe_named_members()
        for function, where in self.installed.replaced_functions():
            self.value(function, where)
        self._describe_named_members()
        installed_names = self.installed.names()
        for name, thing in self._set_aside:
            if self._named.uses(name) or name in installed_names:
                raise Uncovered(thing)
        facts = [*self._tokens, *self.installed.facts()]
        return hashlib.sha256("\0".join(facts).encode(errors="surrogatepass")).hexdigest()

    # ---- values -----------------------------------------------------------------------------------------------

    def value(self, value: Any, where: str, *, strict: bool = True) -> None:  # noqa: PLR0911, PLR0912, C901 - one case each
        """Describe an object, or raise Uncovered with `where`, which says what it is to the user."""
        # Unless `strict`, an object of unknown kind is not refused: its class stands for it, as is right for what
        # belongs to an installed package.
        kind = type(value)
        if kind in _SIMPLE:
            return self.add(kind.__name__, repr(value))
        if id(value) in self._known:
            return self.add("known", self._known[id(value)])
        if id(value) in self._seen:
            return self.add("seen", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        if isinstance(value, enum.Enum):
            return self.add(kind.__module__, kind.__qualname__, value.name, repr(value.value))
        if isinstance(value, (list, tuple, deque, set, frozenset, dict)):
            return self._container(value, where, strict=strict)
        if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            return self._array(value, where)
        if isinstance(value, types.ModuleType):
            return self._module(value, where, strict=strict)
        if isinstance(value, type):
            return self.describe_class(value, made_here=True)
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if isinstance(value, BUILTIN_KINDS):
            return self._builtin(value, where, strict=strict)
        if isinstance(value, types.MethodType):
            self.value(value.__func__, where, strict=strict)
            return self.value(value.__self__, where, strict=strict)
        if isinstance(value, (functools.partial, functools.partialmethod)):
            for part in (value.func, value.args, value.keywords):
                self.value(part, where, strict=strict)
            return None
        inner = inner_function(value)
        if inner is not None:
            return self.value(inner, where, strict=strict)
        if isinstance(value, _ANNOTATION):
            return self.add(repr(value))
        if isinstance(value, re.Pattern):
            return self.add("pattern", repr(value.pattern), value.flags)
        if isinstance(value, logging.Logger):
            return self.add("logger", value.name)
        return self._object(value, where, strict=strict)

    def _container(self, value: Any, where: str, *, strict: bool) -> None:
        self.describe_class(type(value))
        self.add(len(value))
        if isinstance(value, dict):
            for key, item in value.items():
                self.value(key, f"a key of {where}", strict=strict)
                self.value(item, f"{where}[{key!r}]", strict=strict)
        elif isinstance(value, (set, frozenset)):
            if not all(type(item) in _SIMPLE or isinstance(item, (type, enum.Enum)) for item in value):
                if strict:
                    raise Uncovered(f"{where}, a set of objects, which has no order")
                return
            for item in sorted(value, key=repr):
                self.value(item, f"a member of {where}", strict=strict)
        else:
            for position, item in enumerate(value):
                self.value(item, f"{where}[{position}]", strict=strict)
        self._attributes(getattr(value, "__dict__", {}), where, strict=strict)

    def _array(self, value: Any, where: str) -> None:
        if isinstance(value, torch.Tensor):
            plain = type(value) in _PLAIN_TENSORS
            if not plain or value.layout is not torch.strided or value.is_meta or value.is_quantized:
                raise Uncovered(
                    f"{where}, a tensor of class {type(value).__name__} and layout {value.layout}"
                )
            self.add(type(value).__name__, *tensor_facts(value), content_digest(value))
        elif value.dtype.hasobject:
            raise Uncovered(f"{where}, an array of objects")
        else:
            plain_bytes = np.ascontiguousarray(value).tobytes()
            self.add("array", value.dtype.str, value.shape, hashlib.sha256(plain_bytes).hexdigest())

    def _builtin(self, value: Any, where: str, *, strict: bool) -> None:
        name = module_of_builtin(value)
        if origin_of_module(name) == OWN and strict:
            raise Uncovered(f"{where}, a function of C code outside installed packages")
        self.installed.reach(name)
        self.add("builtin", name, getattr(value, "__qualname__", repr(type(value))))
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            self.value(owner, where, strict=strict)

    def _object(self, value: Any, where: str, *, strict: bool) -> None:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            raise Uncovered(f"{where}, which TorchScript has compiled")
        slots = {
            slot: getattr(value, slot)
            for base in kind.__mro__
            for slot in _slots(base)
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot)
        }
        if not hasattr(value, "__dict__") and not slots:
            if strict:
                raise Uncovered(f"{where}, an object of class {name}")
            return self.add("object", name)
        self.describe_class(kind)
        return self._attributes({**slots, **getattr(value, "__dict__", {})}, where, strict=strict)

    def _attributes(self, attributes: Mapping[str, Any], where: str, *, strict: bool) -> None:
        for name, value in attributes.items():
            if not name.startswith("_ortlab") and name not in _PROCESS_LOCAL:
                self.attribute(name, value, f"{where}.{name}", strict=strict)

    def attribute(self, name: str, value: Any, where: str, *, strict: bool = True) -> None:
        """Describe an attribute; if that is impossible, `digest` refuses it, but only if the code uses its name."""
        # A tokenizer that somebody has put on a model is nothing to its forward.
        mark = len(self._tokens), len(self._seen), dict(self._named.owners)
        self.add("attribute", name)
        try:
            self.value(value, where, strict=strict)
        except Uncovered as answer:
            self._set_aside.append((name, answer.thing))
            tokens, seen, self._named.owners = mark
            del self._tokens[tokens:], self._alive[seen:]
            for key in list(self._seen)[seen:]:
                del self._seen[key]

    # ---- code -------------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, where: str) -> None:
        origin = origin_of_function(function)
        if origin != OWN:
            self.installed.reach(function.__module__ or "")
            self.add("installed", function.__module__, function.__qualname__)
        else:
            self._code(function.__code__, function, function.__qualname__)
            self._attributes(
                {name: value for name, value in vars(function).items() if name != "__wrapped__"},
                where,
                strict=True,
            )
        # A decorator of an installed package holds the user's function in a cell.
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            content = content_of(cell)
            if content is not cell:
                self.add(name)
                self.value(content, f"`{name}`, which {function.__qualname__} uses", strict=origin == OWN)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(default, f"a default of {function.__qualname__}", strict=origin == OWN)
        self.add(*(function.__kwdefaults__ or {}))

    def _code(self, code: types.CodeType, function: types.FunctionType, name: str) -> None:
        self.add("code", code.co_code.hex(), getattr(code, "co_exceptiontable", b"").hex(), code.co_flags)
        self.add(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        self.add(*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
        self._named.names.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, function, name)
            else:
                self._named.names.update(words(constant))
                self.value(constant, f"a constant of {name}")
        for reference, value, through in references(code, function):
            self.add("name", reference)
            self._reference(f"`{reference}`, which {name} uses", reference, value, through)

    def _reference(self, where: str, name: str, value: Any, through: str) -> None:
        if value is MISSING:
            return
        if through:
            raise Uncovered(f"{where}: Python's module {through} may answer differently each time")
        module = str(getattr(value, "__module__", ""))
        if name in BANNED and isinstance(value, types.BuiltinFunctionType):
            raise Uncovered(where)
        if module.startswith(("numpy.random", "torch.random")):
            raise Uncovered(f"{where}: random numbers of {module.partition('.')[0]}")
        if type(value).__module__ == "torch._ops":
            if str(getattr(value, "name", "")) not in _OPERATORS:
                raise Uncovered(f"{where}: operators outside PyTorch")
            return
        self.value(value, where)

    def _module(self, module: types.ModuleType, where: str, *, strict: bool) -> None:
        self.add("module", module.__name__)
        if origin_of_module(module.__name__) != OWN:
            self.installed.reach(module.__name__)
        elif getattr(module, "__file__", "x").endswith((".so", ".pyd")):
            if strict:
                raise Uncovered(f"{where}, C code outside installed packages")
        else:
            self._named.owner(module, module.__name__)

    def describe_class(self, kind: type, *, made_here: bool = False) -> None:
        """Describe a class; `made_here` if the code may make objects of it."""
        self.add("class", kind.__module__, kind.__qualname__)
        if type(kind) is not type and origin_of_class(type(kind)) == OWN:
            self.describe_class(type(kind))
        for base in kind.__mro__:
            if origin_of_class(base) != OWN:
                self.installed.reach_class(base)
                continue
            self._named.owner(base, base.__qualname__).made_here |= made_here

    def _describe_named_members(self) -> None:
        """Describe the members of the user's classes and modules that the code reached so far has names of."""
        for owner, name in self._named.not_yet_described():
            self.add("member", owner.name, name)
            where = f"{owner.name}.{name}"
            value = owner.members[name]
            if isinstance(value, FUNCTION_LIKE):
                self.value(value, where)
            elif owner.is_module:
                self._reference(where, name, value, impure(value))
            else:
                self.attribute(name, value, where)


def tensor_facts(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a trace can see of a tensor besides its values."""
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad)


def content_digest(tensor: torch.Tensor) -> str:
    """Return SHA-256 of a tensor's values."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    values = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
