"""Pairs of nodes that keep optimizers of onnxruntime 1.19.2 away from values that they get wrong.

A pair only changes the shape and changes it back, which copies nothing (`GraphAdditions.apart`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from onnx import TensorProto

from ortlab.engine.devices import provider
from ortlab.engine.passes.graph_edits import (
    LOSSES,
    GraphAdditions,
    GraphFacts,
    attributes_of,
    nodes_of,
)

if TYPE_CHECKING:
    import onnx

_PASSED: Final = frozenset(
    """Add BiasGelu Cast Div Dropout Erf FastGelu Gelu Identity LayerNormalization MatMul Mul Pow QuickGelu ReduceMean
    Reshape Softmax Sqrt Sub Tanh Transpose""".split()  # noqa: SIM905
)
"""What a choice may be moved ahead of, as it is or once ONNX Runtime has put several of them together."""


def isolate_choices(model: onnx.ModelProto) -> bool:
    """Keep ORT's optimizers away from a Slice or a Gather that they get wrong; say whether the model changed."""
    # ``UpStreamGatherGraphTransformer`` of 1.19.2 (``core/optimizer/compute_optimizer/upstream_gather.cc``) moves a
    # choice along the last axis towards the inputs, and fails for an operand with fewer dimensions, such as the bias of
    # a linear layer: ``linear(x)[..., :n]`` does not build. ``GatherSliceToSplitFusion`` joins the choices from one
    # value into a Split, whose gradient is wrong if one of them needs none (see `slice_partly_used_splits`). Both are
    # stopped by a pair of nodes in front that only change the shape, which copies nothing.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    for node in nodes_of(model, "Slice", "Gather"):
        if node.input[0] not in facts.differentiable:
            continue
        leads_out = node.output[0] in facts.leading_out
        if leads_out and not _ends_a_broadcast(facts, node):
            continue
        stem = f"{node.output[0]}_isolated"
        # Equal pairs in front of both kinds would be merged into one.
        node.input[0] = additions.apart(node, node.input[0], stem, 0 if leads_out else -1)
    return additions.apply()


def level_operands(model: onnx.ModelProto) -> bool:
    """Give operands the dimensions that they lack where a choice may pass; say whether the model changed."""
    # ``UpStreamGather`` of 1.19.2 moves a choice ahead of an Add or a Div, and counts its axis from the front in each
    # operand (``SimplePointwiseGatherActor``). In one of fewer dimensions, such as positions that are added to all
    # samples, that is another axis: in silence where both have as many entries. A bias has the last axis only, along
    # which `isolate_choices` lets nothing pass.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    passed = {node.input[0] for node in nodes_of(model, "Gather", "GatherND", "Slice")}
    for node in reversed(model.graph.node):
        if passed.isdisjoint(node.output) or node.op_type not in _PASSED:
            continue
        passed.update(node.input)
        rank = facts.ranks.get(node.output[0], 0)
        for place, name in enumerate(node.input):
            lacking = rank - facts.ranks.get(name, rank)
            if node.op_type in {"Add", "Div"} and lacking > 0 and facts.ranks[name] > 1:
                level = f"{node.output[0]}_level{place}"
                axes = additions.vector(node, f"{level}_axes", list(range(lacking)))
                node.input[place] = additions.node(node, "Unsqueeze", [name, axes], level)
    return additions.apply()


def isolate_losses_of_bfloat16(model: onnx.ModelProto) -> bool:
    """Keep the filter of ignored labels behind the Cast from bfloat16; say whether the model changed."""
    # ``InsertGatherBeforeSceLoss`` of 1.19.2 lets the loss see only the rows whose label counts, and ``UpStreamGather``
    # moves that choice ahead of the Cast that autocast puts in front of a loss. No kernel computes its gradient in
    # bfloat16 on the CPU ("Could not find an implementation for GatherGrad(1)"). A pair of nodes that only change the
    # shape stops it, as in `isolate_choices`.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    for node in model.graph.node:
        cast = facts.producers.get(node.input[0]) if node.op_type in LOSSES else None
        if cast is None or cast.op_type != "Cast":
            continue
        if facts.element_types.get(cast.input[0]) in {TensorProto.BFLOAT16, None}:
            node.input[0] = additions.apart(node, node.input[0], f"{node.output[0]}_isolated")
    return additions.apply()


def isolate_inputs(model: onnx.ModelProto) -> bool:
    """Put a pair of nodes between an input and what 1.19.2 cannot read it with; say whether the model changed."""
    # Where a node reads an input in need of a gradient twice, as in ``x * x``, both gradients get one name ("Duplicate
    # definition of name", ``gradient_graph_builder.cc``). Where a loss reads one, the optimizer that leaves out ignored
    # labels ends the process, since it looks for what has made the scores. The pair only changes the shape.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    inputs = {value.name for value in model.graph.input}
    for node in model.graph.node:
        read = [name for name in node.input if name in inputs and name in facts.differentiable]
        for name in dict.fromkeys(read):
            if read.count(name) == 1 and not (node.op_type in LOSSES and node.input[0] == name):
                continue
            apart = additions.apart(node, name, f"{node.output[0]}_apart_{name}")
            node.input[:] = [apart if one == name else one for one in node.input]
    return additions.apply()


def isolate_joined(model: onnx.ModelProto) -> bool:
    """Keep equal parts of a Concat apart that need no gradient, where another does; say whether the model changed."""
    # Its gradient is a Split with a result for each part, and 1.19.2 gives those of one part, such as the zeros on both
    # sides of what is padded, one name ("Duplicate definition of name"). An optimizer makes one of two that are
    # computed alike, and of pairs of one axis, too.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    for node in nodes_of(model, "Concat"):
        without = [place for place, name in enumerate(node.input) if name not in facts.differentiable]
        if node.output[0] not in facts.differentiable or len(without) == len(node.input):
            continue
        seen: list[tuple[str, str]] = []
        for place in without:
            name = node.input[place]
            producer = facts.producers.get(name)
            kind = (name, producer.op_type if producer is not None else name)
            equal = sum(kind[0] == other[0] or kind[1] == other[1] for other in seen)
            seen.append(kind)
            if equal:
                axis = (equal - 1) % (facts.ranks.get(name, 0) + 1)
                node.input[place] = additions.apart(node, name, f"{node.output[0]}_part{place}", axis)
    return additions.apply()


def isolate_quotients(model: onnx.ModelProto) -> bool:
    """Keep the CUDA build from joining a sum of two quotients; say whether the model changed."""
    # Its ``ScaledSumFusion`` makes one node of it, by names of dimensions that may stand for different sizes ("Shape of
    # input tensors must be the same", DeBERTa's two scores by position), and does so for a session on the CPU as well,
    # which has no kernel for it.
    if not provider():
        return False
    facts, additions = GraphFacts(model), GraphAdditions(model)
    for node in nodes_of(model, "Add"):
        if all(_is_quotient(facts, name) for name in node.input):
            node.input[0] = additions.apart(node, node.input[0], f"{node.output[0]}_quotient")
    return additions.apply()


def _is_quotient(facts: GraphFacts, name: str) -> bool:
    """Say whether a Div makes a value, perhaps with a sum with zero behind it, which 1.19.2 leaves out."""
    maker = facts.producers.get(name)
    if maker is None or maker.op_type != "Add":
        return maker is not None and maker.op_type == "Div"
    return any(
        facts.scalar(zero) == 0 and _is_quotient(facts, other)
        for zero, other in (tuple(maker.input), tuple(reversed(maker.input)))
    )


def isolate_ranges(model: onnx.ModelProto) -> bool:
    """Keep a choice of positions that may count down, or from the end, a Gather; say whether the model changed."""
    # ``GatherToSliceFusion`` of 1.19.2 makes a Slice of each Gather by a Range, and bounds of a Slice below zero mean
    # something else: ``x[:, torch.arange(n - 1, -1, -1)]`` chose nothing.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    for node in nodes_of(model, "Gather"):
        producer = facts.producers.get(facts.source(node.input[1], {"Cast", "Identity"}))
        if producer is None or producer.op_type != "Range":
            continue
        start, step = (facts.scalar(producer.input[index]) for index in (0, 2))
        if start is None or start < 0 or step is None or step < 0:
            node.input[1] = additions.apart(node, node.input[1], f"{node.output[0]}_positions")
    return additions.apply()


def isolate_readers(model: onnx.ModelProto) -> bool:
    """Put a pair of nodes between a choice of one place and those who read it; say whether the model changed."""
    # ``UpStreamGather`` of 1.19.2 moves such a choice ahead of what makes the tensor. Where that needs the dimension
    # that the choice takes away, it puts it back for the first reader only (``AdaptInputAndOutputForScalarSlice``): the
    # second reads a tensor of another shape, in silence where it broadcasts.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    readers = facts.readers
    for node in nodes_of(model, "Gather"):
        name = node.output[0]
        reading = readers.get(name, [])
        if len(reading) > 1 and facts.ranks.get(node.input[1]) == 0 and _needs_the_dimension(facts, node):
            apart = additions.apart(reading[0], name, f"{name}_read")
            for one in reading:
                one.input[:] = [apart if read == name else read for read in one.input]
    return additions.apply()


def _needs_the_dimension(facts: GraphFacts, choice: onnx.NodeProto) -> bool:
    """Say whether what makes the tensor computes something else without the dimension of a choice of one place."""
    name = facts.source(choice.input[0], {"Identity"})
    producer = facts.producers.get(name)
    if producer is None or producer.op_type not in {"Add", "Div"}:
        return producer is not None and producer.op_type in {"MatMul", "Transpose"}
    rank = facts.ranks.get(name, 0)
    axis = attributes_of(choice).get("axis", 0)
    behind = rank - axis if axis >= 0 else -axis  # counted from the last dimension
    shapes = [facts.shapes.get(one) for one in producer.input]
    return any(shape is None or (len(shape) >= behind and shape[-behind] == 1) for shape in shapes)


def _ends_a_broadcast(facts: GraphFacts, node: onnx.NodeProto) -> bool:
    """Say whether a node chooses along the last axis of the result of an operator whose operands differ in rank."""
    rank = facts.ranks.get(node.input[0], 0)
    producer = facts.producers.get(node.input[0])
    if producer is None or all(facts.ranks.get(name, 0) == rank for name in producer.input):
        return False
    if node.op_type == "Gather":
        axes: list[int] | None = [attributes_of(node).get("axis", 0)]
    else:
        _, _, _, *named = node.input
        axes = facts.vector(named[0]) if named else None
    return axes is None or any(axis in {-1, rank - 1} for axis in axes)
