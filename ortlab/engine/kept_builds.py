"""Exports, gradient graphs and sessions that can be used again: by a rerun, by going back, by a module's next lab.

Exports and graphs are records of what ONNX Runtime was given and what it made of it. None holds the module or one of
its tensors, so they are kept for each module as long as it lives, and go with it. Sessions belong to one engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.patching import with_attributes
from ortlab.options.options import Effect

if TYPE_CHECKING:
    import torch

    from ortlab.engine.execution import Execution
    from ortlab.engine.ort import OrtEngine
    from ortlab.engine.schema import Schema
    from ortlab.engine.tracing.sizes import SizeGuards
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
    sizes: SizeGuards  # which sizes of inputs it is good for
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
    # The schema that the trace began with, where the forward settled something in it: what a rerun starts from.
    unsettled: Schema = ()

    def is_for(self, schema: Schema) -> bool:
        """Tell whether it is valid for calls of a schema."""
        return schema in (self.schema, self.unsettled)

    def fits(self, schema: Schema, options: Options, *, training: bool) -> bool:
        """Tell whether it is valid for calls of a schema with these switches in this mode, whatever their sizes."""
        return self.is_for(schema) and self.export.training == training and self.export.serves(options)

    def joined_to(self, others: Iterable[KeptExport]) -> KeptExport:
        """Return the one of `others`, which are kept already, that has the same graph for other sizes, or itself."""
        # Its export, with its gradient graphs, is then good for the sizes of both.
        mine = self.export
        for other in others if mine.sizes.any else ():
            if other.fits(self.schema, mine.options, training=mine.training) and _model(other) == _model(
                self
            ):
                other.export.sizes.join(mine.sizes)
                return other
        return self


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
    call: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
) -> KeptExport | None:
    """Return the first export with a fitting graph that is valid for a call, else the first valid one, else None."""
    found = None
    for kept in candidates:
        valid = kept.fits(schema, options, training=training)
        if valid and (call is None or kept.export.sizes.hold(*call)):
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


_written: Final[weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]]] = weakref.WeakKeyDictionary()


def written_buffers(module: torch.nn.Module) -> frozenset[str]:
    """Name what its forward is known to write to: graphs take such a buffer for an input."""
    # Torch's exporter makes constants of other buffers outside the `state_dict`: another value of one is another graph.
    return _written.get(module, frozenset())


def note_written(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Note buffers and parameters that the forward of a module writes to."""
    _written[module] = written_buffers(module).union(names)


_EARLIER_KEPT: Final = 3
"""Sessions for other calls than the last one; each has its own graph, and none has the weights.

The two steps of a GAN alternate, and so do batches of one and of several; and two calls that are unlike may come before
one backward.
"""


@dataclass(frozen=True, eq=False)
class Built:
    """An execution that runs calls of one kind, with what it was made for and of."""

    kept: KeptExport
    graph: BuiltGraph
    options: Options
    deterministic: bool
    execution: Execution


class BuiltSessions:
    """The sessions of one module.

    Each change is one assignment of what was worked out before, and a session is freed once it is in no list: Ctrl-C
    may come between any two lines.
    """

    def __init__(self) -> None:
        self._last: dict[bool, Built] = {}
        self._earlier: list[Built] = []
        self._held: tuple[Built, ...] = ()

    def last(self, *, training: bool | None = None) -> Built | None:
        """Return what ran last in a mode; without a mode in training, or else in inference. None if nothing did."""
        if training is None:
            return self._last.get(True) or self._last.get(False)
        return self._last.get(training)

    def earlier(self, *, training: bool) -> Sequence[Built]:
        """Return what ran in a mode before, and is kept."""
        return [one for one in self._earlier if one.execution.training == training]

    def exports(self) -> list[KeptExport]:
        """Return the export of what ran last in each mode."""
        return [built.kept for built in self._last.values()]

    def keep(self, built: Built, usable: Callable[[Built], bool]) -> None:
        """Make `built` what runs in its mode, and keep what ran before, whose backward may be to come."""
        # Of the earlier sessions, those that `usable` refuses, and all but the latest `_EARLIER_KEPT` of each kind, are
        # freed.
        training = built.execution.training
        before = self._last.get(training)
        earlier = [one for one in self._earlier if one is not built]
        if before is not None and before is not built:
            earlier.append(before)
        self._last, self._earlier = {**self._last, training: built}, earlier
        self._release_unless(usable)

    @contextmanager
    def beside(self, usable: Callable[[Built], bool]) -> Iterator[None]:
        """Free none of the present sessions while the block runs; what ran last before it also runs next after it."""
        before, last = self._held, dict(self._last)
        self._held = (*before, *self._last.values(), *self._earlier)
        try:
            yield
        finally:
            beside = [one for mode, one in self._last.items() if one is not last.get(mode)]
            earlier = [one for one in (*self._earlier, *beside) if one not in last.values()]
            self._held, self._last, self._earlier = before, last, earlier
            self._release_unless(usable)

    def _release_unless(self, usable: Callable[[Built], bool]) -> None:
        """Free the earlier sessions that no call could use, and of the others all but the latest of each kind."""
        latest: list[Built] = []
        # Those without an arena are for measuring: they leave the others their room.
        for arena in (True, False):
            alike = [one for one in self._earlier if one.options.cpu_memory_arena == arena and usable(one)]
            latest += alike[-_EARLIER_KEPT:]
        self.release_earlier(keep=lambda one: one in latest)

    def release_earlier(self, keep: Callable[[Built], bool] = lambda _: False) -> None:
        """Free the earlier sessions, but for those to keep."""
        kept = [one for one in self._earlier if one in self._held or keep(one)]
        freed, self._earlier = [one for one in self._earlier if one not in kept], kept
        for one in freed:
            one.execution.release_session()

    def release_last(self, *, training: bool) -> None:
        """Free what ran last in a mode, if anything did."""
        built = self._last.pop(training, None)
        if built is not None and built not in self._held:
            built.execution.release_session()

    def release(self) -> None:
        """Free all of them."""
        for training in (True, False):
            self.release_last(training=training)
        self.release_earlier()


@contextmanager
def built_apart(engine: OrtEngine, **changes: object) -> Iterator[Callable[[], None]]:
    """Let an engine build anew, with changed options, what it needs in the block, and give it its state back."""
    # Yields a function that frees the sessions of the block, so that the next call makes one of the graph that is
    # there.
    # Files of exports and graphs are the user's: nothing of the block goes there.
    options = engine.options.replace(export_cache_dir="", save_onnx=False, fallback=False, **changes)
    sessions, said = BuiltSessions(), ("executed_by", "fallback_reason", "rebuild_reason")
    with (
        with_attributes(engine, said, options=options, _sessions=sessions, _failed=None, _starts_over=False),
        set_aside(engine._module),
    ):
        try:
            yield sessions.release
        finally:
            sessions.release()
            forget(engine._module)
