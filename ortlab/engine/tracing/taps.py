"""Marks on values inside a traced module: which value of the exported graph a module took or returned.

While a module is traced, marked tensors are outputs of the graph as well, so that the exporter tells their names.
Before anybody else sees the export, those outputs are taken out again, with what only they needed: the graph is then
the one that an export without marks gives. Where the marks are is written into the model's metadata.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import onnx

_KEY: Final = "ortlab.taps"


class Mark(NamedTuple):
    """What a value is: the `name`-th tensor that a call of a module took ("input") or returned ("output")."""

    module: str
    call: int
    kind: str
    name: str


class Looker:
    """The base of forward hooks that mark values of a trace and change nothing in it: no export depends on them."""


class Taps:
    """The marks of one trace after another; make them with `mark` while `is_tracing`."""

    def __init__(self) -> None:
        self._marks: list[list[Mark]]
        self._tensors: list[torch.Tensor]
        self._places: dict[int, int]
        self.silent = False  # on while ORTModule runs the module, before it traces it, to see what it returns
        self.calls: Counter[str]  # of each module in the present trace; whoever marks counts here
        self.forget()

    def mark(self, mark: Mark, tensor: torch.Tensor) -> None:
        """Mark a tensor that is being traced, as it is now: what is written into it later does not count."""
        internals: Any = torch._C
        value = internals._get_value_trace(tensor).unique()
        if value not in self._places:
            self._places[value] = len(self._tensors)
            # An output of its own kind: an output that is the value itself would give the value another name, and a
            # kind that models use would number their nodes otherwise.
            self._tensors.append(tensor.ceil())
            self._marks.append([])
        self._marks[self._places[value]].append(mark)

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Let what is exported in the block return the marked tensors, too."""
        token = TAPS.set(self)
        try:
            yield
        finally:
            TAPS.reset(token)
            self.forget()

    def forget(self) -> None:
        """Forget the marks of an earlier trace."""
        self._marks, self._tensors, self._places = [], [], {}
        self.calls = Counter()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The marked tensors of the present trace."""
        return tuple(self._tensors)

    def take_out(self, model: onnx.ModelProto) -> None:
        """Take the marked outputs out of an export, and write into its metadata where the marks are."""
        graph = model.graph
        kept = len(graph.output) - len(self._marks)
        producers = {name: node for node in graph.node for name in node.output}
        marked: dict[str, list[Mark]] = {}
        for value, marks in zip(graph.output[kept:], self._marks, strict=True):
            name = producers[value.name].input[0]
            while name in producers and producers[name].op_type == "Identity":
                name = producers[name].input[0]
            marked.setdefault(name, []).extend(marks)
        del graph.output[kept:]
        drop_dead_nodes(graph)
        model.metadata_props.add(key=_KEY, value=json.dumps(marked))


TAPS: Final[ContextVar[Taps | None]] = ContextVar("TAPS", default=None)
"""The marks of the export that is going on; None if nobody wants any."""


def is_tracing() -> bool:
    """Tell whether torch traces what is run."""
    return torch._C._get_tracing_state() is not None


def marks_of(model: onnx.ModelProto) -> dict[str, list[Mark]]:
    """Return the marks of an export, by the name of the value in its graph."""
    found = next((one.value for one in model.metadata_props if one.key == _KEY), "{}")
    return {name: [Mark(*mark) for mark in marks] for name, marks in json.loads(found).items()}


def install() -> None:
    """Return marked tensors from a trace; take them out right after the exporter. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule import _io
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(_io._FlattenedModule, "forward", _with_marks)
    replace(GraphTransitionManager, "_get_exported_model", _without_marks)


def _with_marks(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any) -> Any:
        taps = TAPS.get()
        if taps is None:
            return original(self, *args)
        taps.forget()
        if not is_tracing():
            taps.silent = True
            try:
                return original(self, *args)
            finally:
                taps.silent = False
        return [*original(self, *args), *taps.tensors]

    return forward


def _without_marks(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_exported_model(*args: Any, **kwargs: Any) -> Any:
        exported = original(*args, **kwargs)
        taps = TAPS.get()
        if taps is not None:
            taps.take_out(exported[0])
        return exported

    return get_exported_model


def drop_dead_nodes(graph: onnx.GraphProto) -> None:
    """Take out of a graph what none of its outputs needs."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update(node.input)
            needed.update(_read_inside(node))
    kept.reverse()
    if len(kept) != len(graph.node):
        copies = [type(node)() for node in kept]
        for copy, node in zip(copies, kept, strict=True):
            copy.CopyFrom(node)
        del graph.node[:]
        graph.node.extend(copies)


def _read_inside(node: onnx.NodeProto) -> Iterator[str]:
    """Yield what the branches of an If or the body of a Loop read."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from inner.input
                yield from _read_inside(inner)
            yield from (value.name for value in graph.output)
