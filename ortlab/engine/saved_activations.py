"""What an execution keeps for its backward, read from the graph that it executes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import numpy as np
import onnx
from onnx import TensorProto, helper

from ortlab.engine.inspection.places import Places
from ortlab.engine.kept_values import ForwardOfGraph, Kept, name_of
from ortlab.engine.passes.graph_edits import aten_operator
from ortlab.engine.value_shapes import Inferred, ValueShapes
from ortlab.errors import BuildError
from ortlab.memory.saved_activations import (
    KeptInput,
    PlanEffect,
    SavedActivation,
    SavedActivations,
    largest_first,
    layer_of,
)
from ortlab.memory.symbolic_sizes import Shape, shape_at
from ortlab.options.options import setting_words

if TYPE_CHECKING:
    import torch

    from ortlab.engine.execution import Execution, Progress
    from ortlab.engine.kept_builds import BuiltGraph

_IN_WORDS: Final = "com.microsoft"
"""Domain of ORT's own operators, which plans and logs name without it."""


def read_activations(
    execution: Execution,
    model: torch.nn.Module,
    *,
    part: str = "",
    sizes: Mapping[str, int] | None = None,
) -> SavedActivations:
    """Read what a training execution keeps for its backward, with the memory plans that it applies.

    `model` is the whole model, which modules are named in; `part` is the path of the wrapped part that is executed,
    empty for the whole model. `sizes` has bytes by name of a result, as a profiled step has seen them: for what the
    graph does not tell. Raises BuildError if the execution has no backward.
    """
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


def with_plans(
    activations: SavedActivations,
    execution: Execution,
    model: torch.nn.Module,
    configs: Sequence[str],
    *,
    part: str = "",
    tell: Progress = lambda *_: None,
) -> SavedActivations:
    """Say for each activation which plans remove it, and for each plan what it does to the saved activations.

    Each plan in `configs` is applied alone, in a session that never runs, once for each graph. The execution, `model`
    and `part` are those of `read_activations`.
    """
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
            module, source, layer = origins.of(kept.root)
            rows.append(
                SavedActivation(
                    value=kept.root,
                    node=name_of(node),
                    operator=_operator(forward.nodes[forward.made[forward.source(kept.root)][0]]),
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
    """Return the shape of a buffer, symbolic and in numbers; a view of it has as many elements.

    A symbolic shape that comes to another number of elements than the numbers is left out.
    """
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


def _operator(node: onnx.NodeProto) -> str:
    called = aten_operator(node)
    if called:
        return called if "::" in called else f"aten::{called}"
    return node.op_type if node.domain in {"", _IN_WORDS} else f"{node.domain}.{node.op_type}"


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
