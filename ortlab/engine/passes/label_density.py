"""The labels that count, of those that label sparsity leaves in: their number in the first batch.

Where the compute optimizer leaves out rows whose label is ignored, ORT gives their number a symbol of its own,
`valid_indices_count_<number>`, that no input has: the savings of recompute plans stay unresolved and sort last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from onnx import numpy_helper

from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import onnx
    import torch

_SYMBOL: Final = "valid_indices_count"
_KEEPS_VALUES: Final = frozenset({"Reshape", "Flatten", "Identity", "Cast", "Squeeze", "Unsqueeze"})


def install() -> None:
    """Let the mark that label sparsity looks for print nothing."""
    # ``_runtime_inspector.FlagAndPrintDensity`` prints a line in each forward that an export takes;
    # `ortlab.records.density` counts densities, and says which input they are of.
    from onnxruntime.training.ortmodule._runtime_inspector import FlagAndPrintDensity

    replace(FlagAndPrintDensity, "forward", _only_mark)


def _only_mark(_original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(ctx: Any, marked: torch.Tensor, padding: int, kind: str) -> torch.Tensor:  # noqa: ARG001 - ORT's
        return marked

    return forward


def valid_label_counts(model: onnx.ModelProto, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Count the labels that are not ignored behind each symbol that label sparsity has made."""
    # ORT inserts `NonZero(labels - ignore_index)` (InsertGatherBeforeSceLoss) into the optimised graph and gives the
    # number of its results the symbol. The result is empty where the graph has no such symbol, or where several losses
    # leave open which is whose.
    graph = model.graph
    counts = set(_counts(graph, inputs))
    count = counts.pop() if len(counts) == 1 else None
    return {} if count is None else dict.fromkeys(_symbols(graph), count)


def label_totals(model: onnx.ModelProto) -> dict[str, str]:
    """Say how many labels there are in all behind each symbol that label sparsity has made in an optimised graph."""
    # The number is a formula over the dimensions of the inputs. The result is empty where the shape of the labels is
    # not known, or where several losses leave open which is whose.
    graph = model.graph
    shapes = {
        value.name: [
            size.dim_param or (str(size.dim_value) if size.HasField("dim_value") else "")
            for size in value.type.tensor_type.shape.dim
        ]
        for value in (*graph.value_info, *graph.input)
    }
    made_by = {output: node for node in graph.node for output in node.output}
    filters = [made_by.get(node.input[0]) for node in graph.node if node.op_type == "NonZero"]
    labels = {
        tuple(shapes.get(one.input[0], ("",))) for one in filters if one is not None and one.op_type == "Sub"
    }
    if len(labels) != 1 or not all(sizes := labels.pop()):
        return {}
    return dict.fromkeys(_symbols(graph), "*".join(f"({size})" for size in sizes) or "1")


def _symbols(graph: onnx.GraphProto) -> list[str]:
    found = {
        size.dim_param
        for value in graph.value_info
        for size in value.type.tensor_type.shape.dim
        if size.dim_param.startswith(_SYMBOL)
    }
    return sorted(found)


def _counts(graph: onnx.GraphProto, inputs: Mapping[str, torch.Tensor]) -> Iterator[int | None]:
    """Yield the number of results of each NonZero that filters labels; None for one that cannot be followed."""
    made_by = {output: node for node in graph.node for output in node.output}
    constants = {constant.name: constant for constant in graph.initializer}
    for node in graph.node:
        difference = made_by.get(node.input[0]) if node.op_type == "NonZero" else None
        if difference is None or difference.op_type != "Sub":
            continue
        labels, ignored = difference.input
        while labels in made_by and made_by[labels].op_type in _KEEPS_VALUES:
            labels = made_by[labels].input[0]
        if labels in inputs and ignored in constants:
            index = int(numpy_helper.to_array(constants[ignored]).item())
            yield int((inputs[labels] != index).sum())
        else:
            yield None
