"""Changes to an exported graph before onnxruntime 1.19.2 derives its gradient.

Each pass takes a model and says whether it changed it. They run where ORTModule infers the shapes of an export
(``_graph_transition_manager.GraphTransitionManager._infer_shapes``), on the copy that the gradient graph is built
from; the export itself stays as torch made it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import onnx
from onnx import TensorProto, helper

from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

_FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})

# How many of an ATen operator's inputs, counted from the first, have a gradient.
_GRADIENT_INPUTS: Final = {"convolution": 3, "native_batch_norm": 3, "native_group_norm": 3}

_needing_gradient: ContextVar[frozenset[str] | None] = ContextVar("needing_gradient", default=None)

_Shape: TypeAlias = tuple[int | str | None, ...]


def install() -> None:
    """Run the passes of this module on each export. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_post_export_process", _note_what_needs_gradient)
    replace(GraphTransitionManager, "_infer_shapes", _run_passes)


def complete_dropouts(model: onnx.ModelProto) -> bool:
    """Give each Dropout its `training_mode` input and its mask output.

    Torch exports the dropout inside scaled dot product attention (``symbolic_opset14``) as ``Dropout(x, p)``. Without
    `training_mode` ONNX's Dropout lets everything pass, so the model trains without that dropout and nobody is told;
    without a mask there is no gradient. The functional form drops in training and in eval alike, as torch does.

    Returns
    -------
    bool
        Whether the model changed.
    """
    incomplete = [
        node
        for node in model.graph.node
        if node.op_type == "Dropout" and not node.domain and (len(node.input) < 3 or len(node.output) < 2)  # noqa: PLR2004
    ]
    additions = _Additions(model)
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
    """Expand the branches of a Where to the shape of its output, where they need a gradient.

    The gradient of Where in 1.19.2 (``orttraining/core/graph/gradient_builder.cc``, GetWhereGradient) has the shape
    of the output and is not summed over broadcast dimensions. The gradient of Expand is, so the broadcast is left to
    an Expand to the shape of the other branch and one to the shape of the condition: three shapes broadcast
    together are the shape of the output, whichever of them spans it.

    Returns
    -------
    bool
        Whether the model changed.
    """
    facts, additions = _Facts(model), _Additions(model)
    for node in model.graph.node:
        if node.op_type != "Where" or node.domain or facts.element_types.get(node.output[0]) not in _FLOATS:
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


def tie_gradient_inputs(model: onnx.ModelProto) -> bool:
    """Let all inputs of an ATen operator with several gradients need theirs, or none.

    GetExternalGradient of 1.19.2 (``orttraining/core/graph/gradient_builder.cc``) looks at the wrong input when one
    of them needs no gradient, such as the image that a model's first layer gets or a kernel that is a buffer: the build
    ends in "... is not a valid intermediate output" or the backward in "invalid index -1". Such an input gets a zero
    added that depends on one that needs a gradient. Where chooses the zero, so that an infinite weight stays without
    influence.

    Returns
    -------
    bool
        Whether the model changed.
    """
    facts, additions = _Facts(model), _Additions(model)
    for node in model.graph.node:
        inputs = list(node.input)[: _GRADIENT_INPUTS.get(_operator(node), 0)]
        source = next((name for name in inputs if name in facts.differentiable), None)
        if source is None:
            continue
        for index, name in enumerate(inputs):
            if name and name not in facts.differentiable:
                stem = f"{node.output[0]}_tied{index}"
                element_type = facts.element_types[source]
                never = additions.scalar(node, f"{stem}_never", TensorProto.BOOL, value=False)
                zero = additions.scalar(node, f"{stem}_zero", element_type, value=0)
                total = additions.node(node, "ReduceSum", [source], f"{stem}_sum", keepdims=0)
                nothing = additions.node(node, "Where", [never, total, zero], f"{stem}_nothing")
                node.input[index] = additions.node(node, "Add", [name, nothing], stem)
    return additions.apply()


# --- where the passes run --------------------------------------------------------------------------------------


def _note_what_needs_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_export_process(*args: Any, **kwargs: Any) -> Any:
        token = _needing_gradient.set(
            frozenset(kwargs["exported_model_info"].onnx_graph_input_names_require_grad)
        )
        try:
            return original(*args, **kwargs)
        finally:
            _needing_gradient.reset(token)

    return post_export_process


def _run_passes(original: Callable[[onnx.ModelProto], onnx.ModelProto]) -> Callable[..., onnx.ModelProto]:
    def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
        complete_dropouts(model)
        model = original(model)
        # The two passes below read shapes and types, so they come after the first inference; what they add is
        # inferred by a second one.
        if any([broadcast_where(model), tie_gradient_inputs(model)]):
            model = original(model)
        return model

    return infer_shapes


# --- what is known about the values of a graph -----------------------------------------------------------------


class _Facts:
    """Shapes, element types and differentiability of the values of a graph.

    Attributes
    ----------
    shapes : dict
        Shape per value, where every dimension is known as a number or by its symbol.
    element_types : dict
        ONNX element type per value.
    differentiable : set
        Values through which a gradient may flow to a parameter or to an input that needs one. A value whose type
        is not known counts as a float.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.shapes: dict[str, _Shape] = {}
        self.element_types: dict[str, int] = {}
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            self.element_types[value.name] = tensor.elem_type
            if tensor.HasField("shape"):
                sizes = tuple(
                    size.dim_param or (size.dim_value if size.HasField("dim_value") else None)
                    for size in tensor.shape.dim
                )
                if None not in sizes:
                    self.shapes[value.name] = sizes
        for initializer in graph.initializer:
            self.shapes[initializer.name] = tuple(initializer.dims)
            self.element_types[initializer.name] = initializer.data_type
        needing = _needing_gradient.get()
        inputs = {value.name for value in graph.input}
        self.differentiable = {
            name for name in (inputs if needing is None else needing) if self._is_float(name)
        }
        for node in graph.node:  # in topological order, as ONNX demands
            if not self.differentiable.isdisjoint(node.input):
                self.differentiable.update(name for name in node.output if name and self._is_float(name))

    def _is_float(self, name: str) -> bool:
        return self.element_types.get(name, TensorProto.FLOAT) in _FLOATS | {TensorProto.UNDEFINED}


def _operator(node: onnx.NodeProto) -> str:
    """Return the name of the ATen operator that a node calls, "" if it calls none."""
    if node.domain != "org.pytorch.aten":
        return ""
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == "operator"), "")


# --- new nodes -------------------------------------------------------------------------------------------------


class _Additions:
    """Nodes to put in front of the nodes of a graph, all at once; truthy if there are any."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._before: dict[str, list[onnx.NodeProto]] = {}

    def __bool__(self) -> bool:
        return bool(self._before)

    def node(
        self, before: onnx.NodeProto, operator: str, inputs: list[str], output: str, **attributes: Any
    ) -> str:
        """Add a node with one output in front of `before`; return the output's name."""
        new = helper.make_node(operator, inputs, [output], name=f"{output}_node", **attributes)
        self._before.setdefault(before.output[0], []).append(new)
        return output

    def scalar(self, before: onnx.NodeProto, output: str, element_type: int, value: float) -> str:
        """Add a constant scalar in front of `before`; return its name."""
        tensor = helper.make_tensor(f"{output}_value", element_type, [], [value])
        return self.node(before, "Constant", [], output, value=tensor)

    def apply(self) -> bool:
        """Put the nodes in; say whether there were any."""
        if self._before:
            nodes = [
                part for node in self._graph.node for part in (*self._before.get(node.output[0], ()), node)
            ]
            woven = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
            del self._graph.node[:]
            self._graph.node.extend(woven)
        return bool(self._before)
