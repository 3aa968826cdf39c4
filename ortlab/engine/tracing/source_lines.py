"""Which code is the model's, and the lines of it that an export comes from, node by node.

Torch's tracer notes the Python stack of each operator that it records, and hands it on to the ONNX nodes that the
operator becomes; ``torch.onnx.export`` throws it away unless it is told to be verbose, and then writes the whole stack
into each node. It is read here where the nodes get their names, which is the last step before the graph is written.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

import torch

import ortlab
from ortlab.engine.patching import replace
from ortlab.graphs.nodes import INSIDE

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
    """Read the lines of each export that `source_lines` is around. Calling it again changes nothing."""
    replace(torch._C, "_jit_pass_onnx_assign_scoped_names_for_node_and_value", _read_lines)


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
