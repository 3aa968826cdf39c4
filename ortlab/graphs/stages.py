"""One ONNX graph of a build: what stage it is, what is in it, and how to save it."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import BuildError

if TYPE_CHECKING:
    import pandas as pd
    from onnx import ModelProto, ValueInfoProto

STAGES: Final = {
    "exported": "as torch exported it",
    "processed": "with shapes and ORT's own operators",
    "optimized": "optimised, before the gradient is built",
    "gradient": "with the gradient, as handed to the session",
    "execution": "as the session executes it, memory plans applied",
}
"""The five stages of a build, in order."""


@dataclass(frozen=True)
class Value:
    """An input or output of a graph.

    Attributes
    ----------
    name
        Its name in the graph.
    dtype
        ONNX element type, lower case: "float", "int64", ...
    shape
        Sizes; a symbolic size is a string.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Graph:
    """One ONNX graph.

    Attributes
    ----------
    stage
        One of `STAGES`.
    mode
        "training" or "inference".
    serialized
        The model as ONNX stores it. It holds constants, and no weights: ORTModule feeds those as inputs.
    """

    stage: str
    mode: str
    serialized: bytes = field(repr=False)

    @cached_property
    def model(self) -> ModelProto:
        """The graph as `onnx.ModelProto`."""
        import onnx

        return onnx.load_model_from_string(self.serialized)

    @cached_property
    def operators(self) -> dict[str, int]:
        """Count of nodes by operator, most frequent first; operators outside ONNX carry their domain."""
        counts = Counter(
            f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in self.model.graph.node
        )
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

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
        return tuple(_value(info) for info in self.model.graph.input)

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Outputs: the model's, and in a training graph the gradients."""
        return tuple(_value(info) for info in self.model.graph.output)

    @property
    def digest(self) -> str:
        """SHA-256 of the serialised graph, the first 16 hexadecimal digits."""
        return hashlib.sha256(self.serialized).hexdigest()[:16]

    def save(self, path: str | Path) -> Path:
        """Write the graph as an ONNX file and return its path.

        Raises
        ------
        BuildError
            If the file cannot be written.
        """
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
        """One row per operator with its count, most frequent first."""
        import pandas as pd

        return pd.DataFrame(list(self.operators.items()), columns=["operator", "count"])

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain JSON types, without the graph itself."""
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
        }


def _value(info: ValueInfoProto) -> Value:
    import onnx

    tensor = info.type.tensor_type
    shape = tuple(size.dim_param or size.dim_value for size in tensor.shape.dim)
    return Value(info.name, onnx.TensorProto.DataType.Name(tensor.elem_type).lower(), shape)
