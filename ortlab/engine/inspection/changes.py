"""What a forward changes in Python: attributes of modules and global variables, which a graph leaves as they are.

`unchanged` puts these back, with the buffers and every generator of random numbers.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ortlab.engine.inspection.places import Places
from ortlab.engine.random_state import RandomState
from ortlab.engine.tracing import baked_in
from ortlab.engine.tracing.carried import Moment
from ortlab.engine.tracing.graph_inputs import Buffers
from ortlab.engine.tracing.reached import is_installed
from ortlab.engine.tracing.source_lines import is_model_code
from ortlab.records.preflight import Finding, Kind, Place

if TYPE_CHECKING:
    from ortlab.engine.tracing.reached import Variable


class Changes:
    """What has changed, since this was made, in a module's attributes and in what else its forward reaches."""

    def __init__(self, module: torch.nn.Module, places: Places) -> None:
        self._places = places
        self._module = module
        self._before = Moment(module, writes=True)

    @property
    def any(self) -> bool:
        """Whether anything has changed since."""
        return bool(self._before.changed() or self._before.added())

    @property
    def findings(self) -> Iterator[Finding]:
        """What has changed since, of the module's own and of global variables."""
        for one in (*(known.variable for known in self._before.changed()), *self._before.added()):
            owner, name = one.owner, one.name
            if isinstance(owner, torch.nn.Module):
                yield Finding.of(
                    Kind.ATTRIBUTE,
                    f"The forward changes self.{name} each time; ONNX Runtime does not run that line.",
                    self._places.of_object(owner, _line_in(type(owner), name)),
                    "Keep it in a buffer outside of the wrapped module, or change it in the training loop.",
                )
            elif isinstance(owner, (dict, types.ModuleType)):
                yield Finding.of(
                    Kind.GLOBAL,
                    f"The forward changes the global variable {name} each time; ONNX Runtime does not run that line.",
                    self._writer(one),
                    "Change it in the training loop, or leave this module to PyTorch.",
                )

    def put_back(self) -> None:
        """Give everything the value that it had, and containers what they held.

        What a library's configuration settles in a first call stays, as `problem_type` of transformers does: with its
        old value, the first step would not find the builds that are kept.
        """
        config = self._module.__dict__.get("config")
        changed = [known.variable for known in self._before.changed()]
        settled = [(one, one.value) for one in changed if one.owner is config and is_installed(type(config))]
        self._before.put_back()
        for variable, value in settled:
            variable.put(value)

    def _writer(self, variable: Variable) -> Place:
        """Return the place where a module stores a global variable, or else reads it; the module's own for others."""
        naming = [
            (part, one)
            for part in self._module.modules()
            for one in _methods(type(part))
            if variable.name in one.__code__.co_names and one.__globals__ is variable.table
        ]
        naming.sort(key=lambda found: variable.name not in _stored(found[1]))
        if not naming:
            return self._places.root
        part, writer = naming[0]
        return self._places.of_object(part, _line_of(writer, variable.name))


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
    """Put back, when the block ends in any way, what looking at a model may change in it."""
    # Weights are not put back: a trace refuses to write to them, and whoever runs the model in PyTorch has to use
    # `weights_kept`.
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
