"""Dropout with ONNX Runtime's masks, bit for bit, in a fifth of its time: `dropout.h`, in the place of its kernels.

ONNX Runtime 1.19.2 draws a mask one entry after the other, on one thread (``dropout_op.h``): a sixth of a BERT's step.
Only a session is given these nodes. Where a plan recomputes a dropout, ORT's memory optimizer, which knows its own
operator, has acted before; the first dropout then hands its seed to the second. As both draw the same, where they are
used changes no number. So both have to take their seeds from one count, which is the library's: it is set
wherever ORT's seed is, and a session that keeps ORT's kernels takes its seeds there.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
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
from ortlab.engine.passes.training_graph import HIDING
from ortlab.memory.recompute import COPY

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_PACKING: Final = "ortlab::packed_bits"
_SEED: Final = "_seed"


@kernel("(Tensor x, float ratio, bool training, int number) -> (Tensor, Tensor)")
def dropout(x: Tensor, ratio: float, training: bool, number: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001, FBT001
    """Drop entries of `x`; return the rest, divided by what is kept of them, and the mask of bytes, 1 where kept."""
    return _dropped(x, ratio, _seed(ratio))


@kernel("(Tensor x, float ratio, bool training, int number) -> (Tensor, Tensor, Tensor)")
def dropout_to_repeat(
    x: Tensor,
    ratio: float,
    training: bool,  # noqa: ARG001, FBT001
    number: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    """Drop entries as `dropout`, and return the seed with which `dropout_repeated` drops the same."""
    seed = _seed(ratio)
    return *_dropped(x, ratio, seed), torch.tensor(seed)


@kernel("(Tensor x, float ratio, bool training, int seed) -> (Tensor, Tensor)")
def dropout_repeated(x: Tensor, ratio: float, training: bool, seed: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001, FBT001
    """Return once more what a dropout has made of the same input."""
    return _dropped(x, ratio, seed)


@kernel("(Tensor grad, Tensor mask, float ratio, bool training) -> Tensor")
def dropout_backward(grad: Tensor, mask: Tensor, ratio: float, training: bool) -> Tensor:  # noqa: ARG001, FBT001
    """Return the gradient of what `dropout` was given."""
    made = empty(grad.shape, grad)
    compiled_calls.library().ortlab_dropout_backward(*_places(grad, mask, made), grad.numel(), ratio)
    return made


def _seed(ratio: float) -> int:
    """Take a seed, as ONNX Runtime's dropouts do where they drop anything."""
    return int(compiled_calls.library().ortlab_take_seeds(1 if ratio else 0))


def _dropped(x: Tensor, ratio: float, seed: int) -> tuple[Tensor, Tensor]:
    y, mask = empty(x.shape, x), torch.empty(x.shape, dtype=torch.uint8)
    compiled_calls.library().ortlab_dropout(*_places(x, y, mask), x.numel(), ratio, seed)
    return y, mask


def _places(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def with_quick_dropouts(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return a training graph whose dropouts are computed by the library; None if it has none, or one that is not."""
    # All or none, since a session takes seeds in one way.
    dropouts = {node.output[0]: node for node in nodes_of(model, "Dropout")}
    # macOS has another `std::default_random_engine`.
    elsewhere = sys.platform != "linux" or compiled_calls.lacking()
    if not dropouts or elsewhere or has_inner_graphs(model.graph):
        return None
    facts, masks = GraphFacts(model), _masks(model.graph, dropouts)
    if not _are_plain(dropouts, facts) or not masks.isdisjoint(value.name for value in model.graph.output):
        return None
    made = onnx.ModelProto()
    made.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "Dropout":
            nodes.append(_quick(node, dropouts, made.graph))
        elif node.op_type == "DropoutGrad" and _is_on(node.input[2:], facts):
            nodes.append(kernel_call("dropout_backward", node.input, node.output, node))
        elif masks.isdisjoint(node.input) or node.op_type == HIDING or aten_operator(node) == _PACKING:
            nodes.append(node)
        else:
            return None
        nodes[-1].name = node.name
    types = dict.fromkeys(masks, TensorProto.UINT8)
    for name in _repeated(dropouts):
        made.graph.value_info.append(helper.make_tensor_value_info(f"{name}{_SEED}", TensorProto.INT64, []))
    for value in made.graph.value_info:
        if value.name in types:
            value.type.tensor_type.elem_type = types.pop(value.name)
    put_calls(made, nodes, types)
    return made


def _quick(node: onnx.NodeProto, dropouts: Collection[str], graph: onnx.GraphProto) -> onnx.NodeProto:
    """Return the call that stands in for a dropout of a graph, to which the number that it reads is added."""
    output, mask = node.output[0], _mask(node)
    repeated = output.removesuffix(COPY)
    if repeated != output and repeated in dropouts:
        return kernel_call("dropout_repeated", [*node.input, f"{repeated}{_SEED}"], [output, mask], node)
    # The number tells nodes of the same input apart, which ORT would merge.
    number = f"{output}_number"
    graph.initializer.append(numpy_helper.from_array(np.array(len(graph.initializer)), number))
    if f"{output}{COPY}" in dropouts:
        return kernel_call(
            "dropout_to_repeat", [*node.input, number], [output, mask, f"{output}{_SEED}"], node
        )
    return kernel_call("dropout", [*node.input, number], [output, mask], node)


def _masks(graph: onnx.GraphProto, dropouts: Mapping[str, onnx.NodeProto]) -> set[str]:
    """Return the names of the masks, also behind a node that hands them on."""
    masks = set(map(_mask, dropouts.values()))
    for node in graph.node:
        if node.op_type == HIDING:
            masks.update(
                after for before, after in zip(node.input, node.output, strict=True) if before in masks
            )
    return masks


def _mask(node: onnx.NodeProto) -> str:
    return "".join(node.output[1:]) or f"{node.output[0]}_mask"


def _repeated(dropouts: Collection[str]) -> list[str]:
    """Return those of some results of which a plan of ONNX Runtime's has put a copy into the backward."""
    return [name for name in dropouts if f"{name}{COPY}" in dropouts]


def drawn_dropouts(model: onnx.ModelProto) -> int:
    """Count the dropouts of a graph for which ONNX Runtime takes a seed."""
    ratios = [node.input[1] if node.input[1:] else "" for node in nodes_of(model, "Dropout")]
    facts = GraphFacts(model) if ratios else None
    return sum(facts is not None and facts.scalar(ratio) != 0 for ratio in ratios)


def _are_plain(dropouts: Mapping[str, onnx.NodeProto], facts: GraphFacts) -> bool:
    # ORT gives a dropout that it repeats, and its copy, the same seed of their own.
    seeded = {name for one in _repeated(dropouts) for name in (one, f"{one}{COPY}")}
    for name, node in dropouts.items():
        if facts.element_types.get(name) != TensorProto.FLOAT or not _is_on(node.input[1:], facts):
            return False
        if "seed" in attributes_of(node) and name not in seeded:
            return False
    return True


def _is_on(how: Any, facts: GraphFacts) -> bool:
    """Say whether a ratio and a mode are constants that let some entries be dropped."""
    ratio, mode = (facts.scalar(name) for name in how) if len(how) == 2 else (None, None)  # noqa: PLR2004
    return ratio is not None and 0 <= ratio < 1 and mode == 1
