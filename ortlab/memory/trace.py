"""What one training step did: every node that ran, in its order, how long it took and how large its results were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


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

    def table(self) -> pd.DataFrame:
        """Return one row per operator and pass: how many nodes, their time in ms, the bytes of their results."""
        import pandas as pd

        rows = [
            {
                "operator": node.operator,
                "pass": "recomputed" if node.recomputes else "backward" if node.backward else "forward",
                "nodes": 1,
                "time [ms]": node.ms,
                "results [bytes]": sum(self.sizes.get(name, 0) for name in node.outputs),
            }
            for node in self.nodes
        ]
        frame = pd.DataFrame(rows, columns=["operator", "pass", "nodes", "time [ms]", "results [bytes]"])
        together = frame.groupby(["operator", "pass"], as_index=False).sum()
        return together.sort_values(["time [ms]", "operator"], ascending=[False, True], ignore_index=True)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        record = asdict(self)
        return {
            key: sorted(value) if isinstance(value, frozenset) else value for key, value in record.items()
        }
