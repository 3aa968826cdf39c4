"""The ONNX graphs of a build: one of each stage, what is in it and how to save it, and all of them together."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import BuildError, OptionError
from ortlab.graphs.nodes import Origin, Value, operator_of, origins, value_of
from ortlab.graphs.summary import GraphSummary, summarize
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd
    from onnx import FunctionProto, GraphProto, ModelProto, TensorProto

    from ortlab.memory.saved_activations import SavedActivations
    from ortlab.memory.trace import Trace

STAGES: Final = {
    "exported": "as torch exported it",
    "processed": "with shapes and ORT's own operators",
    "optimized": "optimised, before the gradient is built",
    "gradient": "with the gradient, as handed to the session",
    "execution": "as the session executes it, memory plans applied",
}
"""The five stages of a build, in order."""

VIEWED_BYTES: Final = 1024
"""Constants up to this size keep their values in a graph that is shown."""


@dataclass(frozen=True)
class TracedModel:
    """What is known of a graph besides the graph; everything is empty for one that was read from a file."""

    # By path of each module of the model: "file:line" where its forward begins, empty for one of torch's.
    modules: Mapping[str, str] = field(default_factory=dict)
    # By name of an exported node: "file:line" of the model's code that the export recorded for it.
    lines: Mapping[str, str] = field(default_factory=dict)
    # By name of the graph's input: bytes of the parameter or buffer that ORTModule feeds there.
    parameters: Mapping[str, int] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)
    # Sizes of the input's dimensions in the batch that the graph was built with.
    symbols: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Graph(Shown):
    """One ONNX graph."""

    stage: str  #: One of `STAGES`
    mode: str  #: "training" or "inference"
    #: The model as ONNX stores it. It holds constants, and no weights: ORTModule feeds those as inputs.
    serialized: bytes = field(repr=False)
    part: str = ""  #: Path of the part of the model that it is of; empty where the whole model is wrapped
    #: What is known of the module that it was traced from; nothing for a graph that was read from a file.
    traced: TracedModel = field(default=TracedModel(), repr=False, compare=False)
    #: What its forward keeps for its backward, where somebody has read it; see `with_activations`.
    activations: SavedActivations | None = field(default=None, repr=False, compare=False)
    #: A profiled step of it, where there is one; see `with_profile`.
    trace: Trace | None = field(default=None, repr=False, compare=False)
    stripped_bytes: int = 0  #: Bytes of constants that were left out for viewing; 0 in a graph that can run
    #: How it came about, where it was built to be looked at; empty where it was there.
    note: str = field(default="", repr=False, compare=False)

    @cached_property
    def model(self) -> ModelProto:
        """The graph as `onnx.ModelProto`."""
        import onnx

        return onnx.load_model_from_string(self.serialized)

    @cached_property
    def operators(self) -> dict[str, int]:
        """Count of nodes by operator, most frequent first; operators outside ONNX carry their domain."""
        counts = Counter(operator_of(node) for node in self.model.graph.node)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @cached_property
    def origins(self) -> dict[str, Origin]:
        """Where each node comes from in the model, by its name; see `ortlab.graphs.nodes`."""
        return origins(self)

    @cached_property
    def summary(self) -> GraphSummary:
        """Operators by count and time, inputs, outputs, parameters, and where the nodes come from."""
        return summarize(self)

    @property
    def what(self) -> str:
        """What the graph is, in words."""
        if self.stage == "gradient" and self.mode == "inference":
            return "as handed to the session; inference has no gradient"
        if self.stage == "execution" and self.mode == "inference":
            return "as the session executes it"
        return STAGES.get(self.stage, "read from a file")

    def with_activations(self, activations: SavedActivations) -> Graph:
        """Return the graph with what its forward keeps for its backward, which its summary then shows."""
        return replace(self, activations=activations)

    def with_profile(self, trace: Trace) -> Graph:
        """Return the graph with the times of a profiled step, which its summary then shows.

        Parameters
        ----------
        trace
            What `lab.profile()` returned.

        Raises
        ------
        OptionError
            If the step ran another graph than this.
        """
        made = {name for node in self.model.graph.node for name in node.output}
        strange = [node.operator for node in trace.nodes if not made.issuperset(filter(None, node.outputs))]
        if strange:
            raise OptionError(
                f"The profile is of another graph: {len(strange)} of its {len(trace.nodes)} nodes are not in this one.",
                why=f"This is the {self.stage} graph for {self.mode}; the first such node is a {strange[0]}.",
                fix='Take both of the same build: lab.graph("execution", profile=True).',
            )
        return replace(self, trace=trace)

    def for_viewing(self, limit_bytes: int = VIEWED_BYTES) -> Graph:
        """Return the graph without the values of large constants, to be shown and not to be run.

        Type and shape of each constant stay. The graph itself stays as it is, and only that can be saved.

        Parameters
        ----------
        limit_bytes
            The largest constant that keeps its values, in bytes.
        """
        model, left_out = stripped(self.model, limit_bytes)
        if not left_out:
            return self
        return replace(
            self, serialized=model.SerializeToString(), stripped_bytes=self.stripped_bytes + left_out
        )

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return len(self.model.graph.node)

    @property
    def initializer_count(self) -> int:
        """Number of constants stored in the graph."""
        return len(self.model.graph.initializer)

    @property
    def opset(self) -> int:
        """Version of the ONNX operators."""
        return next((entry.version for entry in self.model.opset_import if not entry.domain), 0)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Inputs: the batch, then parameters and buffers."""
        return tuple(value_of(info) for info in self.model.graph.input)

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Outputs: the model's, and in a training graph the gradients."""
        return tuple(value_of(info) for info in self.model.graph.output)

    @property
    def digest(self) -> str:
        """SHA-256 of the serialised graph, the first 16 hexadecimal digits."""
        return hashlib.sha256(self.serialized).hexdigest()[:16]

    def save(self, path: str | Path) -> Path:
        """Write the graph as an ONNX file and return its path.

        Raises
        ------
        BuildError
            If the file cannot be written, or the graph was stripped for viewing.
        """
        if self.stripped_bytes:
            raise BuildError(
                "This graph cannot be saved: it was stripped for viewing.",
                why=f"{self.stripped_bytes:,} bytes of its constants were left out, so that it could not run.",
                fix="Save the graph that for_viewing() was called on.",
            )
        target = Path(path)
        try:
            target.write_bytes(self.serialized)
        except OSError as error:
            raise BuildError(
                f"The graph cannot be written to {target}.",
                why=str(error),
                fix="Give a file in a folder that exists.",
            ) from error
        return target

    def table(self) -> pd.DataFrame:
        """One row per operator: its nodes by pass, and their measured times where there is a profile.

        `summary` has more tables: `node_table`, `value_table`, `edge_table`.
        """
        return self.summary.table()

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain JSON types, without the graph itself."""
        summary = self.summary
        return {
            "stage": self.stage,
            "mode": self.mode,
            "opset": self.opset,
            "nodes": self.node_count,
            "constants": self.initializer_count,
            "operators": self.operators,
            "inputs": [vars(value) for value in self.inputs],
            "outputs": [vars(value) for value in self.outputs],
            "digest": self.digest,
            "parameters": {"count": summary.parameter_count, "bytes": summary.parameter_bytes},
            "passes": summary.counts,
            "forward_origins": {**summary.origins, "lines_recorded": summary.lines_recorded},
        }


_VALUES: Final = (
    "raw_data",
    "float_data",
    "int32_data",
    "int64_data",
    "double_data",
    "uint64_data",
    "string_data",
    "external_data",
)


def stripped(model: ModelProto, limit_bytes: int) -> tuple[ModelProto, int]:
    """Return a copy of a model without the values of constants above a limit, and how many bytes were left out."""
    # Constants are initializers and tensors in attributes, also those of inner graphs and of functions.
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    left_out = 0
    for tensor in tensors_of(copy.graph, copy.functions):
        held = tensor.ByteSize()
        if held > limit_bytes:
            for name in _VALUES:
                tensor.ClearField(name)  # type: ignore[arg-type]
            tensor.ClearField("data_location")
            left_out += held - tensor.ByteSize()
    return copy, left_out


def tensors_of(graph: GraphProto, functions: Iterable[FunctionProto] = ()) -> Iterator[TensorProto]:
    """Yield the initializers of a graph and of those inside it, and the tensors in attributes, also of functions."""
    waiting = [graph]
    nodes = [node for function in functions for node in function.node]
    while waiting or nodes:
        if waiting:
            present = waiting.pop()
            yield from present.initializer
            nodes += present.node
        while nodes:
            for attribute in nodes.pop().attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                if attribute.HasField("g"):
                    waiting.append(attribute.g)
                waiting += attribute.graphs


@dataclass(frozen=True, repr=False)
class GraphSet(Shown):
    """All stages of one build, in the order in which they were made; `lab.graphs()` returns it."""

    graphs: tuple[Graph, ...]

    def __iter__(self) -> Iterator[Graph]:
        return iter(self.graphs)

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, stage: str) -> Graph:
        """Return the graph of a stage, or raise OptionError where there is none."""
        found = next((graph for graph in self.graphs if graph.stage == stage), None)
        if found is None:
            raise OptionError(
                f"There is no graph stage {stage!r}.",
                fix=f"Stages: {', '.join(g.stage for g in self.graphs)}.",
            )
        return found

    @property
    def mode(self) -> str:
        """Whether the graphs are of "training" or of "inference"."""
        return self.graphs[0].mode

    @property
    def part(self) -> str:
        """Path of the part of the model that they are of; empty where the whole model is wrapped."""
        return self.graphs[0].part

    def same_as(self, graph: Graph) -> str:
        """Return the stage before a graph that is the same, byte for byte; empty if there is none."""
        earlier = self.graphs[: self.graphs.index(graph)]
        return next((one.stage for one in earlier if one.serialized == graph.serialized), "")

    def table(self) -> pd.DataFrame:
        """Return one row per stage: nodes by pass, constants, bytes, and the share of forward nodes of known module."""
        import pandas as pd

        return pd.DataFrame([{**_row(graph), "same as": self.same_as(graph)} for graph in self.graphs])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, without the graphs themselves."""
        return {"graphs": [graph.to_dict() for graph in self.graphs]}


def _row(graph: Graph) -> dict[str, Any]:
    summary = graph.summary
    return {
        "stage": graph.stage,
        "mode": graph.mode,
        "what": graph.what,
        "nodes": graph.node_count,
        **{str(phase): count for phase, count in summary.counts.items()},
        "operators": len(graph.operators),
        "constants": graph.initializer_count,
        "bytes": len(graph.serialized),
        "opset": graph.opset,
        "mapped": summary.mapped_fraction,
        "digest": graph.digest,
    }
