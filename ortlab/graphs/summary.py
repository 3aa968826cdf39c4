"""What is in a graph: operators by count and time, inputs and outputs, parameters, and where its nodes come from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ortlab.graphs.nodes import HOW, PHASES, YIELD, Value, node_names, operator_of, phases, value_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from onnx import NodeProto

    from ortlab.graphs.nodes import Origin, Phase
    from ortlab.graphs.stages import Graph
    from ortlab.memory.saved_activations import SavedActivation
    from ortlab.memory.trace import TracedNode

Kind = Literal["input", "parameter", "buffer", "output", "gradient"]


@dataclass(frozen=True)
class SummaryNode:
    """One node of a graph."""

    name: str  # as `ortlab.graphs.node_names` gives it
    operator: str  # with its domain unless it is ONNX's
    # By its place in the graph, or as it ran where there is a profile; None for the border between forward and
    # backward.
    phase: Phase | None
    origin: Origin
    # Time of its kernel, measured with ORT's profiler; None where it was not measured.
    ms: float | None = None


@dataclass(frozen=True)
class OperatorRow:
    """One operator of a graph."""

    operator: str  # with its domain unless it is ONNX's
    counts: Mapping[Phase, int]  # number of its nodes by pass
    ms: Mapping[Phase, float]  # time of their kernels by pass, measured; empty where the graph has no profile

    @property
    def count(self) -> int:
        """Number of its nodes."""
        return sum(self.counts.values())

    @property
    def total_ms(self) -> float:
        """Time of all its kernels, in ms; 0 where the graph has no profile."""
        return sum(self.ms.values())


@dataclass(frozen=True)
class GraphSummary:
    """What is in a graph; `graph.summary` makes it."""

    nodes: tuple[SummaryNode, ...]  # in the order of the graph
    # The one that takes most time first, or without a profile the most frequent.
    operators: tuple[OperatorRow, ...]
    inputs: tuple[tuple[Value, Kind], ...]  # the batch first, then buffers, then parameters
    # First what the forward of a training graph returns. It is no output in ONNX's sense: it is given to the border
    # between forward and backward.
    outputs: tuple[tuple[Value, Kind], ...]
    parameter_count: int  # of the parameters that ORTModule feeds to the graph
    parameter_bytes: int  # of these parameters
    opsets: Mapping[str, int]  # version of each operator set by its domain; ONNX's own is "ai.onnx"
    # What the forward keeps for the backward, the largest first; None where nobody has read it.
    edges: tuple[SavedActivation, ...] | None = None
    # Nodes that the profile does not have, though there is one: ORT runs none of them, or by another name.
    unmeasured: int = 0

    @property
    def counts(self) -> dict[Phase, int]:
        """Number of nodes by pass."""
        found = Counter(node.phase for node in self.nodes)
        return {phase: found[phase] for phase in PHASES}

    @property
    def forward_nodes(self) -> tuple[SummaryNode, ...]:
        """Nodes of the forward."""
        return tuple(node for node in self.nodes if node.phase == "forward")

    @property
    def origins(self) -> dict[str, int]:
        """Number of forward nodes by how their module is known: "recorded", "inferred", "not known"."""
        found = Counter(node.origin.how for node in self.forward_nodes)
        return {how: found[how] for how in HOW}

    @property
    def lines_recorded(self) -> int:
        """Number of forward nodes of which the export recorded the line of source."""
        return sum(node.origin.line_recorded for node in self.forward_nodes)

    @property
    def mapped_fraction(self) -> float:
        """The part of the forward nodes that has a known module, from 0 to 1; 1 if there are none."""
        forward = self.forward_nodes
        return sum(node.origin.is_known for node in forward) / len(forward) if forward else 1.0

    @property
    def is_measured(self) -> bool:
        """Whether nodes have times."""
        return any(node.ms is not None for node in self.nodes)

    def table(self) -> pd.DataFrame:
        """Return one row per operator: nodes by pass, and where the graph was profiled, their measured times in ms."""
        import pandas as pd

        measured = self.is_measured
        rows: list[dict[str, object]] = []
        for one in self.operators:
            counted = {str(phase): one.counts.get(phase, 0) for phase in PHASES}
            timed = {f"{phase} [ms]": one.ms.get(phase, 0.0) for phase in PHASES}
            times = {"time [ms]": one.total_ms} | timed if measured else {}
            rows.append({"operator": one.operator, "count": one.count} | counted | times)
        columns = None if rows else ["operator", "count", *PHASES]
        return pd.DataFrame(rows, columns=columns)

    def node_table(self) -> pd.DataFrame:
        """Return one row per node: pass, module, line of source, how they are known, and the measured time in ms."""
        import pandas as pd

        measured = self.is_measured
        return pd.DataFrame(
            [
                {
                    "node": node.name,
                    "operator": node.operator,
                    "pass": node.phase or "",
                    "module": node.origin.module,
                    "layer": node.origin.layer,
                    "source": node.origin.source,
                    "known": node.origin.how,
                    "line recorded": node.origin.line_recorded,
                    **({"time [ms]": node.ms} if measured else {}),
                }
                for node in self.nodes
            ]
        )

    def value_table(self) -> pd.DataFrame:
        """Return one row per input and output: what it is, its type and its shape; a symbolic size is a name."""
        import pandas as pd

        rows = [
            {"name": value.name, "kind": kind, "dtype": value.dtype, "shape": list(value.shape)}
            for value, kind in (*self.inputs, *self.outputs)
        ]
        return pd.DataFrame(rows, columns=["name", "kind", "dtype", "shape"])

    def edge_table(self) -> pd.DataFrame:
        """Return one row per edge from a forward to a backward node, with the bytes of the buffer that it keeps alive.

        Several edges may keep one buffer: the bytes of a buffer stand in each of its rows.
        """
        import pandas as pd

        rows = [
            {"from": row.node, "value": row.value, "to": reader, "bytes": row.bytes, "module": row.module}
            for row in self.edges or ()
            for reader in row.kept_by
        ]
        return pd.DataFrame(rows, columns=["from", "value", "to", "bytes", "module"])


def summarize(graph: Graph) -> GraphSummary:
    """Say what is in a graph."""
    proto = graph.model.graph
    ran = _ran(graph)
    nodes = tuple(
        _node(name, node, phase, graph.origins[name], ran.get(_key(node)))
        for name, node, phase in zip(node_names(proto), proto.node, phases_run(graph), strict=True)
    )
    parameters = graph.traced.parameters
    fed = [parameters[value.name] for value in graph.inputs if value.name in parameters]
    return GraphSummary(
        nodes=nodes,
        operators=_operators(nodes, measured=bool(ran)),
        inputs=_inputs(graph),
        outputs=(*_returned(graph), *((value, _kind_of_output(value.name)) for value in graph.outputs)),
        parameter_count=len(fed),
        parameter_bytes=sum(fed),
        opsets={entry.domain or _ONNX: entry.version for entry in graph.model.opset_import},
        edges=None if graph.activations is None else graph.activations.rows,
        unmeasured=sum(node.ms is None and node.phase is not None for node in nodes) if ran else 0,
    )


_ONNX: Final = "ai.onnx"


def _key(node: NodeProto) -> str:
    """Return what a node is found by in a profile, where the nameless ones have no name either."""
    return next(filter(None, node.output), node.name)


def _ran(graph: Graph) -> dict[str, TracedNode]:
    if graph.trace is None:
        return {}
    return {next(filter(None, node.outputs), node.name): node for node in graph.trace.nodes}


def _node(
    name: str, node: NodeProto, phase: Phase | None, origin: Origin, ran: TracedNode | None
) -> SummaryNode:
    took = None if ran is None or phase is None else ran.ms
    return SummaryNode(name, operator_of(node), phase, origin, took)


def phases_run(graph: Graph) -> list[Phase | None]:
    """Return the pass that each node of a graph runs in, as a profile has seen it where there is one."""
    # What only the backward needs may stand before the border and yet run behind it, and the other way around.
    ran = _ran(graph)
    found = phases(graph.model.graph)
    for at, node in enumerate(graph.model.graph.node):
        seen = ran.get(_key(node))
        if seen is not None and found[at] is not None:
            found[at] = seen.phase
    return found


def _operators(nodes: tuple[SummaryNode, ...], *, measured: bool) -> tuple[OperatorRow, ...]:
    counts: dict[str, Counter[Phase]] = {}
    times: dict[str, dict[Phase, float]] = {}
    for node in nodes:
        counted = counts.setdefault(node.operator, Counter())
        if node.phase is None:
            continue
        counted[node.phase] += 1
        if node.ms is not None:
            spent = times.setdefault(node.operator, {})
            spent[node.phase] = spent.get(node.phase, 0.0) + node.ms
    rows = [
        OperatorRow(name, dict(counted), times.get(name, {})) for name, counted in counts.items() if counted
    ]
    return tuple(sorted(rows, key=lambda row: (-row.total_ms if measured else 0, -row.count, row.operator)))


def _inputs(graph: Graph) -> tuple[tuple[Value, Kind], ...]:
    found = [(value, _kind_of_input(value.name, graph)) for value in graph.inputs]
    order: tuple[Kind, ...] = ("input", "buffer", "parameter")
    return tuple(sorted(found, key=lambda one: order.index(one[1])))


def _returned(graph: Graph) -> tuple[tuple[Value, Kind], ...]:
    """Return what a training graph hands over at the border; a shape that the graph does not hold is empty."""
    border = next((node for node in graph.model.graph.node if node.op_type == YIELD), None)
    if border is None:
        return ()
    typed = {info.name: value_of(info) for info in graph.model.graph.value_info}
    return tuple((typed.get(name, Value(name, "", ())), "output") for name in border.input)


def _kind_of_input(name: str, graph: Graph) -> Kind:
    if name in graph.traced.parameters:
        return "parameter"
    return "buffer" if name in graph.traced.buffers else "input"


def _kind_of_output(name: str) -> Kind:
    return "gradient" if "_grad" in name else "output"
