"""Changes to a training graph before its session is made: what it hands over, and what is not to be recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import onnx
from onnx import TensorProto, helper

from ortlab.engine.passes.graph_edits import (
    NAMESPACE,
    GraphFacts,
    aten_operator,
    attributes_of,
    call_kernel,
    copied,
    declare_aten,
    has_inner_graphs,
    needed_nodes,
)

_YIELD: Final = "YieldOp"
_OWNING: Final = frozenset(
    """ATen MatMul FusedMatMul Gemm Conv Gather GatherElements GatherND Concat LayerNormalization
    SimplifiedLayerNormalization SoftmaxCrossEntropyLossInternal""".split()  # noqa: SIM905
)
"""Operators whose kernels, on each execution provider, take memory of their own for their outputs."""
_PRODUCTS: Final = frozenset(f"{NAMESPACE}::{name}" for name in ("matmul", "matmul_transposed"))
"""Kernels of PyTorch whose output is as large as its sum with a vector."""
_SUM_OF_TWO: Final = 2
OF: Final = "_of_"
"""In the name of a sum of the first parts of a gradient, in front of their number."""
_MATRIX: Final = 2


def hand_over(model: onnx.ModelProto, forward: onnx.ModelProto) -> None:
    """Give each output of the forward memory of its own, and keep GemmSumFusion from gradients that it stops at."""
    # Two faults of 1.19.2 stand at the YieldOp, where outputs go to the caller and their gradients to the backward.
    # Outputs: ORT's planner of memory lets an operator write its output over an input that nobody else reads
    # (``core/framework/allocation_planner.cc``, FindReusableInput), and a Reshape must. Such a tensor does not own its
    # memory: when the graph is done with it, in the backward, it is written over, although the caller has it. The
    # planner leaves out an operator whose output goes to YieldOp, but it looks at the first reader only. So ``hidden =
    # norm(x).relu(); return hidden, head(hidden)`` returned other numbers after ``backward()``. Gradients:
    # GemmSumFusion takes the number of an output for the number of an input, and stops the build at a Sum of a Gemm of
    # the third output of a node, or a later one, such as the gradient of what the forward returns third
    # (``core/optimizer/gemm_sum_fusion.cc``). The gradient graph is changed in place; one without a YieldOp stays as it
    # is. `forward` is the exported graph: it tells the types of outputs that shape inference has lost on the way.
    place = next((index for index, node in enumerate(model.graph.node) if node.op_type == _YIELD), None)
    if place is None:
        return
    _keep_from_fusion(model.graph)
    types = {value.name: value.type.tensor_type.elem_type for value in forward.graph.output}
    if _own_outputs(model, place, types):
        declare_aten(model)


def _own_outputs(model: onnx.ModelProto, place: int, types: Mapping[str, int]) -> bool:
    """Copy what would be returned in somebody else's memory, and say whether there was any."""
    nodes = model.graph.node
    facts = GraphFacts(model)
    read_before = {name for node in nodes[:place] if node.op_type != "Identity" for name in node.input}
    readers = Counter(name for node in nodes for name in node.input)
    changed = False
    for index, name in enumerate(nodes[place].input):
        source, last = name, facts.producers.get(name)
        made = last
        while made is not None and made.op_type == "Identity":
            source = made.input[0]
            made = facts.producers.get(source)
        if made is None or last is None or made.op_type in _OWNING or source not in read_before:
            continue
        changed = True
        element_type = facts.element_types.get(source) or facts.element_types.get(name) or types.get(name)
        if made.op_type == "Add":
            _let_torch_add(made, facts, readers)
            continue
        if last is made:
            last = helper.make_node("Identity", [name], [f"{name}_returned"], name=f"{name}_returned")
            nodes[place].input[index] = last.output[0]
            nodes.insert(place, last)
            place += 1
            last = nodes[place - 1]
        if element_type == TensorProto.BOOL:  # which cannot cross to PyTorch
            last.op_type = "And"
            last.input.append(last.input[0])
        else:
            call_kernel(last, "copy_of")
        if element_type and not facts.element_types.get(last.output[0]):
            value = helper.make_tensor_value_info(last.output[0], element_type, None)
            model.graph.value_info.append(value)
    return changed


def _let_torch_add(node: onnx.NodeProto, facts: GraphFacts, readers: Counter[str]) -> None:
    """Let PyTorch add, since ORT would write over an operand; a bias is added in the memory of the product."""
    for product, bias in (tuple(node.input), tuple(reversed(node.input))):
        made = facts.producers.get(product)
        if (
            made is not None
            and aten_operator(made) in _PRODUCTS
            and readers[product] == 1
            and facts.ranks.get(bias) == 1
            and len(facts.shapes.get(product, facts.shapes.get(node.output[0], ()))) > 1
        ):
            node.input[:] = [product, bias]
            call_kernel(node, "add_bias")
            return
    call_kernel(node, "add")


def _keep_from_fusion(graph: onnx.GraphProto) -> None:
    """Write the sums that the fusion stops at as Add, which it leaves alone."""
    late: set[str] = set()
    for node in graph.node:
        late.update(node.output if node.op_type == "Identity" and late & {*node.input} else node.output[2:])
    stopping = {
        name for node in graph.node if node.op_type == "Gemm" and late & {*node.input} for name in node.output
    }
    for node in graph.node:
        if node.op_type == "Sum" and len(node.input) == _SUM_OF_TWO and stopping & {*node.input}:
            node.op_type = "Add"


def mend_layer_gradients(model: onnx.ModelProto) -> None:
    """Let the backward of a layer of ours run whichever of its results and inputs take part in the training."""
    # A call has one definition of its gradient (``gradient_builder.cc``, GetExternalGradient). So ORT names gradients
    # of results that nothing reads, which are not there, and gives no name to results that nobody needs, which ``ATen``
    # cannot set. The model is changed in place.
    graph = model.graph
    there = {value.name for value in (*graph.input, *graph.initializer)}
    there |= {name for node in graph.node for name in node.output}
    for node in graph.node:
        if not aten_operator(node).startswith(f"{NAMESPACE}::"):
            continue
        if not there.issuperset(node.input):
            node.input[:] = [name if name in there else "" for name in node.input]
        for index, name in enumerate(node.output):
            if not name:
                node.output[index] = f"{node.name}_unread_{index}"
                typed = helper.make_tensor_value_info(node.output[index], TensorProto.FLOAT, None)
                graph.value_info.append(typed)


def drop_empty_sums(model: onnx.ModelProto) -> None:
    """Take sums out of a gradient graph, changed in place, that sum over no axis, whatever the sizes of a batch."""
    # The gradient of an operand is summed over the axes in which it was broadcast. Where ORT does not know all sizes it
    # asks for these axes in each step (``BroadcastGradientArgs``), and copies where there are none. But a product is
    # never broadcast by a bias of its width, and nothing by a single number; that needs no size of a batch.
    graph, facts = model.graph, GraphFacts(model)
    if has_inner_graphs(graph):
        return
    widths = _widths(graph, facts)
    outputs = {value.name for value in graph.output}
    same: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
        if _sums_nothing(node, facts, widths) and node.output[0] not in outputs:
            same[node.output[0]] = node.input[0]
        else:
            nodes.append(copied(node))
    if same:
        del graph.node[:]
        graph.node.extend(nodes)


def _sums_nothing(node: onnx.NodeProto, facts: GraphFacts, widths: Mapping[str, int]) -> bool:
    if node.op_type != "ReduceSum" or attributes_of(node).get("noop_with_empty_axes") != 1:
        return False
    axes = facts.producers.get(node.input[1]) if len(node.input) > 1 else None
    if axes is None or axes.op_type != "BroadcastGradientArgs":
        return False
    shapes = [facts.producers.get(name) for name in axes.input]
    own, other = shapes if node.input[1] == axes.output[0] else reversed(shapes)
    if own is None or other is None or {own.op_type, other.op_type} != {"Shape"}:
        return False
    shape = facts.shapes.get(other.input[0])
    return shape == () or (shape is not None and shape == (widths.get(own.input[0]),))


def _widths(graph: onnx.GraphProto, facts: GraphFacts) -> dict[str, int]:
    """Return the last dimension of values where it is a number; the others need not be known."""
    widths = {}
    for value in (*graph.input, *graph.value_info):
        dimensions = value.type.tensor_type.shape.dim
        if dimensions and dimensions[-1].dim_value:
            widths[value.name] = dimensions[-1].dim_value
    for node in graph.node:
        right = facts.shapes.get(node.input[1], ()) if node.op_type == "MatMul" else ()
        if len(right) == _MATRIX and isinstance(right[1], int):
            widths[node.output[0]] = right[1]
    return widths


def drop_expansions(model: onnx.ModelProto) -> None:
    """Let products of a gradient graph, changed in place, broadcast what is copied to the shape of the other factor."""
    # So is the gradient of each sum and mean, and mostly to be multiplied. The forward stays as plans know it.
    graph, facts = model.graph, GraphFacts(model)
    if has_inner_graphs(graph):
        return
    place = next((index for index, node in enumerate(graph.node) if node.op_type == _YIELD), len(graph.node))
    changed = False
    for node in graph.node[place:]:
        if node.op_type != "Mul" or node.domain:
            continue
        for index, name in enumerate(node.input):
            expand = facts.producers.get(name)
            if expand is not None and expand.op_type == "Expand":
                shape = facts.producers.get(expand.input[1])
                if shape is not None and _is_shape_of(shape, node.input[1 - index], facts):
                    node.input[index] = expand.input[0]
                    changed = True
                    break  # else both factors could be copies of smaller ones
    if changed:
        outputs = {value.name for value in graph.output}
        nodes = [copied(node) for node in needed_nodes(graph.node, outputs)]
        del graph.node[:]
        graph.node.extend(nodes)


def _is_shape_of(shape: onnx.NodeProto, name: str, facts: GraphFacts) -> bool:
    if shape.op_type != "Shape" or any(attributes_of(shape).values()):  # of some of the axes
        return False
    source = shape.input[0]
    known = facts.shapes.get(source)
    return source == name or (known is not None and None not in known and known == facts.shapes.get(name))


_AT_ONCE: Final = 4
"""Parts of a gradient that an attention makes right behind one another: of query, key, value and what goes past it."""


def add_one_by_one(model: onnx.ModelProto) -> None:
    """Let the parts of a gradient be added as they come, two at a time; the gradient graph is changed in place."""
    # ORT adds all parts in one Sum, and keeps each of them up to there: for what an encoder hands to the six layers of
    # a decoder, twelve tensors of its size. PyTorch adds each to those before. A part comes the later, the longer the
    # longest way to it is.
    graph = model.graph
    if not any(map(_is_long_sum, graph.node)):
        return
    types = {value.name: value for value in (*graph.value_info, *graph.output)}
    way: dict[str, int] = {}
    backward: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == _YIELD or not backward.isdisjoint(node.input):
            backward.update(node.output)
        length = 1 + max((way.get(name, 0) for name in node.input), default=0)
        way.update(dict.fromkeys(node.output, length))
        if not _is_long_sum(node) or node.output[0] not in backward:
            nodes.append(copied(node))
            continue
        latest = sorted(node.input, key=lambda name: way.get(name, 0), reverse=True)
        first, result = latest.pop(), node.output[0]
        for number, part in enumerate(reversed(latest), 2):
            total = result if number == len(node.input) else f"{result}{OF}{number}"
            nodes.append(helper.make_node("Sum", [first, part], [total], name=f"{node.name}{OF}{number}"))
            if total != result and result in types:
                typed = graph.value_info.add()
                typed.CopyFrom(types[result])
                typed.name = total
            first = total
    del graph.node[:]
    graph.node.extend(nodes)


def _is_long_sum(node: onnx.NodeProto) -> bool:
    return node.op_type == "Sum" and not node.domain and len(node.input) > _AT_ONCE


def add_in_threads(model: onnx.ModelProto) -> None:
    """Write the sums behind the YieldOp of a gradient graph, changed in place, as Add; the bits are the same."""
    # ORT's Sum adds on one thread (``core/providers/cpu/math/element_wise_ops.cc``, Sum_8), and takes memory for the
    # result; Add may write it over what nobody reads any more. One of a Gemm, perhaps transposed, and another value
    # stays, since ORT makes one node of both (GemmSumFusion).
    graph, facts = model.graph, GraphFacts(model)
    place = next((index for index, node in enumerate(graph.node) if node.op_type == _YIELD), len(graph.node))
    nodes = [copied(node) for node in graph.node[:place]]
    for node in graph.node[place:]:
        if node.op_type != "Sum" or node.domain or _goes_into_a_gemm(node, facts):
            nodes.append(copied(node))
            continue
        first, *others = node.input
        if not others:  # a sum of one
            nodes.append(helper.make_node("Identity", [first], list(node.output), name=node.name))
        for number, other in enumerate(others, 2):
            is_last = number == len(node.input)
            total = node.output[0] if is_last else f"{node.output[0]}{OF}{number}"
            name = node.name if is_last else f"{node.name}{OF}{number}"
            nodes.append(helper.make_node("Add", [first, other], [total], name=name))
            first = total
    del graph.node[:]
    graph.node.extend(nodes)


def _goes_into_a_gemm(node: onnx.NodeProto, facts: GraphFacts) -> bool:
    parts = [
        facts.source(name, {"Identity", "Transpose"})
        for name in node.input
        if facts.only_reader(name) is node
    ]
    makers = [facts.producers.get(name) for name in parts if facts.only_reader(name) is not None]
    return len(node.input) == _SUM_OF_TWO and any(one is not None and one.op_type == "Gemm" for one in makers)


def leave_short_sums(model: onnx.ModelProto) -> None:
    """Let PyTorch compute the sums of float16 and bfloat16 in a typed gradient graph, which is changed in place."""
    facts = GraphFacts(model)
    for node in model.graph.node:
        if (
            node.op_type != "Sum"
            or node.domain
            or facts.element_types.get(node.output[0]) not in {TensorProto.BFLOAT16, TensorProto.FLOAT16}
        ):
            continue
        call_kernel(node, "sum_of")
        declare_aten(model)


# --- values that the memory optimizer shall leave alone -----------------------------------------------------------

HIDING: Final = "PassThrough"
"""ORT's operator that returns its inputs, in the same memory (``pass_through.cc``); on the CPU and on CUDA."""

_DOMAIN: Final = "com.microsoft"
_SUFFIX: Final = "_to_keep"


def leaving_alone(model: onnx.ModelProto, kept: Iterable[Sequence[str]]) -> tuple[onnx.ModelProto, list[str]]:
    """Copy a training graph, before its session is made, so that the results in `kept` cannot be recomputed."""
    # The memory optimizer of 1.19.2 applies a plan in all places of its cluster or in none: it reads a count, compares
    # it with a number of places that it has counted to one only (``optimization_planner.cc``,
    # ``FinalizeNodePlansFromUserConfig``), and recomputes everywhere for any count but 0, for which it leaves out the
    # last place. So a place that is not to be recomputed is made one that it cannot recompute: its results go through a
    # node that hands its inputs on as they are, without a copy, and that is not in the list of what it may repeat.
    # `kept` lists them by node. Returns the copy, and those of the results that no node of the graph makes.
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    graph = copied.graph
    wanted = {output for outputs in kept for output in outputs}
    types = {value.name: value for value in graph.value_info}
    # ORT lets nothing that the model returns lie in the memory of another value (``allocation_planner.cc``,
    # ``FindReusableInput``): handed on by that node, it would be an error. So the caller gets the result itself, also
    # through Identity nodes, which ORT leaves out, and all others get what is handed on.
    returned: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type == _YIELD or (node.op_type == "Identity" and node.output[0] in returned):
            returned.update(node.input)
    handed_on: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != _YIELD and returned.isdisjoint(
            node.output[:1] if node.op_type == "Identity" else ()
        ):
            node.input[:] = [handed_on.get(name, name) for name in node.input]
        nodes.append(node)
        made = [output for output in node.output if output]
        if wanted.isdisjoint(made):
            continue
        wanted.difference_update(made)
        # All results go through one node: what only backward reads would otherwise be handed on there, too late.
        before = [one if one in returned else one + _SUFFIX for one in made]
        after = [one + _SUFFIX if one in returned else one for one in made]
        handed_on |= {one: one + _SUFFIX for one in made if one in returned}
        node.output[:] = [one and one + _SUFFIX * (one not in returned) for one in node.output]
        for one in made:
            if one in types:
                graph.value_info.add(name=one + _SUFFIX, type=types[one].type)
        name = f"{node.name or made[0]}{_SUFFIX}"
        nodes.append(helper.make_node(HIDING, before, after, name=name, domain=_DOMAIN))
    del graph.node[:]
    graph.node.extend(nodes)
    return copied, sorted(wanted)


class GraphInfo:
    """ORT's facts about a gradient graph, of which some are replaced."""

    def __init__(self, info: Any, **replaced: Any) -> None:
        self._info = info
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)
