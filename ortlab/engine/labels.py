"""Class labels that no class has: PyTorch raises an IndexError for them, ORT's loss reads memory beyond the scores.

``SoftmaxCrossEntropyLoss`` and ``NegativeLogLikelihoodLoss`` of 1.19.2 take ``scores[label]`` on the CPU unchecked
(``cross_entropy.cc``): a label one too high gives a loss that looks like one, a higher one ends the process. The
labels of a batch are therefore looked at before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from onnx import numpy_helper

if TYPE_CHECKING:
    import onnx

_LOSSES: Final = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})
_KEEPS_VALUES: Final = frozenset(
    "Cast Flatten Gather Identity Pad Reshape Slice Split Squeeze Transpose Unsqueeze".split()  # noqa: SIM905 - so many words are easier to read without quotes
)

_IGNORED: Final = 3
"""Position of the input `ignore_index` of ORT's own losses."""


@dataclass(frozen=True)
class LabelRange:
    """What the labels of a graph's input may be: 0 to `classes` - 1, or `ignored`."""

    read: Callable[[Sequence[Any], Mapping[str, Any]], Any]  # returns the labels from the arguments of a call
    classes: int
    ignored: int | None  # None where the loss leaves none out

    def holds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether all labels of a call are allowed; on other devices than the CPU the kernels check them."""
        labels = self.read(args, kwargs)
        if not isinstance(labels, torch.Tensor) or labels.device.type != "cpu" or not labels.numel():
            return True
        if labels.is_floating_point() or labels.dtype is torch.bool:
            return True
        low, high = (one.item() for one in labels.aminmax())
        if low >= 0 and high < self.classes:
            return True
        strange = (labels < 0) | (labels >= self.classes)
        if self.ignored is not None:
            strange &= labels != self.ignored
        return not bool(strange.any())


def label_ranges(model: onnx.ModelProto, readers: Mapping[str, Any]) -> tuple[LabelRange, ...]:
    """Find the inputs of a graph whose values its losses take for numbers of classes.

    `model` is the exported graph with inferred shapes, before its optimisation; `readers` has, for each input that a
    user gives, a function that returns it from the arguments of a call. Labels that are computed inside the model, and
    losses over an unknown number of classes, are left out.
    """
    graph = model.graph
    made_by = {output: node for node in graph.node for output in node.output}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.input)}
    found = []
    for node in graph.node:
        if node.op_type.removesuffix("Internal") not in _LOSSES:
            continue
        scores, labels = node.input[0], node.input[1]
        while labels in made_by and made_by[labels].op_type in _KEEPS_VALUES:
            labels = made_by[labels].input[0]
        sizes = shapes.get(scores, ())
        classes = sizes[1].dim_value if len(sizes) > 1 else 0
        if labels in readers and classes:
            found.append(LabelRange(readers[labels], classes, _ignored(graph, node)))
    return tuple(found)


def _ignored(graph: onnx.GraphProto, loss: onnx.NodeProto) -> int | None:
    """Return the label that a loss leaves out: an attribute in ONNX, the fourth input of ORT's own operators."""
    for attribute in loss.attribute:
        if attribute.name == "ignore_index":
            return int(attribute.i)
    name = loss.input[_IGNORED] if len(loss.input) > _IGNORED else ""
    constants = {one.name: one for one in graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    return int(numpy_helper.to_array(constants[name]).item()) if name in constants else None
