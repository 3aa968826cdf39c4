"""A session that ORT's profiler watches: the trace of one step, and the FLOPs of each of its nodes.

`InferenceSession.end_profiling` writes for training sessions, too: one `<node>_kernel_time` event for each kernel, in
the order of execution, with its duration in us and the shapes of its results (``sequential_executor.cc``).
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import onnx
import torch
from onnx import helper
from torch.utils._pytree import tree_leaves

from ortlab.engine.inspection.places import Places
from ortlab.errors import ExecutionError
from ortlab.graphs.flop_formulas import Shape, flops
from ortlab.graphs.flops import NodeFlops
from ortlab.graphs.nodes import YIELD, executed_operator, is_copy, node_names, repeats, without_stand_in
from ortlab.memory.saved_activations import layer_of
from ortlab.memory.trace import Trace, TracedNode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ortlab.engine.execution import Execution


_KERNEL: Final = "_kernel_time"
_END: Final = "SequentialExecutor::Execute"
_BY_TORCH: Final = frozenset({"ATen", "PythonOp", "PythonOpGrad"})

_Timed = Literal["step", "model", "session"]
"""What of a step is timed beside its kernels."""

_BESIDE: Final = (
    "between kernels: memory, order, profiler",
    "feeds and results of the session",
    "Python around the session",
    "the rest of the step: loss, optimizer, data",
)
"""What a step takes beside its kernels, from the inside out."""

_BORDER: Final = "_ORTModuleFunctionBackward"
"""Name of the node of PyTorch's graph that runs the session's backward."""

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


_NAMES: Final = re.compile(r'"name" :"(.*?)","args" : \{', re.DOTALL)


def _escaped(name: re.Match[str]) -> str:
    """Write the name of an event as JSON has it; ORT's profiler writes quotation marks and line breaks as they are."""
    return f'"name" :{json.dumps(name[1])},"args" : {{'


class Profile:
    """What is seen of an execution while its session is profiled."""

    # The profiler completes `prefix` to the path of the file that it writes; `graph` is the file that the session
    # writes its graph to.

    def __init__(self, prefix: Path, graph: Path) -> None:
        self.prefix = prefix
        self.graph_file = graph
        self._outputs: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        self._pointers: list[int] = []
        self._held: frozenset[int] = frozenset()
        self._given: tuple[int, ...] = ()
        self._events: list[Mapping[str, Any]] = []
        self._times: list[defaultdict[str, float]] = []
        self._graph = onnx.GraphProto()

    @contextmanager
    def timing(self, what: _Timed) -> Iterator[None]:
        """Time a step, or a part of one."""
        if what == "step":
            self._times.append(defaultdict(float))
        before = time.perf_counter()
        yield
        self._add(what, before)

    def _add(self, what: _Timed, before: float) -> None:
        if self._times:
            self._times[-1][what] += (time.perf_counter() - before) * 1000

    def watch(self, outputs: Any) -> None:
        """Take note of what a forward has returned, to see later whether the user keeps it, and time its backward."""
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        self._outputs = [(leaf.data_ptr(), weakref.ref(leaf)) for leaf in tensors]
        nodes = [leaf.grad_fn for leaf in tensors if leaf.grad_fn is not None]
        border = next((node for node in nodes if node.name() == _BORDER), None)
        if border is not None:
            before: list[float] = []
            border.register_prehook(lambda _: before.append(time.perf_counter()))
            border.register_hook(lambda *_: self._add("model", before.pop()))

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
        self._events = json.loads(_NAMES.sub(_escaped, file.read_text(encoding="utf-8")))
        self._graph = onnx.load(self.graph_file).graph

    @property
    def graph(self) -> onnx.GraphProto:
        """The graph that the session executes; empty until the profiler has ended."""
        return self._graph

    def kernels(self) -> Iterator[tuple[onnx.NodeProto, Mapping[str, Any], bool, float]]:
        """Yield the nodes of the last step in the order in which they ran, as (node, event, backward, ms)."""
        # `backward` says whether the node ran after the forward had returned; `ms` is the shortest time of its kernel
        # in the profiled steps.
        rounds = self._rounds()
        if not rounds:
            raise _nothing_to_profile()
        last, behind, _ = rounds[-1]
        for position, (event, node) in enumerate(zip(last, _in_order(last, self._graph), strict=True)):
            ms = min(one[position]["dur"] for one, *_ in rounds) / 1000
            yield without_stand_in(node), event, position >= behind, ms

    def trace(self, plans: Sequence[str], order: str, model: torch.nn.Module, part: str) -> Trace:
        """Return what the profiler saw as the trace of one step; raises ExecutionError as `kernels`."""
        origins = _Origins(Places(model, part))
        sizes: dict[str, int] = {}
        traced = []
        for node, event, backward, ms in self.kernels():
            present = [name for name in node.output if name]
            for name, shape in zip(present, event["args"]["output_type_shape"], strict=False):
                sizes[name] = _bytes(shape)
            traced.append(
                TracedNode(
                    name=node.name,
                    operator=executed_operator(node),
                    inputs=tuple(node.input),
                    outputs=tuple(node.output),
                    backward=backward,
                    ms=ms,
                    recomputes=repeats(node),
                    by_torch=node.op_type in _BY_TORCH,
                    module=origins.of(node),
                )
            )
        boundary = next(node for node in self._graph.node if node.op_type == YIELD)
        return Trace(
            nodes=tuple(traced),
            sizes=sizes,
            returned=frozenset(boundary.input),
            held=frozenset(boundary.input[i] for i in self._held if i < len(boundary.input)),
            gradients=frozenset(value.name for value in self._graph.output),
            given=dict(zip(boundary.output, self._given, strict=False)),
            plans=tuple(plans),
            engine_order=order,
            steps=len(self._rounds()),
            beside=self._beside(),
            classes={path: type(module).__name__ for path, module in model.named_modules()},
        )

    def _beside(self) -> dict[str, float]:
        """Return what the quickest step took beside its kernels; nothing where the steps cannot be told apart."""
        rounds = self._rounds()
        if len(rounds) != len(self._times):
            return {}
        ms, (events, _, executor) = min(
            zip(self._times, rounds, strict=True), key=lambda pair: pair[0]["step"]
        )
        # Each holds the one before; ORT's clock and Python's may differ by some microseconds.
        inner = [
            sum(event["dur"] for event in events) / 1000,
            executor,
            ms["session"],
            ms["model"],
            ms["step"],
        ]
        return {name: max(b - a, 0.0) for name, (a, b) in zip(_BESIDE, pairwise(inner), strict=True)}

    def _rounds(self) -> list[tuple[list[Mapping[str, Any]], int, float]]:
        return _steps(self._events, len(self._graph.node) - 1)


def _nothing_to_profile() -> ExecutionError:
    return ExecutionError(
        "Nothing was profiled: no forward was followed by its backward.",
        fix="Profile a step that trains: forward, backward, optimizer.",
    )


@contextmanager
def profiled(execution: Execution, *, memory_efficient_order: bool = False) -> Iterator[Profile]:
    """Let a training execution run in a session that is profiled; afterwards it has its own session again."""
    # With `memory_efficient_order` nodes run in the order that ORT gives to sessions with plans, though there may be
    # none.
    if not execution.training:
        raise _nothing_to_profile()
    with tempfile.TemporaryDirectory(prefix="ortlab-") as folder:
        profile = Profile(Path(folder) / "profile", Path(folder) / "execution.onnx")
        with execution.profiling(profile, memory_efficient_order=memory_efficient_order):
            yield profile


def _in_order(events: Sequence[Mapping[str, Any]], graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Find the node of each event; those that ORT left without a name go by operator, once their inputs are there."""
    named = {node.name: node for node in graph.node if node.name}
    nameless = [node for node in graph.node if not node.name]
    made_here = {name for node in graph.node for name in node.output if name and node.op_type != YIELD}
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


def _steps(
    events: Sequence[Mapping[str, Any]], count: int
) -> list[tuple[list[Mapping[str, Any]], int, float]]:
    """Return of each step its kernels, how many of them ran before its backward, and the ms of both passes."""
    # ORT writes an extra event at the end of each pass. A forward that no backward follows is left out.
    passes: list[list[Mapping[str, Any]]] = [[]]
    ms: list[float] = []
    for event in events:
        if event["name"] == _END:
            passes.append([])
            ms.append(event["dur"] / 1000)
        elif event["name"].endswith(_KERNEL):
            passes[-1].append(event)
    return [
        (forward + backward, len(forward), sum(ms[number : number + 2]))
        for number, (forward, backward) in enumerate(pairwise(passes))
        if len(forward) + len(backward) == count and forward[0]["name"] == passes[0][0]["name"]
    ]


def _bytes(shape: Mapping[str, Sequence[int]]) -> int:
    ((element, dimensions),) = shape.items()
    return prod(dimensions) * _BYTES.get(element, 0)


def _ort_value_bytes(value: Any) -> int:
    element = value.data_type().removeprefix("tensor(").removesuffix(")")
    return int(prod(value.shape())) * _BYTES.get(element, 0)


def node_flops(profile: Profile, model: torch.nn.Module, part: str = "") -> tuple[NodeFlops, ...]:
    """Count the FLOPs of the step that was profiled last, node by node."""
    origins = _Origins(Places(model, part))
    graph = profile.graph
    names = {_result(node): name for name, node in zip(node_names(graph), graph.node, strict=True)}
    found = []
    for node, event, backward, ms in profile.kernels():
        operator = executed_operator(node)
        inputs, outputs = (_shapes(event["args"][key]) for key in ("input_type_shape", "output_type_shape"))
        attributes = {
            one.name: helper.get_attribute_value(one) for one in node.attribute if not one.HasField("g")
        }
        reads = origins.of_value(next(iter(node.input), ""))
        module = origins.of(node)
        found.append(
            NodeFlops(
                name=names[_result(node)],
                operator=operator,
                module=module,
                layer=layer_of(module),
                backward=backward,
                inputs=inputs,
                outputs=outputs,
                flops=flops(operator, inputs, outputs, attributes),
                elements=sum(map(prod, outputs)),
                ms=ms,
                recomputed=is_copy(node),
                reads=reads,
            )
        )
    return tuple(found)


class _Origins:
    """Finds the module of each node; nodes have to be asked for in the order in which they ran."""

    # Nodes are named after their module, and so are those of their gradients. Those that ORT puts in without such a
    # name take the module of what they read.

    def __init__(self, places: Places) -> None:
        self._places = places
        self._of_value: dict[str, str] = {}

    def of_value(self, name: str) -> str:
        """Return the path of the module that made a value; empty for what no node has made."""
        return self._of_value.get(name, "")

    def of(self, node: onnx.NodeProto) -> str:
        """Return the path of a node's module; empty for the model itself."""
        named = next((name for name in (node.name, *node.output) if "/" in name), "")
        if named:
            module = self._places.of_name(named[named.index("/") :]).module
        else:
            module = next((self._of_value[name] for name in node.input if name in self._of_value), "")
        self._of_value.update(dict.fromkeys(filter(None, node.output), module))
        return module


def _result(node: onnx.NodeProto) -> str:
    """Return the name of a node's first result, which no other node makes."""
    return next(filter(None, node.output), "")


def _shapes(described: Sequence[Mapping[str, Iterable[Any]]]) -> tuple[Shape, ...]:
    return tuple(tuple(int(size) for size in shape) for one in described for shape in one.values())
