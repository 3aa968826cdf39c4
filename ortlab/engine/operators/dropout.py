"""Dropout with ONNX Runtime's masks, bit for bit, in a fifth of its time: `dropout.h`, in the place of its kernels.

ONNX Runtime 1.19.2 draws a mask one entry after the other, on one thread (``dropout_op.h``): a sixth of a BERT's step.
Only a session is given these nodes, and none with a plan that recomputes a Dropout: ORT's memory optimizer knows its
own operator. As both draw the same, only such plans change the numbers. So both have to take their seeds
from one count, which is the library's: it is set wherever ORT's seed is, and a session that keeps ORT's kernels takes
its seeds there.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor

from ortlab.engine.operators import compiled_calls
from ortlab.engine.operators.torch_kernels import empty, kernel
from ortlab.engine.passes.graph_edits import (
    GraphFacts,
    aten_operator,
    attributes_of,
    has_inner_graphs,
    kernel_call,
    nodes_of,
    put_calls,
)

_PACKING: Final = "ortlab::packed_bits"


@kernel("(Tensor x, float ratio, bool training, int number) -> (Tensor, Tensor)")
def dropout(x: Tensor, ratio: float, training: bool, number: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001, FBT001
    """Drop entries of `x`; return the rest, divided by what is kept of them, and the mask of bytes, 1 where kept."""
    y = empty(x.shape, x)
    mask = torch.empty(x.shape, dtype=torch.uint8)
    compiled_calls.library().ortlab_dropout(*_places(x, y, mask), x.numel(), ratio)
    return y, mask


@kernel("(Tensor grad, Tensor mask, float ratio, bool training) -> Tensor")
def dropout_backward(grad: Tensor, mask: Tensor, ratio: float, training: bool) -> Tensor:  # noqa: ARG001, FBT001
    """Return the gradient of what `dropout` was given."""
    made = empty(grad.shape, grad)
    compiled_calls.library().ortlab_dropout_backward(*_places(grad, mask, made), grad.numel(), ratio)
    return made


def _places(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def with_quick_dropouts(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return a training graph whose dropouts are computed by the library; None if it has none, or one that is not."""
    # All or none: a session takes seeds in one way. The number tells nodes of the same input apart, which ORT would
    # merge.
    dropouts = nodes_of(model, "Dropout")
    mask_of = {node.output[0]: "".join(node.output[1:]) or f"{node.output[0]}_mask" for node in dropouts}
    masks = set(mask_of.values())
    if sys.platform != "linux" or compiled_calls.lacking():  # macOS has another `std::default_random_engine`
        return None
    returned = masks.intersection(value.name for value in model.graph.output)
    if not dropouts or returned or has_inner_graphs(model.graph):
        return None
    facts = GraphFacts(model)
    if not all(_is_plain(node, facts) for node in dropouts):
        return None
    made = onnx.ModelProto()
    made.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        reads = masks.intersection(node.input)
        if node.op_type == "Dropout":
            outputs = [node.output[0], mask_of[node.output[0]]]
            inputs = [*node.input, f"{node.output[0]}_number"]
            made.graph.initializer.append(numpy_helper.from_array(np.array(len(nodes)), inputs[-1]))
            nodes.append(kernel_call("dropout", inputs, outputs, node))
        elif node.op_type == "DropoutGrad" and _is_on(node.input[2:], facts):
            nodes.append(kernel_call("dropout_backward", node.input, node.output, node))
        elif reads and aten_operator(node) != _PACKING:
            return None
        else:
            nodes.append(node)
            continue
        nodes[-1].name = node.name
    typed = {value.name: value for value in made.graph.value_info}
    for name in masks & typed.keys():
        typed[name].type.tensor_type.elem_type = TensorProto.UINT8
    put_calls(made, nodes, dict.fromkeys(masks - typed.keys(), TensorProto.UINT8))
    return made


def drawn_dropouts(model: onnx.ModelProto) -> int:
    """Count the dropouts of a graph for which ONNX Runtime takes a seed."""
    ratios = [node.input[1] if node.input[1:] else "" for node in nodes_of(model, "Dropout")]
    facts = GraphFacts(model) if ratios else None
    return sum(facts is not None and facts.scalar(ratio) != 0 for ratio in ratios)


def _is_plain(node: onnx.NodeProto, facts: GraphFacts) -> bool:
    is_float = facts.element_types.get(node.output[0]) == TensorProto.FLOAT
    return is_float and "seed" not in attributes_of(node) and _is_on(node.input[1:], facts)


def _is_on(how: Any, facts: GraphFacts) -> bool:
    """Say whether a ratio and a mode are constants that let some entries be dropped."""
    ratio, mode = (facts.scalar(name) for name in how) if len(how) == 2 else (None, None)  # noqa: PLR2004
    return ratio is not None and 0 <= ratio < 1 and mode == 1
