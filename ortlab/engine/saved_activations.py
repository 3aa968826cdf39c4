"""What an execution keeps for its backward, read from the graph that it executes, and when it was allocated.

A session saves its graph in the order in which it executes it, so what stands before the YieldOp, which hands the
outputs to PyTorch, is the forward, and what stands behind it the backward. Only the copies of nodes that are
recomputed, and what hands kept values to them, may stand anywhere; they run in the backward. A graph that another
session has optimized has what that one made at its end: what the outputs come from is the forward all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import numpy as np
import onnx
from onnx import TensorProto, helper

from ortlab.engine.inspection.places import Places
from ortlab.engine.passes.training_graph import HIDING
from ortlab.engine.value_shapes import Inferred, ValueShapes
from ortlab.errors import BuildError
from ortlab.graphs.nodes import YIELD, is_copy, is_holder, operator_in_namespace
from ortlab.graphs.viewer.grouping import in_order
from ortlab.memory.saved_activations import (
    KeptInput,
    PlanEffect,
    SavedActivation,
    SavedActivations,
    largest_first,
    layer_of,
)
from ortlab.memory.symbolic_sizes import Shape, shape_at
from ortlab.memory.trace import ONNX_VIEWS
from ortlab.options.options import setting_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from ortlab.engine.execution import Execution, Progress
    from ortlab.engine.kept_builds import BuiltGraph

_ORTS_OWN: Final = "com.microsoft."
"""Before the names of ORT's own operators, which plans and logs name without it."""


def read_activations(
    execution: Execution,
    model: torch.nn.Module,
    *,
    part: str = "",
    sizes: Mapping[str, int] | None = None,
) -> SavedActivations:
    """Read what a training execution keeps for its backward, with the memory plans that it applies."""
    # `sizes` has bytes by name of a result, as a profiled step has seen them: for what the graph does not tell.
    if not execution.training:
        raise BuildError(
            "Nothing is kept for backward: the last step built no gradient.",
            why="The model was in eval mode, or gradients were off.",
            fix="Run a training step: model.train(), then %%ort_step or lab.step(fn).",
        )
    kept = _with_sizes(_activations(execution, model, part, None), sizes or {})
    last = execution.last_sizes()
    return replace(
        kept, last_batch={name: size for name, size in last.items() if kept.symbols.get(name) != size}
    )


def kept_bytes(execution: Execution, model: torch.nn.Module, part: str = "") -> dict[str, int]:
    """Return what is kept without any plan: bytes by name of the result, those of a view under its own name, too."""
    rows = _activations(execution, model, part, ()).rows
    return {name: row.bytes for row in rows if row.bytes is not None for name in (row.value, *row.views)}


def with_plans(
    activations: SavedActivations,
    execution: Execution,
    model: torch.nn.Module,
    configs: Sequence[str],
    *,
    part: str = "",
    tell: Progress = lambda *_: None,
) -> SavedActivations:
    """Say for each activation which plans remove it, and for each plan what it does to the saved activations."""
    # Each plan in `configs` is applied alone, in a session that never runs, once for each graph.
    effects = []
    try:
        plain = {row.value: row for row in _activations(execution, model, part, ()).rows}
        for done, config in enumerate(configs):
            tell(f"Looking for what {config} removes", done / len(configs))
            kept = {row.value: row for row in _activations(execution, model, part, (config,)).rows}
            removed = tuple(row for value, row in plain.items() if value not in kept)
            added = tuple(row for value, row in kept.items() if value not in plain)
            effects.append(PlanEffect(config, removed, added, (part,)))
    finally:
        tell("", 1.0)
    removing = {one.config: {row.value for row in one.removed} for one in effects}
    rows = [
        replace(row, plans=tuple(config for config, values in removing.items() if row.value in values))
        for row in activations.rows
    ]
    return replace(activations, rows=tuple(rows), effects=tuple(effects))


_ACTIVATIONS: Final[WeakKeyDictionary[BuiltGraph, dict[object, SavedActivations]]] = WeakKeyDictionary()
"""By graph, then by the options and plans of the session: reading takes another session."""


def _activations(
    execution: Execution, model: torch.nn.Module, part: str, plans: tuple[str, ...] | None
) -> SavedActivations:
    """Read the graph with these plans; None means with those that are applied."""
    known = _ACTIVATIONS.setdefault(execution.built, {})
    applied = execution.plans if plans is None else plans
    question = (execution.options, applied)
    if question not in known:
        serialized = (
            execution.serialized_graph("execution") if plans is None else execution.execution_graph(plans)
        )
        known[question] = _read(execution, model, part, serialized, applied)
    return known[question]


_INFERRED: Final[WeakKeyDictionary[BuiltGraph, Inferred]] = WeakKeyDictionary()


def _inferred(execution: Execution) -> Inferred:
    """Infer the shapes of the exported graph, once for all plans."""
    if execution.built not in _INFERRED:
        processed = onnx.load_model_from_string(execution.serialized_graph("processed"))
        _INFERRED[execution.built] = Inferred(processed, execution.built.symbols)
    return _INFERRED[execution.built]


def _read(
    execution: Execution, model: torch.nn.Module, part: str, serialized: bytes, plans: tuple[str, ...]
) -> SavedActivations:
    graph = onnx.load_model_from_string(serialized)
    forward = ForwardOfGraph(graph)
    symbols = execution.built.symbols
    shapes = ValueShapes(graph, _inferred(execution), forward)
    origins = _Origins(forward, Places(model, part))
    rows, inputs = [], []
    for kept in forward.kept():
        shape, numbers = _shape(kept, shapes, symbols)
        element_type = shapes.element_type(kept.root)
        dtype, width = _dtype(element_type)
        size = None if numbers is None or not width else prod(numbers) * width
        if kept.root in forward.made:
            place, output = forward.made[kept.root]
            node = forward.nodes[place]
            maker = forward.nodes[forward.made[forward.source(kept.root)][0]]
            module, source, layer = origins.of(kept.root)
            rows.append(
                SavedActivation(
                    value=kept.root,
                    node=name_of(node),
                    operator=operator_in_namespace(maker).removeprefix(_ORTS_OWN),
                    output=output,
                    module=module,
                    source=source,
                    layer=layer,
                    shape=shape,
                    dtype=dtype,
                    element_bytes=width,
                    bytes=size,
                    views=tuple(kept.views),
                    kept_by=tuple(kept.readers),
                    returned=kept.returned,
                    position=place,
                    part=part,
                )
            )
        elif kept.root in execution.user_inputs and kept.readers:
            inputs.append(KeptInput(kept.root, shape, dtype, width, size, tuple(kept.readers), part))
    words = execution.options.recompute
    applied = (*plans, setting_words("recompute", words)) if words else plans
    return SavedActivations(largest_first(rows), dict(symbols), tuple(inputs), applied)


def _shape(
    kept: Kept, shapes: ValueShapes, symbols: Mapping[str, int]
) -> tuple[Shape | None, tuple[int, ...] | None]:
    """Return the shape of a buffer, symbolic and in numbers; a view of it has as many elements."""
    # A symbolic shape that comes to another number of elements than the numbers is left out.
    names = (kept.root, *kept.views)
    shape = next((found for name in names if (found := shapes.shape(name)) is not None), None)
    numbers = next((found for name in names if (found := shapes.numbers(name)) is not None), None)
    told = None if shape is None else shape_at(shape, symbols)
    if told is not None and numbers is not None and prod(told) != prod(numbers):
        return None, numbers
    return shape, numbers


def _with_sizes(activations: SavedActivations, sizes: Mapping[str, int]) -> SavedActivations:
    rows = [
        replace(row, bytes=sizes[row.value], measured=True)
        if row.bytes is None and row.value in sizes
        else row
        for row in activations.rows
    ]
    return replace(activations, rows=largest_first(rows))


def _dtype(element_type: int) -> tuple[str, int]:
    """Return the name of an element type and the bytes of one element; 0 where that is not known."""
    if not element_type:
        return "", 0
    name = TensorProto.DataType.Name(element_type).lower()
    if element_type == TensorProto.BFLOAT16:
        return name, 2
    if element_type == TensorProto.STRING:
        return name, 0
    return name, int(np.dtype(helper.tensor_dtype_to_np_dtype(element_type)).itemsize)


class _Origins:
    """Finds the module that a value of the forward is computed in."""

    def __init__(self, forward: ForwardOfGraph, places: Places) -> None:
        self._forward = forward
        self._places = places

    def of(self, name: str) -> tuple[str, str, str]:
        """Return path of the module, file and line where its forward begins, and path of its layer."""
        place = self._places.of_name(self._name(name))
        return place.module, place.where, layer_of(place.module)

    def _name(self, value: str) -> str:
        """Return the name that leads to a module: nodes that ORT puts in have none, and take that of what they read."""
        while value in self._forward.made:
            node = self._forward.nodes[self._forward.made[value][0]]
            for name in (value, node.name):
                if "/" in name:
                    return name
            value = next((one for one in node.input if one in self._forward.made), "")
        return value


# ---- what outlives the forward -------------------------------------------------------------------------------------


@dataclass
class Kept:
    """A buffer that the forward fills and the backward reads, or the caller gets."""

    root: str  # the result that fills it, or the graph's input that it is
    views: list[str] = field(default_factory=list)  # results over it, other than the root, that are read
    readers: list[str] = field(default_factory=list)  # backward nodes that read it
    returned: bool = False  # whether the YieldOp reads it


class ForwardOfGraph:
    """The forward part of a training session's execution graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        own = in_order([node for node in graph.node if not is_copy(node) and not is_holder(node)])
        border = next(place for place, node in enumerate(own) if node.op_type == YIELD)
        self.nodes, self._yield = own[:border], own[border]
        forward = {id(node) for node in own[: border + 1]}
        self._backward = [node for node in graph.node if id(node) not in forward]
        self._inputs = {value.name for value in graph.input}

    @cached_property
    def made(self) -> dict[str, tuple[int, int]]:
        """By result: the place of its node among `nodes`, and which of the node's outputs it is."""
        return {
            name: (place, output)
            for place, node in enumerate(self.nodes)
            for output, name in enumerate(node.output)
            if name
        }

    def root(self, name: str) -> str:
        """Return the value whose buffer a value is: itself, unless it is a view."""
        while name in self.made:
            node = self.nodes[self.made[name][0]]
            if node.domain or node.op_type not in ONNX_VIEWS or node.output[0] != name:
                break
            name = node.input[0]
        return name

    def source(self, name: str) -> str:
        """Return the result that a result of the forward is, behind nodes that hand it on in its memory."""
        place, output = self.made[name]
        node = self.nodes[place]
        return self.source(node.input[output]) if node.op_type == HIDING else name

    def kept(self) -> tuple[Kept, ...]:
        """Return the buffers that outlive the forward, in the order of their first reader; constants are left out."""
        found: dict[str, Kept] = {}
        for node in (self._yield, *self._backward):
            for name in dict.fromkeys(node.input):
                root = self.root(name)
                if root not in self.made and root not in self._inputs:
                    continue
                one = found.setdefault(root, Kept(root))
                if name != root and name not in one.views:
                    one.views.append(name)
                if node is self._yield:
                    one.returned = True
                elif name_of(node) not in one.readers:
                    one.readers.append(name_of(node))
        return tuple(found.values())


def name_of(node: onnx.NodeProto) -> str:
    """Return the name of a node, or of its first result where ORT has given it none."""
    return node.name or next(filter(None, node.output), "")


_NEVER_IN_PLACE: Final = frozenset(
    "Concat ConcatTraining Conv FusedMatMul Gather GatherElements Gemm MatMul Shape Split Transpose".split()  # noqa: SIM905 - so many words are easier to read without quotes
)
"""Operators whose results cannot be written over what they are still read from."""


def earliest_places(execution: Execution, values: Iterable[str]) -> dict[str, int]:
    """Return for each kept value the place of the first node in whose turn its memory can have been allocated."""
    # An activation has memory of its own, from its node on, unless its operator works in place: ORT then lets it write
    # into the buffer of an input that nobody reads any more (`MayInplace`; ``allocation_planner.cc``,
    # `FindReusableInput`), also where buffers are otherwise not reused, as in ORTModule's sessions. Which operators may
    # do so is not told, so that every one may that could: an activation's memory is from some node between the first of
    # such a chain and its own. Places count from 0 in the order of execution. `values` are names of results that fill a
    # buffer (`SavedActivation.value`); those that the forward does not make are left out.
    graph = onnx.load_model_from_string(execution.serialized_graph("execution"))
    forward = ForwardOfGraph(graph)
    outliving = {one.root for one in forward.kept()}
    last_read = {forward.root(name): place for place, node in enumerate(forward.nodes) for name in node.input}
    dies = {root: place for root, place in last_read.items() if root not in outliving}
    return {value: _earliest(forward, dies, value) for value in values if value in forward.made}


def _earliest(forward: ForwardOfGraph, dies: Mapping[str, int], value: str) -> int:
    """Follow the chain of nodes that can have worked in place; `dies` has the last reader of each buffer."""
    earliest = place = forward.made[value][0]
    waiting, seen = [place], {value}
    while waiting:
        place = waiting.pop()
        earliest = min(earliest, place)
        node = forward.nodes[place]
        if node.op_type in _NEVER_IN_PLACE:
            continue
        for name in node.input:
            root = forward.root(name)
            if root in forward.made and root not in seen and dies.get(root) == place:
                seen.add(root)
                waiting.append(forward.made[root][0])
    return earliest
