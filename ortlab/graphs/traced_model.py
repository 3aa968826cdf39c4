"""What a lab knows of the module that a graph was traced from, and that stands in no ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
