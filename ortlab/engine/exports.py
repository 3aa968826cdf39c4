"""Exports and gradient graphs that can be used again: by a rerun, by going back, by the next lab of the same module.

They are records of what ONNX Runtime was given and what it made of it. None holds the module or one of its tensors,
so they are kept for each module as long as it lives, and go with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from ortlab.options.options import Effect

if TYPE_CHECKING:
    import torch

    from ortlab.engine.schema import Schema
    from ortlab.engine.tracing.input_sizes import Sizes
    from ortlab.memory.recompute import RecomputePlaces
    from ortlab.options.options import Options
    from ortlab.records.messages import Message

KEPT_EXPORTS: Final = 4
"""How many exports are kept for each module; the last used ones. One is a few MB, since it holds no weights."""

KEPT_GRAPHS: Final = 4
"""How many gradient graphs are kept for each export."""


@dataclass(frozen=True, eq=False)
class BuiltGraph:
    """A graph that is ready for a session: optimised and, for training, with its gradient."""

    options: Options
    forward: bytes  # the optimised graph before the gradient is built, serialised
    # `_graph_info`, `_onnx_models` and `_gradient_map` of ORTModule's manager; the last is empty without a gradient.
    info: Any
    models: Any
    gradient_map: tuple[int, ...]
    digest: str  # SHA-256 of the graph that sessions are created from
    symbols: Mapping[str, int]  # values of the symbolic dimensions in the batch that it was built with
    messages: tuple[Message, ...]


@dataclass(frozen=True, eq=False)
class Export:
    """A module as an ONNX model, with everything that a manager of ORTModule needs to go on from there."""

    options: Options
    training: bool
    # ORTModule's `ExportedModelInfo`, `ModelInfoForExport` and `PostExportProcessedModelInfo`, the last without module
    # and tensors.
    exported: Any
    inputs: Any
    processed: Any
    flattened: Mapping[str, Any]  # what the export noted on the module that ORTModule puts around the user's
    device: torch.device
    inert: frozenset[str]  # switches that have made no difference to this export and could make none
    messages: tuple[Message, ...]
    numbers: bool = False  # whether the forward made Python numbers of traced values; see `input_sizes`
    # "file:line" by name of a node; empty for an export from the disk, since lines move without the code changing.
    lines: Mapping[str, str] = field(default_factory=dict)
    graphs: list[BuiltGraph] = field(default_factory=list)  # the last used one last
    # ORT's answers about memory, by digest of the graph and kind of probe.
    savings: dict[tuple[str, str], tuple[str, Mapping[str, tuple[str, int]]]] = field(default_factory=dict)
    places: dict[str, RecomputePlaces] = field(default_factory=dict)  # by digest of the graph

    def serves(self, options: Options) -> bool:
        """Tell whether it is what these switches would export."""
        effect = self.options.stage_of_change(options, ignoring=self.inert)
        return effect is None or effect > Effect.EXPORT

    def graph(self, options: Options) -> BuiltGraph | None:
        """Return the graph that these switches would build, if there is one."""
        for built in reversed(self.graphs):
            effect = built.options.stage_of_change(options, ignoring=self.inert)
            if effect is None or effect > Effect.GRAPH:
                self.keep(built)
                return built
        return None

    def keep(self, built: BuiltGraph) -> None:
        """Keep a graph, as the last used one."""
        self.graphs[:] = [*(one for one in self.graphs if one is not built), built][-KEPT_GRAPHS:]


@dataclass(frozen=True, eq=False)
class KeptExport:
    """An export, with the schema of the call and the module that it is valid for."""

    schema: Schema
    export: Export
    bound_to: Sizes = frozenset()  # sizes of the inputs that it is bound to

    def loosened_by(self, others: Iterable[KeptExport]) -> KeptExport:
        """Return it bound only to those sizes that were the same whenever this graph was exported.

        `others` are kept already; where one has the same graph, its export with its gradient graphs takes this one's
        place.
        """
        result = self
        for other in others if self.bound_to else ():
            if other.bound_to and other.schema == self.schema and _model(other) == _model(self):
                result = replace(result, export=other.export, bound_to=result.bound_to & other.bound_to)
        return result


def _model(kept: KeptExport) -> bytes:
    return bytes(kept.export.exported.exported_model.SerializeToString())


_kept: Final[weakref.WeakKeyDictionary[torch.nn.Module, list[KeptExport]]] = weakref.WeakKeyDictionary()


def keep(module: torch.nn.Module, kept: KeptExport) -> None:
    """Keep an export of a module, as the last used one."""
    others = [one for one in _kept.get(module, ()) if one.export is not kept.export]
    _kept[module] = [*others, kept][-KEPT_EXPORTS:]


def find(
    candidates: Iterable[KeptExport],
    schema: Schema,
    options: Options,
    *,
    training: bool,
    sizes: Sizes | None = None,
) -> KeptExport | None:
    """Return the first export with a fitting graph that is valid for a call, else the first valid one, else None.

    `sizes` are those of the call's inputs; None if they do not matter.
    """
    found = None
    for kept in candidates:
        if sizes is not None and not kept.bound_to <= sizes:
            continue
        if kept.schema == schema and kept.export.training == training and kept.export.serves(options):
            if kept.export.graph(options) is not None:
                return kept
            found = found or kept
    return found


def kept_exports(module: torch.nn.Module) -> tuple[KeptExport, ...]:
    """Return what is kept of a module, the last used one first."""
    return tuple(reversed(_kept.get(module, ())))


@contextmanager
def set_aside(module: torch.nn.Module) -> Iterator[None]:
    """Keep what is kept of a module out of sight in the block, so that its next call exports it anew."""
    before = _kept.pop(module, [])
    try:
        yield
    finally:
        together = [*before, *_kept.get(module, ())][-KEPT_EXPORTS:]
        if together:
            _kept[module] = together


def forget(module: torch.nn.Module) -> None:
    """Drop what is kept of a module; its next call exports it anew."""
    _kept.pop(module, None)
