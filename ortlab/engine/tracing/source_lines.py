"""The lines of the model's code that an export comes from, node by node.

Torch's tracer notes the Python stack of each operator that it records, and hands it on to the ONNX nodes that the
operator becomes; ``torch.onnx.export`` throws it away unless it is told to be verbose, and then writes the whole stack
into each node. It is read here where the nodes get their names, which is the last step before the graph is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch

from ortlab.engine.patching import replace
from ortlab.graphs.nodes import INSIDE

_lines: ContextVar[dict[str, str] | None] = ContextVar("lines", default=None)

_NAME: Final = "onnx_name"
"""Attribute in which torch keeps the name that a node will have."""


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
    # Not before ORTModule is loaded: it imports onnxruntime.
    from ortlab.engine.inspection.places import model_line

    for node in block.nodes():
        name = node.s(_NAME) if node.hasAttribute(_NAME) else ""
        # Around the model are nodes of ORTModule's; the innermost frame of the user's there is the one that called it.
        line = model_line(node.sourceRange()) if INSIDE in name else ""
        if line:
            found[name] = line
        for inner in node.blocks():
            _note(inner, found)
