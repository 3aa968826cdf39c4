"""A model without the values of its large constants, for those who only look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onnx import GraphProto, ModelProto, TensorProto

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
    """Return a copy of a model without the values of constants above a limit, and how many bytes were left out.

    Constants are initializers and tensors in attributes, also those of inner graphs and of functions.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    left_out = 0
    for tensor in _tensors(copy):
        held = tensor.ByteSize()
        if held > limit_bytes:
            for name in _VALUES:
                tensor.ClearField(name)  # type: ignore[arg-type]
            tensor.ClearField("data_location")
            left_out += held - tensor.ByteSize()
    return copy, left_out


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    waiting: list[GraphProto] = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while waiting or nodes:
        if waiting:
            graph = waiting.pop()
            yield from graph.initializer
            nodes += graph.node
        while nodes:
            for attribute in nodes.pop().attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                if attribute.HasField("g"):
                    waiting.append(attribute.g)
                waiting += attribute.graphs
