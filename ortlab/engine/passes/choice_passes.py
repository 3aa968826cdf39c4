"""Passes over what chooses a part of a value: Split, Slice and Gather, where not every part gets a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.engine.passes.graph_edits import GraphAdditions, GraphFacts

if TYPE_CHECKING:
    import onnx


def slice_partly_used_splits(model: onnx.ModelProto) -> bool:
    """Turn a Split into Slices where not all of its outputs lead to an output; say whether the model changed.

    The gradient of Split in 1.19.2 (``gradient_builder.cc``, GetSplitGradient) joins the gradients that it gets and
    leaves out the others, where zeros belong: the result has a wrong shape, or values in the wrong place.
    """
    facts, additions = GraphFacts(model), GraphAdditions(model)
    for node in [node for node in model.graph.node if node.op_type == "Split" and not node.domain]:
        used = [index for index, name in enumerate(node.output) if name in facts.leading_out]
        if not used or len(used) == len(node.output) or len(node.input) == 1:
            continue
        axis = _axis(node)
        rank = facts.ranks.get(node.input[0], 0)
        if axis + rank < 0:
            continue  # SliceGrad counts axes from the left only, so without a rank the Split has to stay
        axis = axis + rank if axis < 0 else axis
        stem = f"{node.output[0]}_split"
        zero, one = (additions.vector(node, f"{stem}_{number}", [number]) for number in (0, 1))
        axes = additions.vector(node, f"{stem}_axes", [axis])
        ends = additions.node(node, "CumSum", [node.input[1], zero], f"{stem}_ends")
        starts = additions.node(node, "CumSum", [node.input[1], zero], f"{stem}_starts", exclusive=1)
        for index, output in enumerate(node.output):
            if output not in facts.consumed:
                continue
            which = additions.vector(node, f"{stem}{index}_index", [index])
            start = additions.node(node, "Gather", [starts, which], f"{stem}{index}_start")
            end = additions.node(node, "Gather", [ends, which], f"{stem}{index}_end")
            additions.node(node, "Slice", [node.input[0], start, end, axes, one], output)
        additions.drop(node)
    return additions.apply()


def isolate_choices(model: onnx.ModelProto) -> bool:
    """Keep ORT's optimizers away from a Slice or a Gather that they get wrong; say whether the model changed.

    ``UpStreamGatherGraphTransformer`` of 1.19.2 (``core/optimizer/compute_optimizer/upstream_gather.cc``) moves a
    choice along the last axis towards the inputs, and fails for an operand with fewer dimensions, such as the bias of a
    linear layer: ``linear(x)[..., :n]`` does not build. ``GatherSliceToSplitFusion`` joins the choices from one value
    into a Split, whose gradient is wrong if one of them needs none (see `slice_partly_used_splits`). Both are stopped
    by a pair of nodes in front that only change the shape, which copies nothing.
    """
    facts, additions = GraphFacts(model), GraphAdditions(model)
    for node in model.graph.node:
        if node.op_type not in {"Slice", "Gather"} or node.input[0] not in facts.differentiable:
            continue
        leads_out = node.output[0] in facts.leading_out
        if leads_out and not _ends_a_broadcast(facts, node):
            continue
        stem = f"{node.output[0]}_isolated"
        # Equal pairs in front of both kinds would be merged into one.
        axis = additions.vector(node, f"{stem}_axis", [0 if leads_out else -1])
        wider = additions.node(node, "Unsqueeze", [node.input[0], axis], f"{stem}_wider")
        node.input[0] = additions.node(node, "Squeeze", [wider, axis], stem)
    return additions.apply()


def _ends_a_broadcast(facts: GraphFacts, node: onnx.NodeProto) -> bool:
    """Say whether a node chooses along the last axis of the result of an operator whose operands differ in rank."""
    rank = facts.ranks.get(node.input[0], 0)
    producer = facts.producers.get(node.input[0])
    if producer is None or all(facts.ranks.get(name, 0) == rank for name in producer.input):
        return False
    if node.op_type == "Gather":
        axes: list[int] | None = [_axis(node)]
    else:
        _, _, _, *named = node.input
        axes = facts.vector(named[0]) if named else None
    return axes is None or any(axis in {-1, rank - 1} for axis in axes)


def _axis(node: onnx.NodeProto) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), 0)
