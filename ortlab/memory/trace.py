"""What one training step did: every node that ran, in its order, how long it took; and when each of its buffers lived.

ORTModule's sessions have no memory pattern and do not reuse buffers (``_graph_execution_manager.py``,
`_get_session_config`), so that each result has memory of its own, from its node until the last node that reads it has
run. What this gives agrees with the measured resident set to about one per cent (``bench/memory_prediction.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from ortlab.memory.saved_activations import in_any_layer
from ortlab.shown import Shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pandas as pd

_LARGE_SHARE: Final = 0.1
"""Of the time of a step: from it on an operator is named among what most of it goes to."""


@dataclass(frozen=True)
class TracedNode:
    """One node of the execution graph, as it ran."""

    name: str
    operator: str  # with its domain if that is not ONNX's; an ATen node has the name of PyTorch's operator
    inputs: tuple[str, ...]  # names of values; "" for one that is left out, as in `outputs`
    outputs: tuple[str, ...]
    backward: bool  # whether it ran after the forward had returned its outputs
    ms: float  # time of its kernel, measured with ORT's profiler; the shortest of the profiled steps
    recomputes: str = ""  # name of the node that it repeats for backward; empty for all others
    by_torch: bool = False  # whether its kernel is a call into PyTorch
    module: str = (
        ""  # path of the module that it computes or is a gradient of; empty for the model's own forward
    )

    @property
    def phase(self) -> Literal["forward", "backward", "recomputed"]:
        """The pass that it ran in."""
        return "recomputed" if self.recomputes else "backward" if self.backward else "forward"


@dataclass(frozen=True, repr=False)
class Trace(Shown):
    """One training step on ONNX Runtime, as its profiler saw it."""

    nodes: tuple[TracedNode, ...]  # in the order in which they ran
    sizes: Mapping[str, int]  # bytes of the nodes' results, measured
    returned: frozenset[str] = frozenset()  # results of the forward that were handed to PyTorch
    # Those of `returned` that PyTorch still had when the backward started; ORT frees the memory of the others then.
    held: frozenset[str] = frozenset()
    # Results of the backward that were handed to PyTorch; they live until the step ends.
    gradients: frozenset[str] = frozenset()
    # Bytes of what PyTorch gave to the backward: the gradients of the forward's results.
    given: Mapping[str, int] = field(default_factory=dict)
    plans: tuple[str, ...] = ()  # recompute plans that were applied
    engine_order: str = "default"  # how ORT ordered the nodes: "memory efficient" where plans are applied
    steps: int = 1  # how many were profiled
    # What the quickest of them took beside its kernels, in ms: parts of `account`.
    beside: Mapping[str, float] = field(default_factory=dict)
    # Of each module, by path, its class; and the ms of its own part of a step in PyTorch, where that was profiled too.
    classes: Mapping[str, str] = field(default_factory=dict)
    eager: Mapping[str, float] = field(default_factory=dict)

    @property
    def forward_ms(self) -> float:
        """Time of the forward's kernels, in ms."""
        return sum(node.ms for node in self.nodes if not node.backward)

    @property
    def backward_ms(self) -> float:
        """Time of the backward's kernels, recomputed ones included, in ms."""
        return sum(node.ms for node in self.nodes if node.backward)

    @property
    def recomputed_ms(self) -> float:
        """Time of the kernels that ran a second time, in ms."""
        return sum(node.ms for node in self.nodes if node.recomputes)

    @cached_property
    def first_backward(self) -> int:
        """Position of the first node of the backward; the number of nodes if there is none."""
        return next((i for i, node in enumerate(self.nodes) if node.backward), len(self.nodes))

    @property
    def step_ms(self) -> float:
        """Time of the step, in ms: of each kernel the shortest, and what the quickest step took beside them."""
        return sum(self.account().values())

    def account(self) -> dict[str, float]:
        """Return where the time of a step goes, in ms by part; together they are `step_ms`."""
        kernels = sum(node.ms for node in self.nodes)
        called = sum(node.ms for node in self.nodes if node.by_torch)
        return {
            "kernels of ONNX Runtime": kernels - called,
            "calls from its graph into PyTorch": called,
            **self.beside,
        }

    def slowest(self, count: int = 3) -> dict[str, float]:
        """Return what most of a step's time goes to, names with shares: parts of `account`, and large operators."""
        ours, called, *_ = self.account()
        times = defaultdict(float, {part.partition(":")[0]: ms for part, ms in self.beside.items()})
        operators: dict[tuple[str, bool], float] = defaultdict(float)
        for node in self.nodes:
            operators[node.operator.removeprefix("com.microsoft."), node.by_torch] += node.ms
        for (operator, by_torch), ms in operators.items():
            # Many small operators are more than the largest of them, so they count as the part that they are of.
            is_large = ms >= _LARGE_SHARE * self.step_ms
            times[operator if is_large else called if by_torch else ours] += ms
        most = sorted(times, key=lambda name: -times[name])[:count]
        return {name: times[name] / self.step_ms for name in most if times[name]}

    def table(self) -> pd.DataFrame:
        """Return one row per operator and pass: how many nodes, their time in ms, the bytes of their results."""
        import pandas as pd

        rows = [
            {
                "operator": node.operator,
                "pass": node.phase,
                "nodes": 1,
                "time [ms]": node.ms,
                "results [bytes]": sum(self.sizes.get(name, 0) for name in node.outputs),
            }
            for node in self.nodes
        ]
        frame = pd.DataFrame(rows, columns=["operator", "pass", "nodes", "time [ms]", "results [bytes]"])
        together = frame.groupby(["operator", "pass"], as_index=False).sum()
        return together.sort_values(["time [ms]", "operator"], ascending=[False, True], ignore_index=True)

    def by_module(self) -> pd.DataFrame:
        """Return one row per module, layers together: its own time in a step, in ms, without its children's.

        Columns: module, class, nodes, time [ms], and eager [ms] where `lab.profile(baseline="eager")` has profiled
        PyTorch as well. The rows stand by what ONNX Runtime takes longer, or by its time.
        """
        import pandas as pd

        rows = [(node.module, 1, node.ms, 0.0) for node in self.nodes]
        rows += [(path, 0, 0.0, ms) for path, ms in self.eager.items()]
        frame = pd.DataFrame(rows, columns=["path", "nodes", "time [ms]", "eager [ms]"])
        frame["class"] = [self.classes.get(path, "") for path in frame["path"]]
        alike: dict[tuple[str, str], set[str]] = {}
        for path, kind in zip(frame["path"], frame["class"], strict=True):
            alike.setdefault((in_any_layer(path), kind), set()).add(path)
        together = {path: name for (name, _), paths in alike.items() if len(paths) > 1 for path in paths}
        frame["module"] = [together.get(path, path) for path in frame.pop("path")]
        frame = frame.groupby(["module", "class"], as_index=False).sum()
        order = frame["time [ms]"] - frame["eager [ms]"]
        frame = frame.iloc[order.sort_values(ascending=False, kind="stable").index].reset_index(drop=True)
        return frame if self.eager else frame.drop(columns="eager [ms]")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        record = asdict(self)
        return {
            key: sorted(value) if isinstance(value, frozenset) else value for key, value in record.items()
        }


ONNX_VIEWS: Final = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators of ONNX whose first output is the buffer of their first input, on every provider (`KernelDef::Alias`).

Reuse of an input's buffer by an operator such as Relu (`MayInplace`) needs no mention: ORT does it where nobody else
reads the input any more, so never with two results that the backward reads.
"""

LOSS_IN_BLOCKS: Final = "ortlab::chunked_cross_entropy"
"""What computes a head and its cross entropy in blocks of rows."""

WRITTEN_OVER: Final = {
    "ortlab::add_embedding_gradient": (0,),
    "ortlab::add_output_gradient": (0,),
    "ortlab::add_bias": (0,),
    "ortlab::cross_entropy_backward": (1,),
    "ortlab::softmax_backward_over": (0,),
    "ortlab::chunked_cross_entropy_backward": (1, 2, 3),
}
"""Of calls of torch that write their results over inputs, the numbers of these inputs, in the order of the results."""

HANDING_ON: Final = "com.microsoft.PassThrough"
"""What ortlab puts behind results that a plan shall leave alone: each output is the buffer of its own input."""


@dataclass(frozen=True)
class Buffer:
    """Memory of one or more values of a step."""

    value: str  # the one that it was allocated for
    size: int  # bytes
    first: int  # position in `Trace.nodes` of the node that makes it
    last: int  # position of the last node that it is there for, included
    views: tuple[str, ...] = ()  # other values in the same memory


@dataclass(frozen=True)
class Lifetimes:
    """All buffers of a step, and how many bytes live while each node runs."""

    # In the order in which they are allocated; what PyTorch gives to the backward comes last.
    buffers: tuple[Buffer, ...]
    live: np.ndarray  # bytes while each node runs, shape (nodes,), int64; simulated from measured sizes
    first_backward: int  # position of the first node of the backward

    @property
    def peak(self) -> int:
        """The most bytes that live at once."""
        return int(self.live.max(initial=0))

    @property
    def peak_at(self) -> int:
        """Position of the node that runs at the peak, the first of several."""
        return int(self.live.argmax()) if len(self.live) else 0

    @property
    def kept(self) -> tuple[Buffer, ...]:
        """Buffers that the forward leaves for the backward, largest first."""
        return _largest_first(one for one in self.buffers if one.first < self.first_backward <= one.last)

    def at(self, position: int) -> tuple[Buffer, ...]:
        """Return the buffers that live while a node runs, largest first."""
        return _largest_first(one for one in self.buffers if one.first <= position <= one.last)


def lifetimes(trace: Trace) -> Lifetimes:
    """Work out from when to when each buffer of a step lives.

    A result that no node reads and nobody asked for lives until the step ends: ORT frees memory when a reader has run.
    """
    end, start_of_backward = len(trace.nodes) - 1, trace.first_backward
    last_read = {name: position for position, node in enumerate(trace.nodes) for name in node.inputs if name}
    memory: dict[str, str] = {}  # the value that the memory was allocated for
    made: dict[str, int] = {}
    views: dict[str, list[str]] = {}
    for position, node in enumerate(trace.nodes):
        for number, name in enumerate(node.outputs):
            source = _viewed(node, number)
            if name and source in memory:
                memory[name] = memory[source]
                views[memory[source]].append(name)
            elif name:
                memory[name], made[name], views[name] = name, position, []

    def last_use(name: str) -> int:
        if name in trace.gradients or name in trace.held:
            return end
        if name in trace.returned:  # ORT holds what it has handed over until the backward starts
            return max(last_read.get(name, 0), start_of_backward - 1)
        return last_read.get(name, end)

    buffers = []
    for value, first in made.items():
        last = max(first, *map(last_use, (value, *views[value])))
        buffers.append(Buffer(value, trace.sizes.get(value, 0), first, last, tuple(views[value])))
    buffers += _scratch(trace)
    for name, size in trace.given.items():
        buffers.append(Buffer(name, size, start_of_backward, last_read.get(name, start_of_backward)))
    return Lifetimes(tuple(buffers), _live_bytes(buffers, len(trace.nodes)), start_of_backward)


_BYTES_OF_FLOAT: Final = 4


def _scratch(trace: Trace) -> Iterator[Buffer]:
    """Yield what nodes have to themselves while they run, as far as it is as large as their results.

    Where selects from both of its operands, each into memory of its own, before it puts these together
    (``where_op.cc``, `CreateScalarBroadcastFuncs` and `MergeScalarAndVector`).
    """
    for position, node in enumerate(trace.nodes):
        if node.operator == "Where":
            condition, *operands = (trace.sizes.get(name, 0) for name in node.inputs)
            whole = trace.sizes.get(node.outputs[0], 0)
            size = sum(min(whole, max(_BYTES_OF_FLOAT * condition, one)) for one in operands)
            if size:
                yield Buffer(f"{node.outputs[0]}: while Where runs", size, position, position)


def with_blocks(trace: Trace, sizes: Iterable[int]) -> Trace:
    """Return a trace in which each loss in blocks has the logits of a block while it runs, of these sizes in bytes.

    They come and go inside a call of torch, where ORT's profiler does not look.
    """
    waiting, nodes, blocks = iter(sizes), [], dict[str, int]()
    for node in trace.nodes:
        size = next(waiting, 0) if node.operator == LOSS_IN_BLOCKS else 0
        if size:
            block = f"{node.name}_block"
            blocks[block] = size
            nodes.append(
                replace(node, name=block, operator="logits of a block", inputs=(), outputs=(block,), ms=0.0)
            )
            node = replace(node, inputs=(*node.inputs, block))  # noqa: PLW2901 - the same node
        nodes.append(node)
    return replace(trace, nodes=tuple(nodes), sizes={**trace.sizes, **blocks})


def _viewed(node: TracedNode, number: int) -> str:
    """Return the input whose buffer an output of a node is; empty if the output has a buffer of its own."""
    if node.operator == HANDING_ON:
        return node.inputs[number]
    if node.operator in WRITTEN_OVER and not node.recomputes:  # a copy may read what has to stay
        return node.inputs[WRITTEN_OVER[node.operator][number]]
    return node.inputs[0] if number == 0 and node.operator in ONNX_VIEWS and node.inputs else ""


def _live_bytes(buffers: Iterable[Buffer], count: int) -> np.ndarray:
    """Return the bytes that live while each of `count` nodes runs, shape (count,), int64."""
    change = np.zeros(count + 1, dtype=np.int64)
    for buffer in buffers:
        change[buffer.first] += buffer.size
        change[buffer.last + 1] -= buffer.size
    return np.cumsum(change)[:count]


def _largest_first(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    return tuple(sorted(buffers, key=lambda one: (-one.size, one.value)))
