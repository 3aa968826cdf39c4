"""Activations and their gradients out of a session of ONNX Runtime, by module.

A session gets the values that modules take and return, and the gradients of these, as further outputs of the gradient
graph; they come with the parameters' gradients when the backward has run. The gradient graph itself is the one that
runs without capture. What a session then optimises can be another: it does not fuse what somebody wants to see between.

Upstream's `StatisticsSubscriber` puts an autograd.Function behind each module into the graph, which ends the
fusions of the gradient graph as well.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import onnx
import torch

from ortlab.engine.build_log import runtime_messages
from ortlab.engine.inspection.places import Places
from ortlab.engine.passes.graph_edits import (
    FLOAT_TYPES,
    WITHOUT_VALUES,
    GraphFacts,
    aten_operator,
    call_kernel,
)
from ortlab.engine.passes.training_graph import HIDING, OF
from ortlab.engine.patching import set_to
from ortlab.engine.tracing.taps import Mark, Taps, marks_of
from ortlab.records.messages import MessageLog

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ortlab.engine.execution import Execution

Receive = Callable[[Mark, torch.Tensor], None]
"""Called with each captured tensor; the mark's kind is "input", "output", "input gradient" or "output gradient"."""

Edit = Callable[[onnx.ModelProto], None]
"""Changes a gradient graph in place, for experiments with faults."""

_GRADIENT: Final = "_grad"
_HANDED_ON: Final = "_handed_on"
_MOVED: Final = frozenset({"Gather", "GatherND", "ShrunkenGather", "Reshape", "Slice"})
"""Operators that the compute optimizer moves towards the inputs: their names do not say where they are now."""

_PASSING: Final = frozenset({"Identity", "Dropout", "Cast"})
"""Operators that ORT may remove where they change nothing: their output is then their input."""

_ADDING: Final = frozenset({"Add", "Sum"})


class Capture:
    """What is captured of the executions that are built while it is `active`."""

    # `receive` is called when a backward has run, with the values of its forward first; calls are counted from 1 on
    # since the last `start_step`. `edit` changes each gradient graph before its session is created. Without
    # `hands_over` no value is captured, and graphs are changed only.

    def __init__(self, receive: Receive, edit: Edit | None = None, *, hands_over: bool = True) -> None:
        self.taps = Taps()  # the marks that exports are to carry
        self.hands_over = hands_over
        self.receive = receive
        self.edit = edit
        self.missing: dict[Mark, str] = {}  # why a value is not handed over
        self._calls: Counter[str] = Counter()

    def active(self) -> AbstractContextManager[None]:
        """Capture in the block what is built in it."""
        return set_to(CAPTURE, self)

    def start_step(self) -> None:
        """Count the calls of modules from 1 again."""
        self._calls.clear()

    def attach(self, execution: Execution, part: str) -> None:
        """Give an execution a session that hands over what modules took and returned."""
        model = execution._manager._onnx_models.optimized_model
        if not self.hands_over:
            present = [value.name for value in model.graph.output]
            execution._manager._execution_agent = _captured_agent(execution, present, self.edit)
            return
        wanted = _wanted(execution, model, part)
        self.missing |= {mark: words for mark, words in wanted.missing.items() if mark not in self.missing}
        agent = _captured_agent(execution, [*wanted.names], self.edit)
        execution._manager._execution_agent = _CapturingAgent(agent, self, wanted)

    def forward_begun(self, calls: Mapping[str, int]) -> Counter[str]:
        """Return how often each module had been called before this forward, and count its calls."""
        before = Counter(self._calls)
        self._calls.update(calls)
        return before


CAPTURE: Final[ContextVar[Capture | None]] = ContextVar("CAPTURE", default=None)
"""What is captured of the executions that are built; None for nothing."""


class _Wanted(NamedTuple):
    """What is asked of a session: for each mark the values to add up, all their names, and calls of each module."""

    marks: list[tuple[Mark, tuple[str, ...]]]
    names: dict[str, int]
    calls: dict[str, int]
    missing: dict[Mark, str]


def _wanted(execution: Execution, model: onnx.ModelProto, part: str) -> _Wanted:
    exported = execution._manager._graph_transition_manager._exported_model_info.exported_model
    processed = execution._info._post_export_processed_model
    made = {name for node in model.graph.node for name in node.output if name}
    aliases = _aliases(processed)
    places = Places(execution.module)
    contributions = _contributions(model)
    forward: list[tuple[Mark, tuple[str, ...]]] = []
    backward: list[tuple[Mark, tuple[str, ...]]] = []
    missing: dict[Mark, str] = {}
    calls: dict[str, int] = {}
    marked = marks_of(exported)
    facts = GraphFacts(processed)
    returned = {value for value, marks in marked.items() if any(mark.kind == "output" for mark in marks)}
    inputs = {value.name for value in model.graph.input}
    for value, marks in marked.items():
        name = next((one for one in aliases(value) if one in made), "")
        parts = contributions.get(name, {})
        taking = Counter(mark.module for mark in marks if mark.kind == "input")
        returning = {(mark.module, mark.call) for mark in marks if mark.kind == "output"}
        handing_on = returning & {(mark.module, mark.call) for mark in marks if mark.kind == "input"}
        within = {one: one.removeprefix(part).removeprefix(".") for one in taking}
        apart = [
            one for one in within.values() if not all(_is_inside(one, other) for other in within.values())
        ]
        lost = _sharing(apart, aliases(value), facts, places, returned) if apart else []
        for mark in marks:
            calls[mark.module] = max(calls.get(mark.module, 0), mark.call)
            if not name:
                missing[mark] = _AN_INPUT if value in inputs else _FUSED
                continue
            forward.append((mark, (name,)))
            gradient = mark._replace(kind=f"{mark.kind} gradient")
            if mark.kind == "output":
                # That of what a module takes and returns has parts from before it.
                if f"{name}{_GRADIENT}" in made and (mark.module, mark.call) not in handing_on:
                    backward.append((gradient, (f"{name}{_GRADIENT}",)))
                continue
            if taking[mark.module] > 1 or (mark.module, mark.call) in returning:
                continue  # whose gradient is whose cannot be told from names
            inside = within[mark.module]
            if any(one == inside or not _is_inside(one, inside) for one in lost):
                missing[gradient] = _SHARED
                continue
            found = _of_module(parts, inside, places)
            if found:
                backward.append((gradient, found))
    present = [value.name for value in model.graph.output]
    wanted_names = dict.fromkeys(name for _, names in (*forward, *backward) for name in names)
    new = [name for name in wanted_names if name not in set(present)]
    index = {name: number for number, name in enumerate((*present, *new))}
    return _Wanted([*forward, *backward], index, calls, missing)


_FUSED: Final = "ONNX Runtime computes it inside a larger operator, or not at all."
_AN_INPUT: Final = "It is an input of the graph."
_SHARED: Final = (
    "Modules that begin alike share nodes of the graph, and whose gradient is whose cannot be told."
)


def _aliases(model: onnx.ModelProto) -> Callable[[str], list[str]]:
    """Return a function that lists the names of one value, before and behind operators that may be removed."""
    before = {
        node.output[0]: node.input[0] for node in model.graph.node if node.op_type in _PASSING and node.input
    }
    behind: dict[str, list[str]] = {}
    for output, given in before.items():
        behind.setdefault(given, []).append(output)

    def names(value: str) -> list[str]:
        found = [value]
        name = value
        while name in before:
            name = before[name]
            found.append(name)
        ahead = list(behind.get(value, ()))
        while ahead:
            one = ahead.pop()
            found.append(one)
            ahead += behind.get(one, ())
        return found

    return names


def _contributions(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """Return the parts that each value's gradient is the sum of, with the forward node that each part comes from."""
    # ORT names them ``<value>_grad``, or ``<value>_grad_0`` and so on where there are several
    # (``gradient_graph_builder.cc``), and the nodes that make them ``<node of the forward>_Grad/...``.
    producers = {name: node for node in model.graph.node for name in node.output if name}
    moved = {node.name for node in model.graph.node if node.op_type in _MOVED}
    passing = {node.name: node for node in model.graph.node if node.op_type in _PASSING and node.name}

    def parts(name: str) -> dict[str, str]:
        node = producers[name]
        forward = node.name.partition("_Grad/")[0]
        through = passing.get(forward)
        if node.op_type == "Identity" and through is not None:
            # What ORT takes for the same value may be read by others than the reader of this one.
            behind = f"{through.output[0]}{_GRADIENT}"
            if behind in producers and behind in node.input:
                return parts(behind)
        if node.op_type not in _ADDING or not any(is_part(one, name) for one in node.input):
            return {name: "" if forward in moved else forward}
        if not all(is_part(one, name) and one in producers for one in node.input):
            return {}  # a part goes by another name, and whose it is cannot be told
        return {part: origin for one in node.input for part, origin in parts(one).items()}

    def is_part(one: str, name: str) -> bool:
        whole, of, number = name.rpartition(OF)  # of the first parts, in their turn
        whole = whole if of and number.isdigit() else name
        return one.startswith(f"{whole}_") and one.rpartition("_")[2].isdigit()

    return {name.removesuffix(_GRADIENT): parts(name) for name in producers if name.endswith(_GRADIENT)}


def _of_module(contributions: Mapping[str, str], module: str, places: Places) -> tuple[str, ...]:
    """Return the parts of a gradient that come from inside a module; none where that cannot be told of each part."""
    if len(contributions) == 1:
        return tuple(contributions)
    if not all("/" in node for node in contributions.values()):
        return ()
    paths = {name: places.of_name(node).module for name, node in contributions.items()}
    return tuple(name for name, path in paths.items() if _is_inside(path, module))


def _is_inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _sharing(
    modules: Sequence[str], names: Sequence[str], facts: GraphFacts, places: Places, returned: Collection[str]
) -> list[str]:
    """Name those modules that compute with what another has made of a value and does not return, not with the value."""
    # The exporter lets modules that begin alike, as with a SiLU of the same value, share the nodes of the first.
    direct: set[str] = set()
    behind: set[str] = set()
    seen = set(names)
    pending: list[tuple[str, str | None]] = [(name, None) for name in names]
    while pending:
        name, owner = pending.pop()
        for node in facts.readers.get(name, ()):
            if node.op_type in WITHOUT_VALUES or "/" not in node.name:
                continue
            module = places.of_name(node.name).module
            (direct if owner is None else behind).add(module)
            owning = module if owner is None else owner
            if _is_inside(module, owning):
                new = [one for one in node.output if one and one not in seen and one not in returned]
                seen.update(new)
                pending += [(one, owning) for one in new]
    return [
        one
        for one in modules
        if any(_is_inside(path, one) for path in behind) and not any(_is_inside(path, one) for path in direct)
    ]


def _captured_agent(execution: Execution, names: list[str], edit: Edit | None) -> Any:
    """Create another session whose graph returns these values as well, and return its agent."""
    manager, choice = execution._manager, execution.recompute_choice()
    models = copy.copy(manager._onnx_models)
    models.optimized_model = _returning(models.optimized_model, names, edit)
    with manager.another_session(_onnx_models=models):
        with runtime_messages(MessageLog(), "session"):  # it has said it all when it was created first
            manager.create_session(choice.plans, choice.kept)
        return manager._execution_agent


def _returning(model: onnx.ModelProto, names: list[str], edit: Edit | None) -> onnx.ModelProto:
    """Return a copy of a training graph that returns these values as well."""
    # A session fetches its outputs from the backward, and refuses those that were there before it began
    # (``execution_frame.cc``, UpdateFetches). So what the forward made is copied once a gradient has come in.
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    facts = GraphFacts(model)
    place = next(number for number, node in enumerate(graph.node) if node.op_type == "YieldOp")
    gradient = graph.node[place].output[0]
    new = names[len(model.graph.output) :]
    later = _after(model)
    early = [name for name in new if name not in later]
    for name in new:
        kind = facts.element_types.get(name) or facts.element_types.get(name.partition(_GRADIENT)[0])
        output = name if name in later else name + _HANDED_ON
        value = onnx.ValueInfoProto(name=output)
        if kind in FLOAT_TYPES:
            value.CopyFrom(onnx.helper.make_tensor_value_info(output, kind, None))
        graph.output.append(value)
    for node in graph.node:  # what is returned is not to be written over
        if aten_operator(node) == "ortlab::softmax_backward_over" and node.input[0] in new:
            call_kernel(node, "softmax_backward")
    _hand_on(graph, early, gradient)
    if edit is not None:
        edit(changed)
    return changed


def _hand_on(graph: onnx.GraphProto, names: list[str], gradient: str) -> None:
    """Copy values once `gradient` is there: each is reshaped to its own shape, which waits for the gradient."""
    # PassThrough hands its inputs on in their memory, and refuses to write into that of an output of the graph.
    if not names:
        return
    make = onnx.helper.make_node
    shapes = [f"{name}_shape_seen" for name in names]
    waited = [f"{shape}_late" for shape in shapes]
    late = f"{gradient}_seen"
    for name, shape in zip(names, shapes, strict=True):
        graph.node.append(make("Shape", [name], [shape], name=f"{shape}_ortlab"))
    waiting = make(
        HIDING, [gradient, *shapes], [late, *waited], name="ortlab_capture", domain="com.microsoft"
    )
    graph.node.append(waiting)
    for name, shape in zip(names, waited, strict=True):
        graph.value_info.append(onnx.helper.make_tensor_value_info(shape, onnx.TensorProto.INT64, [None]))
        graph.node.append(make("Reshape", [name, shape], [name + _HANDED_ON], name=f"{shape}_ortlab"))


def _after(model: onnx.ModelProto) -> set[str]:
    """Name the values that the backward computes from the gradients that it is given."""
    given = {name for node in model.graph.node if node.op_type == "YieldOp" for name in node.output if name}
    known, found = set(given), set()
    for node in model.graph.node:
        if not known.isdisjoint(node.input):
            made = {name for name in node.output if name}
            found |= made
            known |= made
    return found - given


class _CapturingAgent:
    """A training agent that hands over what its graph returns beyond the parameters' gradients."""

    def __init__(self, agent: Any, capture: Capture, wanted: _Wanted) -> None:
        self._agent = agent
        self._capture = capture
        self._wanted = wanted
        self._before: dict[int, Counter[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def run_forward(self, feeds: Any, fetches: Any, state: Any, cache: Any) -> None:
        """Run the forward graph, as `TrainingAgent.run_forward`."""
        self._before[id(state)] = self._capture.forward_begun(self._wanted.calls)
        self._agent.run_forward(feeds, fetches, state, cache)

    def run_backward(self, feeds: Any, fetches: Any, state: Any) -> None:
        """Run the backward graph, as `TrainingAgent.run_backward`, and hand over."""
        self._agent.run_backward(feeds, fetches, state)
        before = self._before.pop(id(state))
        tensors: dict[str, torch.Tensor] = {}
        for mark, names in self._wanted.marks:
            for name in names:
                if name not in tensors:
                    tensors[name] = torch.utils.dlpack.from_dlpack(
                        fetches.dlpack_at(self._wanted.names[name])
                    )
            total = tensors[names[0]]
            for name in names[1:]:
                total = total + tensors[name]
            self._capture.receive(mark._replace(call=mark.call + before[mark.module]), total)
