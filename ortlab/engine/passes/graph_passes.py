"""Changes to an exported graph before onnxruntime 1.19.2 derives its gradient.

Each pass takes a model and says whether it changed it. They run where ORTModule infers the shapes of an export
(``_graph_transition_manager.GraphTransitionManager._infer_shapes``), on the copy that the gradient graph is built
from; the export itself stays as torch made it.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Final

from onnx import TensorProto, defs, helper

from ortlab.engine.operators.gradients import call_text, note_call_gradients, set_call
from ortlab.engine.operators.torch_calls import draws, parsed
from ortlab.engine.passes.chunked_loss import chunk_losses
from ortlab.engine.passes.graph_edits import (
    ATEN,
    FLOAT_TYPES,
    NEEDING_GRADIENT,
    STOP,
    GraphAdditions,
    GraphFacts,
    aten_operator,
    attributes_of,
    call_kernel,
    nodes_of,
)
from ortlab.engine.passes.isolation import (
    isolate_choices,
    isolate_inputs,
    isolate_joined,
    isolate_losses_of_bfloat16,
    isolate_quotients,
    isolate_ranges,
    isolate_readers,
    level_operands,
)
from ortlab.engine.passes.rms_norms import join_rms_norms
from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

_NEWER: Final = 17

_OLDER: Final = 16

_ORT_HAD_IT: Final = "LayerNormalization"

# The inputs of operators that have a gradient, where one of them may be a constant that ortlab has put there.
_GRADIENT_INPUTS: Final = {
    "convolution": (0, 1, 2),
    "_scaled_dot_product_efficient_attention": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "LayerNormalization": (0, 1, 2),
    "index_add": (0, 3),
    "ortlab::grouped_linear": (0, 1),
    "native_batch_norm": (0, 1, 2),
    "native_group_norm": (0, 1, 2),
    "ortlab::instance_norm": (0, 1, 2),
    "scatter_add": (0, 3),
}


_ONTO_CONSTANTS: Final = {"index_add": "index_add_to", "scatter_add": "scatter_add_to"}
"""Kernels that take what is added first, and then what it is added to, as zeros: that one has no gradient."""


_MEETING: Final = ("Add", "Sub", "Mul", "Div", "MatMul", "Expand")
"""Operators whose gradients sum over the dimensions that were broadcast."""


def install() -> None:
    """Run the passes of this module on each export. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_post_export_process", _ask_only_for_gradients_that_exist)
    replace(GraphTransitionManager, "_infer_shapes", _run_passes)


def _ask_only_for_gradients_that_exist(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphTransitionManager._post_export_process``, which asks for the gradient of each parameter."""
    # The gradient builder fails if one of them does not influence the outputs differentiably; torch leaves its gradient
    # None.

    def post_export_process(*args: Any, **kwargs: Any) -> Any:
        token = NEEDING_GRADIENT.set(
            frozenset(kwargs["exported_model_info"].onnx_graph_input_names_require_grad)
        )
        try:
            info = original(*args, **kwargs)
        finally:
            NEEDING_GRADIENT.reset(token)
        reached = GraphFacts(info._post_export_processed_model).leading_out
        for names in (
            info.onnx_graph_input_names_require_grad,
            info.onnx_graph_input_names_require_grad_user_defined,
        ):
            names[:] = [name for name in names if name in reached]
        return info

    return post_export_process


def _run_passes(original: Callable[[onnx.ModelProto], onnx.ModelProto]) -> Callable[..., onnx.ModelProto]:
    def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
        keep_constant_outputs(model)
        complete_dropouts(model)
        keep_reduced_dimensions(model)
        model = original(model)
        # These read shapes and types, so they come after the first inference; what they add is inferred by a second.
        passes = (
            join_rms_norms,
            chunk_losses,
            lift_vector_products,
            slice_partly_used_splits,
            isolate_choices,
            isolate_readers,
            level_operands,
            isolate_losses_of_bfloat16,
            isolate_inputs,
            isolate_joined,
            isolate_ranges,
            isolate_quotients,
            broadcast_where,
            tie_gradient_inputs,
            order_draws,
        )
        changed = [change(model) for change in passes]
        if any(changed):
            model = original(model)
        forget_needless_nodes(model)
        note_call_gradients(model)
        forget_unlike_shapes(model)
        declare_opset_16(model)
        keep_needed_stops(model)
        return model

    return infer_shapes


def order_draws(model: onnx.ModelProto) -> bool:
    """Let each call of torch that draws numbers wait for the one before it; say whether the model changed."""
    # ONNX Runtime runs what does not depend on each other in an order of its own, and for the same seed each draw would
    # get the numbers of another one.
    drawing = [
        node for node in model.graph.node if (text := call_text(node)) and draws(aten_operator(node), text)
    ]
    for before, node in pairwise(drawing):
        call = parsed(call_text(before))
        if not call.random:
            drawn = helper.make_tensor_value_info(f"{before.output[0]}_drawn", TensorProto.UINT8, [1])
            before.output.append(drawn.name)
            model.graph.value_info.append(drawn)  # an inference that stops early would not come to it
            set_call(before, dataclasses.replace(call, awaited=True))
        node.input.append(before.output[-1])
        set_call(node, dataclasses.replace(parsed(call_text(node)), waits=True))
    return len(drawing) > 1


def keep_constant_outputs(model: onnx.ModelProto) -> bool:
    """Let torch copy each output that is computed from constants alone; say whether the model changed."""
    # ONNX Runtime folds constants before it builds a gradient, and what is folded into an output, such as a mask or a
    # table of positions, has no node any more: the constructor of GradientGraphBuilder in 1.19.2
    # (``gradient_graph_builder.cc``) then stops with "couldn't find the producer node, and it's not a graph input". A
    # copy that torch makes is not folded.
    graph = model.graph
    variable = {value.name for value in graph.input}
    for node in graph.node:
        if (
            node.domain
            or not variable.isdisjoint(node.input)
            or any(one.HasField("g") for one in node.attribute)
        ):
            variable.update(node.output)
    types = {value.name: value.type for value in graph.output}
    additions = GraphAdditions(model)
    for node in nodes_of(model, "Identity"):
        if node.output[0] in types and node.output[0] not in variable:
            _copy(model, additions, node, types[node.output[0]])
    return additions.apply()


def _copy(
    model: onnx.ModelProto, additions: GraphAdditions, node: onnx.NodeProto, kind: onnx.TypeProto
) -> None:
    """Let torch copy what a node passes on; booleans cross as bytes (see `torch_calls`)."""
    (source,), (output,) = node.input, node.output
    copied, element_type = f"{output}_copy", kind.tensor_type.elem_type
    is_boolean = element_type == TensorProto.BOOL
    if is_boolean:
        source = additions.node(node, "Cast", [source], f"{output}_bytes", to=TensorProto.UINT8)
    additions.node(node, "ATen", [source], copied, domain=ATEN, operator="clone")
    if is_boolean:
        additions.node(node, "Cast", [copied], output, to=TensorProto.BOOL)
        additions.drop(node)
    else:
        node.input[0] = copied
    # ORT has to be told the type of an ATen node's output.
    shape = [size.dim_value if size.HasField("dim_value") else None for size in kind.tensor_type.shape.dim]
    carried = TensorProto.UINT8 if is_boolean else element_type
    model.graph.value_info.append(helper.make_tensor_value_info(copied, carried, shape))


def complete_dropouts(model: onnx.ModelProto) -> bool:
    """Give each Dropout its `training_mode` input and its mask output; say whether the model changed."""
    # Torch exports the dropout inside scaled dot product attention (``symbolic_opset14``) as ``Dropout(x, p)``. Without
    # `training_mode` ONNX's Dropout lets everything pass, so the model silently trains without that dropout; without a
    # mask there is no gradient. The functional form drops in training and in eval alike, as torch does.
    incomplete = [
        node
        for node in nodes_of(model, "Dropout")
        if len(node.input) < 3 or len(node.output) < 2  # noqa: PLR2004
    ]
    additions = GraphAdditions(model)
    for node in incomplete:
        if len(node.input) == 1:
            node.input.append("")  # the ratio: ONNX's default
        if len(node.input) == 2:  # noqa: PLR2004
            node.input.append(
                additions.scalar(node, f"{node.output[0]}_training", TensorProto.BOOL, value=True)
            )
        if len(node.output) == 1:
            node.output.append(f"{node.output[0]}_mask")
    additions.apply()
    return bool(incomplete)


def broadcast_where(model: onnx.ModelProto) -> bool:
    """Expand the branches of a Where that need a gradient to its output's shape; say whether the model changed."""
    # The gradient of Where in 1.19.2 (``orttraining/core/graph/gradient_builder.cc``, GetWhereGradient) has the shape
    # of the output and is not summed over broadcast dimensions. The gradient of Expand is, so the broadcast is left to
    # an Expand to the shape of the other branch and one to the shape of the condition: three shapes broadcast together
    # are the shape of the output, whichever of them spans it.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    for node in nodes_of(model, "Where"):
        if facts.element_types.get(node.output[0]) not in FLOAT_TYPES:
            continue
        condition, *branches = node.input
        for index, branch in enumerate(branches):
            shape = facts.shapes.get(branch)
            if branch not in facts.differentiable or (shape and shape == facts.shapes.get(node.output[0])):
                continue
            wide = branch
            for like in (branches[1 - index], condition):
                name = f"{node.output[0]}_branch{index}_like_{like}"
                size = additions.node(node, "Shape", [like], f"{name}_shape")
                wide = additions.node(node, "Expand", [wide, size], name)
            node.input[1 + index] = wide
    return additions.apply()


def forget_needless_nodes(model: onnx.ModelProto) -> None:
    """Make an Identity of each Cast to the type that its input has, and of each Concat of a single value."""
    # ORT's PropagateCastOps removes such casts, too, but stops the build where a node reads the result twice ("Argument
    # mismatch when removing edge", ``core/optimizer/propagate_cast_ops.cc``), as in the gated delta rule of Qwen3-Next.
    # A cache of keys and values that was empty is put together of one value in each layer, and so is its gradient.
    facts = GraphFacts(model)
    for node in nodes_of(model, "Cast", "Concat"):
        is_cast = node.op_type == "Cast"
        if len(node.input) == 1 and not (
            is_cast and facts.element_types.get(node.input[0]) != attributes_of(node)["to"]
        ):
            node.op_type = "Identity"
            del node.attribute[:]


def forget_unlike_shapes(model: onnx.ModelProto) -> None:
    """Forget the shape of values with dimensions that meet another one and may be 1."""
    # The gradients of Add, Sub, Mul, Div, MatMul and Expand in 1.19.2 (``gradient_builder_base.cc``,
    # ComputeBroadcastBackwardAxes) take two dimensions with symbols for equal: ``x * adaptive_avg_pool2d(x, 1)``, as in
    # each squeeze-and-excitation block, then gets wrong gradients, and reads beyond its buffers. Where a shape is not
    # known they look at the sizes at run time.
    facts = GraphFacts(model)
    given = {size for value in model.graph.input for size in facts.shapes.get(value.name, ())}
    unlike: set[int | str | None] = set()
    for node in nodes_of(model, *_MEETING):
        met = (node.input[0], node.output[0] if node.op_type == "Expand" else node.input[1])
        last = (
            -2 if node.op_type == "MatMul" else None
        )  # the last two dimensions of a product do not broadcast
        left, right = (reversed(facts.shapes.get(name, ())[:last]) for name in met)
        for pair in zip(left, right, strict=False):
            if pair[0] != pair[1] and all(isinstance(size, str) for size in pair):
                unlike.update(pair)
    unlike -= given
    for value in model.graph.value_info:
        if not unlike.isdisjoint(facts.shapes.get(value.name, ())):
            value.type.tensor_type.ClearField("shape")


def tie_gradient_inputs(model: onnx.ModelProto) -> bool:
    """Let all inputs of an operator with several gradients need theirs, or none; say whether the model changed."""
    # GetExternalGradient of 1.19.2 (``orttraining/core/graph/gradient_builder.cc``) looks at the wrong input when one
    # of them needs no gradient, such as the image that a model's first layer gets or a kernel that is a buffer: the
    # build ends in "... is not a valid intermediate output" or the backward in "invalid index -1". LayerNormalization
    # defines the gradient of a constant bias once for each layer that shares it. Such an input gets a zero added that
    # depends on a parameter that needs a gradient. Where chooses the zero, so that an infinite weight stays without
    # influence. What rows or entries are added to is mostly zeros, as large as the result: there another kernel helps.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    smallest = _smallest_sources(model, facts)
    given = {value.name for value in model.graph.input}
    changed = False
    for node in model.graph.node:
        kernel = _ONTO_CONSTANTS.get(aten_operator(node))
        if kernel is not None and node.input[0] not in facts.differentiable:
            total, axis, places, added, *_ = node.input
            node.input[:] = [added, total, axis, places]
            call_kernel(node, kernel)
            changed = True
            continue
        inputs = {
            index: node.input[index]
            for index in _GRADIENT_INPUTS.get(aten_operator(node) or node.op_type, ())
        }
        source = next((name for name in inputs.values() if name in facts.differentiable), None)
        if source is None:
            continue
        if facts.element_types.get(smallest.get(source, "")) == facts.element_types[source]:
            source = smallest[source]
        # A frozen weight of one layer alone gets a gradient that nobody reads.
        alone = node.op_type == "LayerNormalization"
        tied = {
            index: name
            for index, name in inputs.items()
            if name
            and name not in facts.differentiable
            and not (alone and name in given and facts.only_reader(name) is node)
        }
        if not tied:
            continue
        stem = f"{node.output[0]}_tied"
        never = additions.scalar(node, f"{stem}_never", TensorProto.BOOL, value=False)
        zero = additions.scalar(node, f"{stem}_zero", facts.element_types[source], value=0)
        total = additions.node(node, "ReduceSum", [source], f"{stem}_sum", keepdims=0)
        nothing = additions.node(node, "Where", [never, total, zero], f"{stem}_nothing")
        for index, name in tied.items():
            node.input[index] = additions.node(node, "Add", [name, nothing], f"{stem}{index}")
    return additions.apply() or changed


def _smallest_sources(model: onnx.ModelProto, facts: GraphFacts) -> dict[str, str]:
    """Return by value the smallest input of fixed size that a gradient of it goes to."""
    # No other input would do: one that no gradient comes to would get zeros instead of none.
    sizes: dict[str, int] = {}
    for value in model.graph.input:
        shape = facts.shapes.get(value.name)
        fixed = [size for size in shape or () if isinstance(size, int)]
        if shape is not None and len(fixed) == len(shape) and value.name in facts.differentiable:
            sizes[value.name] = prod(fixed)
    found = {name: name for name in sizes}
    for node in model.graph.node:
        sources = [found[name] for name in node.input if name in found]
        if not sources or aten_operator(node) == STOP:
            continue
        source = min(sources, key=sizes.__getitem__)
        found |= {name: source for name in node.output if name in facts.differentiable}
    return found


def lift_vector_products(model: onnx.ModelProto) -> bool:
    """Give the vectors in a MatMul a second dimension; say whether the model changed."""
    # The gradient of MatMul in 1.19.2 (``gradient_builder.cc``, GetMatMulGradient) takes its operands for matrices; a
    # vector's gradient fails when it runs, or has another shape.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    for node in nodes_of(model, "MatMul"):
        vectors = [index for index, name in enumerate(node.input) if facts.ranks.get(name) == 1]
        if not vectors:
            continue
        stem = f"{node.output[0]}_lifted"
        operands = list(node.input)
        for index in vectors:  # a row on the left, a column on the right
            axis = additions.vector(node, f"{stem}_axis{index}", [index])
            operands[index] = additions.node(node, "Unsqueeze", [operands[index], axis], f"{stem}{index}")
        product = additions.node(node, "MatMul", operands, stem)
        axes = additions.vector(node, f"{stem}_axes", [index - 2 for index in vectors])
        additions.node(node, "Squeeze", [product, axes], node.output[0])
        additions.drop(node)
    return additions.apply()


def keep_reduced_dimensions(model: onnx.ModelProto) -> bool:
    """Let ReduceL2 and ReduceLogSumExp keep their axes, and remove these afterwards; say whether the model changed."""
    # Their gradients in 1.19.2 (``gradient_builder.cc``, GetReduceL2Gradient, GetReduceLogSumExpGradient) put the
    # dimensions back with an Unsqueeze of an opset before 13, which is no valid node.
    additions = GraphAdditions(model)
    for node in nodes_of(model, "ReduceL2", "ReduceLogSumExp"):
        attributes = attributes_of(node)
        if attributes.get("keepdims", 1):
            continue
        stem = f"{node.output[0]}_kept"
        axes = attributes.get("axes")
        kept = {} if axes is None else {"axes": axes}
        reduced = additions.node(node, node.op_type, list(node.input), stem, keepdims=1, **kept)
        if axes is None:
            scalar = additions.vector(node, f"{stem}_shape", [])
            additions.node(node, "Reshape", [reduced, scalar], node.output[0])
        else:
            which = additions.vector(node, f"{stem}_axes", axes)
            additions.node(node, "Squeeze", [reduced, which], node.output[0])
        additions.drop(node)
    return additions.apply()


def declare_opset_16(model: onnx.ModelProto) -> bool:
    """Declare opset 16 where only layer normalisations need opset 17; say whether the model changed."""
    # They then mean ORT's own operator, which computes the same, with the same kernels. The shapes have to be inferred
    # before.
    declared = next((one for one in model.opset_import if not one.domain), None)
    if declared is None or declared.version != _NEWER:
        return False
    operators = {node.op_type for node in model.graph.node if not node.domain}
    if _ORT_HAD_IT not in operators or not all(_is_older(name) for name in operators - {_ORT_HAD_IT}):
        return False
    declared.version = _OLDER
    return True


def _is_older(operator: str) -> bool:
    """Say whether an operator means the same in both opsets; those that ONNX does not know are ORT's own."""
    return not defs.has(operator) or bool(defs.get_schema(operator, _NEWER).since_version <= _OLDER)


def keep_needed_stops(model: onnx.ModelProto) -> None:
    """Drop each stop through which no gradient would flow, and double those on an input that needs one."""
    # The constructor of GradientGraphBuilder in 1.19.2 (``orttraining/core/framework/gradient_graph_builder.cc``)
    # differentiates each node that reads an input in need of a gradient, also a stop, which has no gradient.
    differentiable = GraphFacts(model).differentiable
    inputs = {value.name for value in model.graph.input}
    additions = GraphAdditions(model)
    for node in model.graph.node:
        if aten_operator(node) != STOP:
            continue
        if node.input[0] not in differentiable:
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
        elif node.input[0] in inputs:
            first = f"{node.output[0]}_first"
            for known in [value for value in model.graph.value_info if value.name == node.output[0]]:
                model.graph.value_info.add().CopyFrom(known)
                model.graph.value_info[-1].name = first
            node.input[0] = additions.node(node, "ATen", [node.input[0]], first, domain=ATEN, operator=STOP)
    additions.apply()


def slice_partly_used_splits(model: onnx.ModelProto) -> bool:
    """Turn a Split into Slices where not all of its outputs lead to an output; say whether the model changed."""
    # The gradient of Split in 1.19.2 (``gradient_builder.cc``, GetSplitGradient) joins the gradients that it gets and
    # leaves out the others, where zeros belong: the result has a wrong shape, or values in the wrong place.
    facts, additions = GraphFacts(model), GraphAdditions(model)
    for node in nodes_of(model, "Split"):
        used = [index for index, name in enumerate(node.output) if name in facts.leading_out]
        if not used or len(used) == len(node.output) or len(node.input) == 1:
            continue
        axis = attributes_of(node).get("axis", 0)
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
