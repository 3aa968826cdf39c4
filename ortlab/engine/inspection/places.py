"""Where in a model something happens: the module, by its path, and the line of source."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any

import torch

from ortlab.engine.tracing.source_lines import ORTLAB, is_model_code, model_line, scopes_of
from ortlab.graphs.nodes import INSIDE, joined, path_in
from ortlab.records.preflight import Place


class Places:
    """Finds modules of a model by stack frames, traced nodes and names in a graph."""

    # Paths are those of the model's `named_modules`; `traced` is that of the exported module, "" for the model.

    def __init__(self, model: torch.nn.Module, traced: str = "") -> None:
        self._model = model
        self._traced = traced
        self._names: dict[str, torch.nn.Module] = dict(model.named_modules())
        self._paths = {id(part): path for path, part in self._names.items()}

    def of_module(self, path: str, where: str = "") -> Place:
        """Return the place of a module; without a line of its own, that is where its forward begins."""
        part = self._names[path]
        return Place(path, type(part).__name__, where or forward_line(part))

    @property
    def root(self) -> Place:
        """The place of the module that is exported."""
        return self.of_module(self._traced)

    def of_object(self, part: torch.nn.Module, where: str = "") -> Place:
        """Return the place of a module of the model."""
        return self.of_module(self._paths[id(part)], where)

    def find(self, part: torch.nn.Module) -> Place | None:
        """Return the place of a module; None if it is not the model's."""
        path = self._paths.get(id(part))
        return None if path is None else self.of_module(path)

    def inside(self, path: str) -> Place:
        """Return the place of a module, named as in the exported module."""
        return self.of_module(joined(self._traced, path) if path else self._traced)

    def of_parameter(self, name: str) -> Place:
        """Return the place of the module that owns a parameter or buffer, named as in the exported module."""
        return self.of_module(joined(self._traced, name).rpartition(".")[0])

    def here(self) -> Place:
        """Return the place that is being executed."""
        return self._of_stack(walk_stack(sys._getframe(1)))

    def of_traceback(self, traceback: TracebackType | None) -> Place:
        """Return the place where an exception was raised."""
        return self._of_stack(reversed(list(walk_tb(traceback))))

    def of_node(self, node: Any) -> Place:
        """Return the place of a node of a traced graph, a `torch._C.Node`."""
        return self.of_module(self._resolve(scopes_of(node.scopeName())), model_line(node.sourceRange()))

    def of_name(self, name: str) -> Place:
        """Return the place of a node of an ONNX graph, whose name begins with the path of its module."""
        parts = [part for part in name.split("/") if part and part != INSIDE]
        return self.of_module(self._resolve(parts))

    def _resolve(self, names: list[str]) -> str:
        return path_in(names, self._names, self._traced)

    def _of_stack(self, frames: Iterable[tuple[FrameType, int]]) -> Place:
        """Return the place of the innermost of some frames, each with its line, that are the model's."""
        where, found, others = "", None, []
        for frame, line in frames:
            if not where and is_model_code(frame.f_code.co_filename):
                where = f"{frame.f_code.co_filename}:{line}"
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
            if found is None and isinstance(owner, torch.nn.Module):
                found = self._paths.get(id(owner))
                others.append(owner)
            if found is not None and where:
                break
        if found is None and others:  # ORTModule runs a copy of the module first
            found = self._in_copy(others)
        found = self._traced if found is None else found
        return Place(found, type(self._names[found]).__name__, where)

    def _in_copy(self, owners: list[torch.nn.Module]) -> str | None:
        for outer in reversed(owners):
            for name, part in outer.named_modules():
                if part is owners[0]:
                    inner = name.removeprefix(INSIDE).removeprefix(".")
                    path = joined(self._traced, inner) if inner else self._traced
                    return path if path in self._names else None
        return None


def forward_line(part: torch.nn.Module) -> str:
    """Return file and line where the forward of a module begins; "" for one of torch's own."""
    for owner in (part, *type(part).__mro__):
        forward = owner.__dict__.get("forward")
        code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
        if code is None or code.co_filename.startswith(ORTLAB):
            continue  # a wrapped module has ortlab's before its own
        return f"{code.co_filename}:{code.co_firstlineno}" if is_model_code(code.co_filename) else ""
    return ""
