"""What a forward changes in Python: attributes of modules and global variables, which a graph leaves as they are.

`unchanged` puts these back, with the buffers and every generator of random numbers.
"""

from __future__ import annotations

import copy
import dis
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ortlab.engine.inspection.places import Places
from ortlab.engine.random_state import RandomState
from ortlab.engine.tracing import baked_in
from ortlab.engine.tracing.buffers import Buffers
from ortlab.engine.tracing.source_lines import is_model_code
from ortlab.records.preflight import Finding, Kind, Place

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


class Changes:
    """What has changed, since this was made, in a module's attributes and the global variables that its code names."""

    def __init__(self, module: torch.nn.Module, places: Places) -> None:
        self._places = places
        self._module = module
        self._attributes = {
            (part, name): (value, _kept(value), content_of(value))
            for part in module.modules()
            for name, value in _own(part)
        }
        self._globals = {
            (id(function.__globals__), name): (function, value, _kept(value), content_of(value))
            for function in _functions(module)
            for name in function.__code__.co_names
            if baked_in.matters(value := function.__globals__.get(name)) and name in function.__globals__
            if type(value) not in baked_in.FUNCTIONS
        }

    @property
    def any(self) -> bool:
        """Whether anything has changed since."""
        return next(self._changed(), None) is not None or next(self._changed_globals(), None) is not None

    @property
    def findings(self) -> Iterator[Finding]:
        """What has changed since."""
        for part, name in self._changed():
            yield Finding.of(
                Kind.ATTRIBUTE,
                f"The forward changes self.{name} each time; ONNX Runtime does not run that line.",
                self._places.of_object(part, _line_in(type(part), name)),
                "Keep it in a buffer outside of the wrapped module, or change it in the training loop.",
            )
        for function, name in self._changed_globals():
            yield Finding.of(
                Kind.GLOBAL,
                f"The forward changes the global variable {name} each time; ONNX Runtime does not run that line.",
                self._owner(function, name),
                "Change it in the training loop, or leave this module to PyTorch.",
            )

    def put_back(self) -> None:
        """Give everything the value that it had, and containers what they held."""
        for part, name in list(self._changed()):
            known = self._attributes.get((part, name))
            if known is None:
                del part.__dict__[name]
            else:
                part.__dict__[name] = refilled(known[0], known[2])
        for function, name in list(self._changed_globals()):
            _, value, _, content = self._globals[id(function.__globals__), name]
            function.__globals__[name] = refilled(value, content)

    def _changed(self) -> Iterator[tuple[torch.nn.Module, str]]:
        for part in self._module.modules():
            for name, value in _own(part):
                before = self._attributes.get((part, name))
                if before is None or before[1] != _kept(value):
                    yield part, name
        for part, name in self._attributes:
            if name not in part.__dict__:
                yield part, name

    def _changed_globals(self) -> Iterator[tuple[types.FunctionType, str]]:
        for (_, name), (function, _, before, _) in self._globals.items():
            if _kept(function.__globals__.get(name)) != before:
                yield function, name

    def _owner(self, function: types.FunctionType, name: str) -> Place:
        writing = [
            (part, one)
            for part in self._module.modules()
            for one in _methods(type(part))
            if name in one.__code__.co_names and one.__globals__ is function.__globals__
        ]
        writing.sort(key=lambda found: name not in _stored(found[1]))
        part, writer = writing[0]
        return self._places.of_object(part, _line_of(writer, name))


def _own(part: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in part.__dict__.items():
        if name not in _OF_EVERY_MODULE and not name.startswith("_ortlab") and baked_in.matters(value):
            yield name, value


def _kept(value: object) -> object:
    state = baked_in.state(value)
    # A long one is known by identity.
    return (state, len(value)) if isinstance(value, (list, dict, set)) else state


def content_of(value: object) -> object:
    """Return a copy of what a container holds; None for other values."""
    return copy.copy(value) if isinstance(value, (list, dict, set)) else None


def refilled(value: object, content: object) -> object:
    """Return a container with the content that `content_of` has copied; another value as it is."""
    if isinstance(value, list) and isinstance(content, list):
        value[:] = content
    elif isinstance(value, (dict, set)) and isinstance(content, (dict, set)) and value != content:
        value.clear()
        value.update(content)  # type: ignore[arg-type] # of the same kind as the value
    return value


def _functions(module: torch.nn.Module) -> Iterator[types.FunctionType]:
    for kind in {type(part) for part in module.modules()}:
        yield from _methods(kind)


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for body in kind.__mro__:
        if body is not torch.nn.Module and body is not object:
            for function in baked_in.functions_of(body).values():
                if is_model_code(function.__code__.co_filename):
                    yield function


def _stored(function: types.FunctionType, opname: str = "STORE_GLOBAL") -> set[str]:
    return {one.argval for one in dis.get_instructions(function) if one.opname == opname}


def _line_in(kind: type, name: str) -> str:
    """Return the line of a class that stores an attribute, or else one that mentions it, outside of its `__init__`."""
    methods = [one for one in _methods(kind) if one.__name__ != "__init__" and name in one.__code__.co_names]
    methods.sort(key=lambda one: name not in _stored(one, "STORE_ATTR"))
    return _line_of(methods[0], name) if methods else ""


def _line_of(function: Any, name: str) -> str:
    """Return the line that stores a name, or else the first that mentions it; "" if none does."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    if code is None or not is_model_code(code.co_filename):
        return ""
    line, first, stored = code.co_firstlineno, 0, 0
    for one in dis.get_instructions(code):
        line = _started(one) or line
        if one.argval == name:
            first = first or line
            if one.opname in {"STORE_ATTR", "STORE_GLOBAL"}:
                stored = stored or line
    return f"{code.co_filename}:{stored or first}" if stored or first else ""


def _started(instruction: Any) -> int:
    """Return the number of the line that an instruction begins, 0 if it goes on with one."""
    number = getattr(instruction, "line_number", None)  # from Python 3.13 on
    started = number if number is not None else instruction.starts_line
    return int(started or 0)


# --- a model left as it was ---------------------------------------------------------------------------------------


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Put back, when the block ends in any way, what looking at a model may change in it.

    Weights are not put back: a trace refuses to write to them, and whoever runs the model in PyTorch has to use
    `weights_kept`.
    """
    random, buffers, changes = RandomState.read(), Buffers(model), Changes(model, Places(model))
    try:
        yield
    finally:
        changes.put_back()
        buffers.restore()
        random.put_back()


@contextmanager
def weights_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put the values of the weights back, for a forward in PyTorch that may write to them."""
    before = [(one, one.detach().clone()) for one in model.parameters() if not one.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, value in before:
                if not torch.equal(torch.nan_to_num(one), torch.nan_to_num(value)):
                    one.copy_(value)
