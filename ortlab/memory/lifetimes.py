"""When each buffer of a step lives, and the memory that is needed for all of them at once.

ORTModule's sessions have no memory pattern and do not reuse buffers (``_graph_execution_manager.py``,
`_get_session_config`), so that each result has memory of its own, from its node until the last node that reads it has
run. What this gives agrees with the measured resident set to about one per cent (``bench/memory_prediction.py``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ortlab.memory.trace import Trace, TracedNode

ONNX_VIEWS: Final = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators of ONNX whose first output is the buffer of their first input, on every provider (`KernelDef::Alias`).

Reuse of an input's buffer by an operator such as Relu (`MayInplace`) needs no mention: ORT does it where nobody else
reads the input any more, so never with two results that the backward reads.
"""

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
    def forward_peak(self) -> int:
        """The most bytes that live at once in the forward."""
        return int(self.live[: self.first_backward].max(initial=0))

    @property
    def backward_peak(self) -> int:
        """The most bytes that live at once in the backward."""
        return int(self.live[self.first_backward :].max(initial=0))

    @property
    def kept(self) -> tuple[Buffer, ...]:
        """Buffers that the forward leaves for the backward, largest first."""
        kept = [one for one in self.buffers if one.first < self.first_backward <= one.last]
        return tuple(sorted(kept, key=lambda one: (-one.size, one.value)))

    def at(self, position: int) -> tuple[Buffer, ...]:
        """Return the buffers that live while a node runs, largest first."""
        living = [one for one in self.buffers if one.first <= position <= one.last]
        return tuple(sorted(living, key=lambda one: (-one.size, one.value)))


def lifetimes(trace: Trace) -> Lifetimes:
    """Work out from when to when each buffer of a step lives.

    A result that no node reads and nobody asked for lives until the step ends: ORT frees memory when a reader has run.
    """
    end = len(trace.nodes) - 1
    start_of_backward = trace.first_backward
    last_read = _last_reads(trace.nodes)
    memory: dict[str, str] = {}  # the value that the memory was allocated for
    made: dict[str, int] = {}
    views: dict[str, list[str]] = {}
    for position, node in enumerate(trace.nodes):
        for number, name in enumerate(node.outputs):
            if not name:
                continue
            source = _viewed(node, number)
            if source in memory:
                memory[name] = memory[source]
                views[memory[source]].append(name)
            else:
                memory[name] = name
                made[name] = position
                views[name] = []
    buffers = []
    for value, first in made.items():
        last = max(_end(name, last_read, trace, start_of_backward, end) for name in (value, *views[value]))
        buffers.append(Buffer(value, trace.sizes.get(value, 0), first, max(first, last), tuple(views[value])))
    for name, size in trace.given.items():
        buffers.append(Buffer(name, size, start_of_backward, last_read.get(name, start_of_backward)))
    return Lifetimes(tuple(buffers), live_bytes(buffers, len(trace.nodes)), start_of_backward)


def _viewed(node: TracedNode, number: int) -> str:
    """Return the input whose buffer an output of a node is; empty if the output has a buffer of its own."""
    if node.operator == HANDING_ON:
        return node.inputs[number]
    return node.inputs[0] if number == 0 and node.operator in ONNX_VIEWS and node.inputs else ""


def live_bytes(buffers: Iterable[Buffer], count: int) -> np.ndarray:
    """Return the bytes that live while each of `count` nodes runs, shape (count,), int64."""
    change = np.zeros(count + 1, dtype=np.int64)
    for buffer in buffers:
        change[buffer.first] += buffer.size
        change[buffer.last + 1] -= buffer.size
    return np.cumsum(change)[:count]


def _end(
    name: str, last_read: Counter[str] | dict[str, int], trace: Trace, start_of_backward: int, end: int
) -> int:
    if name in trace.gradients or name in trace.held:
        return end
    if name in trace.returned:  # ORT holds what it has handed over until the backward starts
        return max(last_read.get(name, 0), start_of_backward - 1)
    return last_read.get(name, end)


def _last_reads(nodes: tuple[TracedNode, ...]) -> dict[str, int]:
    return {name: position for position, node in enumerate(nodes) for name in node.inputs if name}
