"""A session that ORT's profiler watches, and what the profiler saw as the trace of one step.

`InferenceSession.end_profiling` writes for training sessions, too: one `<node>_kernel_time` event for each kernel, in
the order of execution, with its duration in us and the shapes of its results (``sequential_executor.cc``).
"""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import onnx
import torch
from torch.utils._pytree import tree_leaves

from ortlab.errors import ExecutionError
from ortlab.graphs.nodes import executed_operator
from ortlab.memory.recompute import COPY
from ortlab.memory.trace import Trace, TracedNode

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution

_KERNEL: Final = "_kernel_time"
_END: Final = "SequentialExecutor::Execute"

_BYTES: Final = {
    "float": 4,
    "double": 8,
    "float16": 2,
    "bfloat16": 2,
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
}
"""Bytes per element by the names that ORT's profiler uses."""


class Profile:
    """What is seen of an execution while its session is profiled.

    The profiler completes `prefix` to the path of the file that it writes; `graph` is the file that the session writes
    its graph to.
    """

    def __init__(self, prefix: Path, graph: Path) -> None:
        self.prefix = prefix
        self.graph_file = graph
        self._outputs: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        self._pointers: list[int] = []
        self._held: frozenset[int] = frozenset()
        self._given: tuple[int, ...] = ()
        self._events: list[Mapping[str, Any]] = []
        self._graph = onnx.GraphProto()

    def watch(self, outputs: Any) -> None:
        """Take note of what a forward has returned, to see later whether the user keeps it."""
        self._outputs = [
            (leaf.data_ptr(), weakref.ref(leaf))
            for leaf in tree_leaves(outputs)
            if isinstance(leaf, torch.Tensor)
        ]

    def after_forward(self, outputs: Any) -> None:
        """Take note of the results that ORT hands over, in the order of the YieldOp's inputs."""
        self._pointers = [outputs[i].data_ptr() for i in range(len(outputs))]

    def before_backward(self, gradients: Any) -> None:
        """Take note of what PyTorch gives to the backward, and which results of the forward it still has."""
        alive = {pointer for pointer, reference in self._outputs if reference() is not None}
        self._held = frozenset(i for i, pointer in enumerate(self._pointers) if pointer in alive)
        self._given = tuple(_ort_value_bytes(gradients[i]) for i in range(len(gradients)))

    def end(self, agent: Any) -> None:
        """Let the profiler write what it has, and read it while its files are there."""
        file = Path(agent._inference_session.end_profiling())
        self._events = json.loads(file.read_text(encoding="utf-8"))
        self._graph = onnx.load(self.graph_file).graph

    @property
    def graph(self) -> onnx.GraphProto:
        """The graph that the session executes; empty until the profiler has ended."""
        return self._graph

    def kernels(self) -> Iterator[tuple[onnx.NodeProto, Mapping[str, Any], bool, float]]:
        """Yield the nodes of the last step in the order in which they ran, as (node, event, backward, ms).

        `event` is the profiler's; `backward` says whether the node ran after the forward had returned; `ms` is the
        shortest time of its kernel in the profiled steps. Raises ExecutionError if no step has run to its end
        meanwhile.
        """
        rounds = _steps(self._events, len(self._graph.node) - 1)
        if not rounds:
            raise _nothing_profiled()
        last, behind = rounds[-1]
        for position, (event, node) in enumerate(zip(last, _in_order(last, self._graph), strict=True)):
            yield node, event, position >= behind, min(one[position]["dur"] for one, _ in rounds) / 1000

    def trace(self, plans: Sequence[str], order: str) -> Trace:
        """Return what the profiler saw; raises ExecutionError if no step has run to its end meanwhile."""
        return read_trace(
            self._events, self._graph, held=self._held, given=self._given, plans=tuple(plans), order=order
        )


@contextmanager
def profiled(execution: Execution, *, memory_efficient_order: bool = False) -> Iterator[Profile]:
    """Let a training execution run in a session that is profiled; afterwards it has its own session again.

    With `memory_efficient_order` nodes run in the order that ORT gives to sessions with plans, though there may be
    none.
    """
    with tempfile.TemporaryDirectory(prefix="ortlab-") as folder:
        profile = Profile(Path(folder) / "profile", Path(folder) / "execution.onnx")
        with execution.profiling(profile, memory_efficient_order=memory_efficient_order):
            yield profile


def read_trace(
    events: Sequence[Mapping[str, Any]],
    graph: onnx.GraphProto,
    *,
    held: frozenset[int] = frozenset(),
    given: Sequence[int] = (),
    plans: tuple[str, ...] = (),
    order: str = "default",
) -> Trace:
    """Make the trace of one step from a profile of several alike.

    `events` are the profiler's, in order; `held` says which inputs of the YieldOp PyTorch still held when the backward
    started, by position; `given` has the bytes of each output of the YieldOp, as PyTorch gave them. Raises
    ExecutionError if there is no forward with a backward behind it.
    """
    boundary = next(node for node in graph.node if node.op_type == "YieldOp")
    rounds = _steps(events, len(graph.node) - 1)
    if not rounds:
        raise _nothing_profiled()
    last, behind = rounds[-1]
    nodes = _in_order(last, graph)
    sizes: dict[str, int] = {}
    traced = []
    for position, (event, node) in enumerate(zip(last, nodes, strict=True)):
        present = [name for name in node.output if name]
        for name, shape in zip(present, event["args"]["output_type_shape"], strict=False):
            sizes[name] = _bytes(shape)
        traced.append(
            TracedNode(
                name=node.name,
                operator=executed_operator(node),
                inputs=tuple(node.input),
                outputs=tuple(node.output),
                backward=position >= behind,
                ms=min(one[position]["dur"] for one, _ in rounds) / 1000,
                recomputes=node.name.removesuffix(COPY) if node.name.endswith(COPY) else "",
            )
        )
    return Trace(
        nodes=tuple(traced),
        sizes=sizes,
        returned=frozenset(boundary.input),
        held=frozenset(boundary.input[i] for i in held if i < len(boundary.input)),
        gradients=frozenset(value.name for value in graph.output),
        given=dict(zip(boundary.output, given, strict=False)),
        plans=plans,
        engine_order=order,
        steps=len(rounds),
    )


def _nothing_profiled() -> ExecutionError:
    return ExecutionError(
        "Nothing was profiled: no forward was followed by its backward.",
        fix="Profile a step that trains: forward, backward, optimizer.",
    )


def _in_order(events: Sequence[Mapping[str, Any]], graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Find the node of each event; those that ORT left without a name go by operator, once their inputs are there."""
    named = {node.name: node for node in graph.node if node.name}
    nameless = [node for node in graph.node if not node.name]
    made_here = {name for node in graph.node for name in node.output if name and node.op_type != "YieldOp"}
    done: set[str] = set()
    found = []
    for event in events:
        node = named.get(event["name"].removesuffix(_KERNEL))
        if node is None:
            operator = event["args"]["op_name"]
            ready = (
                one
                for one in nameless
                if one.op_type == operator
                and all(name in done or name not in made_here for name in one.input)
            )
            node = next(ready, None)
            if node is None:
                raise ExecutionError(f"The execution graph has no node for the kernel {event['name']!r}.")
            nameless.remove(node)
        done.update(node.output)
        found.append(node)
    return found


def _steps(events: Sequence[Mapping[str, Any]], count: int) -> list[tuple[list[Mapping[str, Any]], int]]:
    """Return the kernels of each step, and how many of them ran before its backward.

    ORT writes an extra event at the end of each pass. A forward that no backward follows is left out.
    """
    passes: list[list[Mapping[str, Any]]] = [[]]
    for event in events:
        if event["name"] == _END:
            passes.append([])
        elif event["name"].endswith(_KERNEL):
            passes[-1].append(event)
    return [
        (forward + backward, len(forward))
        for forward, backward in pairwise(passes)
        if len(forward) + len(backward) == count and forward[0]["name"] == passes[0][0]["name"]
    ]


def _bytes(shape: Mapping[str, Sequence[int]]) -> int:
    ((element, dimensions),) = shape.items()
    return prod(dimensions) * _BYTES.get(element, 0)


def _ort_value_bytes(value: Any) -> int:
    element = value.data_type().removeprefix("tensor(").removesuffix(")")
    return int(prod(value.shape())) * _BYTES.get(element, 0)
