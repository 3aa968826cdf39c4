"""FLOPs of one training step by node, from the shapes that the nodes ran with; and what a switch saves of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ortlab.errors import OptionError
from ortlab.graphs.flop_formulas import Shape  # noqa: TC001 - asked for when a record is read
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["operator", "module", "layer"]
KINDS: Final[tuple[Kind, ...]] = ("operator", "module", "layer")


@dataclass(frozen=True)
class NodeFlops:
    """One node of the execution graph, as it ran."""

    name: str  #: Its name in the execution graph
    operator: str  #: Operator, with its domain if that is not ONNX's; of an ATen node, PyTorch's operator
    #: Paths of the module that it comes from and of the layer that is in; empty for the model itself.
    module: str
    layer: str
    backward: bool  #: Whether it ran after the forward had returned
    #: Shapes of what it read and made, evaluated for the batch that ran.
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    #: Floating-point operations by `ortlab.graphs.flop_formulas`; None where its shapes do not tell.
    flops: int | None
    elements: int  #: Numbers that it made
    ms: float  #: Time of its kernel in ms, measured with ORT's profiler
    recomputed: bool = False  #: Whether it repeats a node of the forward for the backward
    #: Path of the module that made its first input; empty for the model itself, and for what came from outside.
    reads: str = ""

    def key(self, kind: Kind) -> str:
        """Return what a table puts it under."""
        return {"operator": self.operator, "module": self.module, "layer": self.layer}[kind]


@dataclass(frozen=True, repr=False)
class Flops(Shown, JsonRecord, noun="record of FLOPs", layout=1):
    """What one training step on ONNX Runtime calculates."""

    nodes: tuple[NodeFlops, ...]  #: In the order in which they ran
    configuration: str = ""  #: The switches that differ from the defaults, in words
    part: str = ""  #: Path of the wrapped part; empty for the whole model

    @property
    def forward(self) -> int:
        """FLOPs of the forward."""
        return sum(node.flops or 0 for node in self.nodes if not node.backward)

    @property
    def backward(self) -> int:
        """FLOPs of the backward, recomputed ones included."""
        return sum(node.flops or 0 for node in self.nodes if node.backward)

    @property
    def total(self) -> int:
        """FLOPs of the step."""
        return self.forward + self.backward

    @property
    def recomputed(self) -> int:
        """FLOPs that recompute plans do a second time."""
        return sum(node.flops or 0 for node in self.nodes if node.recomputed)

    @property
    def uncounted(self) -> tuple[NodeFlops, ...]:
        """Nodes whose work cannot be told from their shapes; what they calculate is in no sum."""
        return tuple(node for node in self.nodes if node.flops is None)

    @property
    def ms(self) -> float:
        """Time of the kernels that are counted and do something, in ms."""
        return sum(node.ms for node in self.nodes if node.flops)

    def by(self, kind: Kind) -> dict[str, int]:
        """Add FLOPs up by operator, module or layer, most first.

        Raises
        ------
        OptionError
            If there is no such kind.
        """
        if kind not in KINDS:
            raise OptionError(f"FLOPs cannot be added up by {kind!r}.", fix=f"Kinds: {', '.join(KINDS)}.")
        sums: dict[str, int] = {}
        for node in self.nodes:
            if node.flops:
                sums[node.key(kind)] = sums.get(node.key(kind), 0) + node.flops
        return dict(sorted(sums.items(), key=lambda one: (-one[1], one[0])))

    def table(self) -> pd.DataFrame:
        """One row per node, in the order in which they ran; times in ms."""
        import pandas as pd

        rows = [
            {
                "node": node.name,
                "operator": node.operator,
                "module": node.module,
                "pass": "recomputed" if node.recomputed else "backward" if node.backward else "forward",
                "inputs": list(node.inputs),
                "outputs": list(node.outputs),
                "FLOPs": node.flops,
                "elements": node.elements,
                "time [ms]": node.ms,
            }
            for node in self.nodes
        ]
        frame = pd.DataFrame(rows)
        if rows:
            frame["FLOPs"] = frame["FLOPs"].astype("Int64")
        return frame


CHOOSING: Final = frozenset(
    {"Gather", "GatherND", "GatherElements", "Slice", "ShrunkenGather", "PadAndUnflatten"}
)
"""Operators that leave rows out: what the compute optimizer moves towards the inputs."""


@dataclass(frozen=True)
class NodeChange:
    """A node that calculates or makes something else than in the other graph."""

    #: The node in the graph without the switch, and in the one with it; None where it has none there.
    without: NodeFlops | None
    having: NodeFlops | None

    @property
    def node(self) -> NodeFlops:
        """The node, from the graph that has it."""
        found = self.having or self.without
        assert found is not None  # noqa: S101 - one of both is there
        return found

    @property
    def saved(self) -> int:
        """FLOPs that are saved; negative where there are more."""
        before = self.without.flops if self.without else 0
        after = self.having.flops if self.having else 0
        return (before or 0) - (after or 0)

    @property
    def fewer_elements(self) -> int:
        """How many results fewer there are."""
        return (self.without.elements if self.without else 0) - (self.having.elements if self.having else 0)


@dataclass(frozen=True, repr=False)
class FlopSavings(Shown, JsonRecord, noun="record of saved FLOPs", layout=2):
    """One training step with a switch and without it."""

    without: Flops  #: The same step, profiled without the switch and with it
    having: Flops  #: See `without`
    #: Which node of the one graph is which of the other, by their names, as `ortlab.graphs.diff` matches them.
    same: Mapping[str, str]
    changed: str = ""  #: What differs between both, in words: "compute_optimizer=False against True"

    @property
    def saved(self) -> int:
        """FLOPs of the step that are saved."""
        return self.without.total - self.having.total

    @property
    def share(self) -> float:
        """What part of the step's FLOPs is saved, from 0 to 1; negative where there are more."""
        return self.saved / self.without.total if self.without.total else 0.0

    @property
    def changes(self) -> tuple[NodeChange, ...]:
        """Every node that calculates or makes something else, those that save most first."""
        found = [
            NodeChange(*pair)
            for pair in self._pairs()
            if pair[0] is None or pair[1] is None or _made(pair[0]) != _made(pair[1])
        ]
        return tuple(sorted(found, key=lambda one: (-one.saved, -one.fewer_elements, one.node.name)))

    @property
    def passed(self) -> tuple[NodeChange, ...]:
        """The nodes of the forward that rows are left out ahead of now: they are in both graphs, and make less."""
        return tuple(
            one
            for one in self.changes
            if one.without is not None
            and one.having is not None
            and not one.node.backward
            and one.fewer_elements > 0
            and not _chooses(one.node)
        )

    @property
    def moved(self) -> tuple[NodeFlops, ...]:
        """What leaves rows out in the forward of the graph with the switch, and not at that place in the other."""
        before = {having.name: without for without, having in self._pairs() if having is not None}
        return tuple(
            node
            for node in self.having.nodes
            if _leaves_out(node) and ((other := before[node.name]) is None or _place(other) != _place(node))
        )

    def by_module(self) -> dict[str, int]:
        """Add up what is saved by module, most first."""
        sums: dict[str, int] = defaultdict(int)
        for one in self.changes:
            sums[one.node.module] += one.saved
        return dict(sorted(((k, v) for k, v in sums.items() if v), key=lambda one: (-one[1], one[0])))

    def table(self) -> pd.DataFrame:
        """One row per node that changed: its results and FLOPs without the switch and with it."""
        import pandas as pd

        rows = [
            {
                "node": one.node.name,
                "operator": one.node.operator,
                "module": one.node.module,
                "pass": "backward" if one.node.backward else "forward",
                "results without": list(one.without.outputs) if one.without else None,
                "results with": list(one.having.outputs) if one.having else None,
                "FLOPs without": one.without.flops if one.without else 0,
                "FLOPs with": one.having.flops if one.having else 0,
                "saved": one.saved,
            }
            for one in self.changes
        ]
        return pd.DataFrame(rows)

    def _pairs(self) -> Iterator[tuple[NodeFlops | None, NodeFlops | None]]:
        """Yield each node with that of the other graph that is the same."""
        left = {node.name: node for node in self.having.nodes}
        for node in self.without.nodes:
            yield node, left.pop(self.same.get(node.name, ""), None)
        for node in left.values():
            yield None, node


def _made(node: NodeFlops) -> tuple[object, ...]:
    return node.flops, node.elements, node.outputs


def _place(node: NodeFlops) -> tuple[object, ...]:
    return node.reads, node.inputs[:1], node.outputs


def _leaves_out(node: NodeFlops) -> bool:
    """Tell whether a node of the forward leaves rows of a batch out; one that takes a size from a shape does not."""
    return _chooses(node) and not node.backward and any(len(shape) > 1 for shape in node.outputs)


def _chooses(node: NodeFlops) -> bool:
    return node.operator.rpartition(".")[2] in CHOOSING
