"""Which code is the model's, and the lines and calls of modules that an export comes from, node by node.

Torch's tracer notes the Python stack of each operator that it records, and hands it on to the ONNX nodes that the
operator becomes; ``torch.onnx.export`` throws it away unless it is told to be verbose, and then writes the whole stack
into each node. It is read here where the nodes get their names, which is the last step before the graph is written.
Nodes are named after the modules around them. Torch numbers what would have the same name, "cell_1", as if it were
another module; the scopes of an export say here which call it is, "cell#2", and lead to one module.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

import torch

import ortlab
from ortlab.engine.exporter import symbolic_module
from ortlab.engine.patching import replace
from ortlab.graphs.nodes import CALL, ELSEWHERE, INSIDE, path_in

_lines: ContextVar[dict[str, str] | None] = ContextVar("lines", default=None)

_NAME: Final = "onnx_name"
"""Attribute in which torch keeps the name that a node will have."""

_SOURCE: Final = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): \S+$")


def folder_of(package: ModuleType) -> str:
    """Return the folder of a package as the names of its files begin; beside torch there may be torchvision."""
    return f"{Path(package.__file__ or '').parent}{os.sep}"


TORCH: Final = folder_of(torch)
ORTLAB: Final = folder_of(ortlab)


@cache
def _onnx_runtime() -> str:
    import onnxruntime  # which is checked before anything imports it

    return folder_of(onnxruntime)


def is_model_code(filename: str) -> bool:
    """Tell whether code in this file is the model's: no part of torch, ONNX Runtime, ortlab or the interpreter."""
    return not filename.startswith((TORCH, ORTLAB, _onnx_runtime(), "<frozen"))


def model_line(stack: str) -> str:
    """Return "file:line" of the innermost frame of the model's code in a stack as torch writes it; "" if none is."""
    for line in stack.splitlines():
        found = _SOURCE.match(line)
        if found and is_model_code(found["file"]):
            return f"{found['file']}:{found['line']}"
    return ""


def caller_outside(*folders: str) -> FrameType | None:
    """Return the innermost frame of code that is in none of these folders; None if there is none."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return next((frame for frame in frames if not frame.f_code.co_filename.startswith(folders)), None)


def model_frame() -> FrameType | None:
    """Return the innermost frame of the model's code; None if there is none."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return next((frame for frame in frames if is_model_code(frame.f_code.co_filename)), None)


def in_words(frame: FrameType) -> str:
    """Return file, line and source of what a frame executes."""
    return words_of(frame.f_code.co_filename, frame.f_lineno)


def words_of(name: str, line: int) -> str:
    """Return a file, a line of it, and what stands there."""
    return f"{name}, line {line}: {linecache.getline(name, line).strip()}"


def in_onnx_runtime() -> bool:
    """Tell whether ONNX Runtime's Python code has called torch here: a hook of an export, which looks at the batch."""
    caller = caller_outside(TORCH, ORTLAB)
    return caller is not None and caller.f_code.co_filename.startswith(_onnx_runtime())


# --- the lines of an export ---------------------------------------------------------------------------------------


def install() -> None:
    """Read lines, and name calls, in each export that `source_lines` is around. Calling it again changes nothing."""
    replace(torch._C, "_jit_pass_onnx_assign_scoped_names_for_node_and_value", _read_lines)
    replace(symbolic_module("utils"), "_setup_trace_module_map", _with_calls)
    replace(torch.nn.Module, "_slow_forward", _in_scope)


@contextmanager
def source_lines() -> Iterator[dict[str, str]]:
    """Collect "file:line" by name of the node; the export in the block fills the dictionary."""
    found: dict[str, str] = {}
    token = _lines.set(found)
    try:
        yield found
    finally:
        _lines.reset(token)


def _read_lines(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def assign_scoped_names(graph: Any) -> None:
        original(graph)
        found = _lines.get()
        if found is not None:
            _note(graph, found)

    return assign_scoped_names


def _note(block: Any, found: dict[str, str]) -> None:
    for node in block.nodes():
        name = node.s(_NAME) if node.hasAttribute(_NAME) else ""
        # Around the model are nodes of ORTModule's; the innermost frame of the user's there is the one that called it.
        line = model_line(node.sourceRange()) if INSIDE in name else ""
        if line:
            found[name] = line
        for inner in node.blocks():
            _note(inner, found)


# --- the calls of an export ---------------------------------------------------------------------------------------


def scopes_of(name: str) -> list[str]:
    """Return the scopes in a name of torch's tracer, outermost first: "fc" of "torch.nn.Linear::fc"."""
    scopes = (part.rpartition("::")[2] for part in name.split("/"))
    return [scope for scope in scopes if scope and scope != INSIDE]


class _CallScopes(dict[torch.nn.Module, str]):
    """The scope of each module that torch asks for when it traces a call of it, and then opens around the call."""

    def __init__(self, model: torch.nn.Module, scopes: dict[torch.nn.Module, str]) -> None:
        super().__init__(scopes)
        self._paths = {
            module: path.removeprefix(INSIDE).removeprefix(".") for path, module in model.named_modules()
        }
        self._known = set(self._paths.values())
        self._plain = dict(scopes)
        self._calls: Counter[tuple[str, ...]] = Counter()
        self._open: tuple[str, ...] = ()

    @contextmanager
    def around(self, module: torch.nn.Module) -> Iterator[None]:
        """Give the module, in the block, the scope of its next call."""
        path, before, outer = self._paths[module], self[module], self._open
        if not path:
            yield
            return
        kind, _, name = self._plain[module].rpartition("::")
        # One that calls itself is not inside itself.
        if path_in([*outer, name], self._known) != path or path_in(outer, self._known) == path:
            name = f"{ELSEWHERE}{path}"
        called = (*outer, name)
        self._calls[called] += 1
        number = self._calls[called]
        scope = f"{name}{CALL}{number}" if number > 1 else name
        self[module], self._open = f"{kind}::{scope}", (*outer, scope)
        try:
            yield
        finally:
            self[module], self._open = before, outer


def _with_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    def setup_trace_module_map(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        if _lines.get() is not None:
            traced = torch.jit._trace
            traced._trace_module_map = _CallScopes(model, traced._trace_module_map or {})
        return result

    return setup_trace_module_map


def _in_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    def slow_forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        scopes = torch.jit._trace._trace_module_map
        named = scopes.around(self) if isinstance(scopes, _CallScopes) and self in scopes else nullcontext()
        with named:
            return original(self, *args, **kwargs)

    return slow_forward
