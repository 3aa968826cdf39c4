"""FLOPs of one training step, node by node: from the shapes that the nodes ran with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from ortlab.errors import OptionError
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.graphs.flop_formulas import Shape

Kind = Literal["operator", "module", "layer"]
KINDS: Final[tuple[Kind, ...]] = ("operator", "module", "layer")


@dataclass(frozen=True)
class NodeFlops:
    """One node of the execution graph, as it ran.

    Attributes
    ----------
    name
        Its name in the execution graph.
    operator
        Operator, with its domain if that is not ONNX's; of an ATen node, PyTorch's operator.
    module, layer
        Paths of the module that it comes from and of the layer that is in; empty for the model itself.
    backward
        Whether it ran after the forward had returned.
    inputs, outputs
        Shapes of what it read and made, evaluated for the batch that ran.
    flops
        Floating-point operations by `ortlab.graphs.flop_formulas`; None where its shapes do not tell.
    elements
        Numbers that it made.
    ms
        Time of its kernel in ms, measured with ORT's profiler.
    recomputed
        Whether it repeats a node of the forward for the backward.
    reads
        Path of the module that made its first input; empty for the model itself, and for what came from outside.
    """

    name: str
    operator: str
    module: str
    layer: str
    backward: bool
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    flops: int | None
    elements: int
    ms: float
    recomputed: bool = False
    reads: str = ""

    def key(self, kind: Kind) -> str:
        """Return what a table puts it under."""
        return {"operator": self.operator, "module": self.module, "layer": self.layer}[kind]


@dataclass(frozen=True, repr=False)
class Flops(Shown, JsonRecord, noun="record of FLOPs", layout=1):
    """What one training step on ONNX Runtime calculates.

    Attributes
    ----------
    nodes
        In the order in which they ran.
    configuration
        The switches that differ from the defaults, in words.
    part
        Path of the wrapped part; empty for the whole model.
    """

    nodes: tuple[NodeFlops, ...]
    configuration: str = ""
    part: str = ""

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

    def _fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Flops:
        shapes = ("inputs", "outputs")
        nodes = [
            NodeFlops(**{**one, **{key: tuple(map(tuple, one[key])) for key in shapes}})
            for one in fields.pop("nodes")
        ]
        return cls(tuple(nodes), **fields)
