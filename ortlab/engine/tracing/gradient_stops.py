"""Stop gradients in a graph where PyTorch stops them: `detach`, `.data`, and blocks under ``torch.no_grad()``.

Torch exports `detach` as nothing and does not record the other two, and ORTModule 1.19.2 exports the whole module
under ``no_grad`` (``_graph_transition_manager._get_exported_model``), so that nothing inside can be told apart.
Gradients then flow where the module's author cut them, and training goes wrong without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.engine.operators.symbolic_words import aten, is_training_export
from ortlab.engine.passes.graph_edits import ATEN, STOP, GraphAdditions, GraphFacts, aten_operator
from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx


def install() -> None:
    """Record in each export where gradients stop. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._io import _FlattenedModule
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    CustomOpSymbolicRegistry.register("detach", "", _detach)
    CustomGradientRegistry.register_custom_stop_gradient_edges([0], ATEN, "ATen", STOP, "")
    replace(_FlattenedModule, "forward", _trace_with_gradients)
    replace(GraphTransitionManager, "_get_exported_model", _ask_functions)
    replace(GraphTransitionManager, "_infer_shapes", _keep_needed_stops)
    replace(GraphTransitionManager, "_post_export_process", _ask_only_for_gradients_that_exist)
    replace(TrainingManager, "_create_autofunction_class", _mark_outputs_without_gradient)


def _detach(g: Any, x: Any) -> Any:
    """``Tensor.detach``: a copy that torch makes, through which no gradient flows."""
    if not is_training_export() or x.type().scalarType() not in {"Float", "Double", "Half", "BFloat16"}:
        return x
    return aten(g, STOP, x).setType(x.type())


def _trace_with_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run the forward of an export with gradients on, so that the blocks without them show."""
    import torch
    from onnxruntime.training import ortmodule

    from ortlab.engine.tracing.traced_stops import TracedStops

    def forward(self: Any, *args: Any) -> Any:
        if not (ortmodule.ORTMODULE_ONNX_EXPORT_CONTEXT[0] and self.training):
            return original(self, *args)
        with torch.enable_grad(), TracedStops().on():
            return original(self, *args)

    return forward


def _ask_functions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphTransitionManager._get_exported_model``: it runs the forward once and then traces it."""
    from ortlab.engine.tracing.traced_stops import functions_asked

    def get_exported_model(*args: Any, **kwargs: Any) -> Any:
        with functions_asked():
            return original(*args, **kwargs)

    return get_exported_model


def _keep_needed_stops(
    original: Callable[[onnx.ModelProto], onnx.ModelProto],
) -> Callable[..., onnx.ModelProto]:
    """Wrap ``GraphTransitionManager._infer_shapes``, on whose result the gradient is built."""

    def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
        model = original(model)
        keep_needed_stops(model)
        return model

    return infer_shapes


def keep_needed_stops(model: onnx.ModelProto) -> None:
    """Drop each stop through which no gradient would flow, and double those on an input that needs one.

    The constructor of GradientGraphBuilder in 1.19.2 (``orttraining/core/framework/gradient_graph_builder.cc``)
    differentiates each node that reads an input in need of a gradient, also a stop, which has no gradient.
    """
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


def _ask_only_for_gradients_that_exist(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphTransitionManager._post_export_process``, which asks for the gradient of each parameter.

    The gradient builder fails if one of them does not influence the outputs differentiably; torch leaves its
    gradient None.
    """

    def post_export_process(*args: Any, **kwargs: Any) -> Any:
        info = original(*args, **kwargs)
        reached = GraphFacts(info._post_export_processed_model).leading_out
        for names in (
            info.onnx_graph_input_names_require_grad,
            info.onnx_graph_input_names_require_grad_user_defined,
        ):
            names[:] = [name for name in names if name in reached]
        return info

    return post_export_process


def _mark_outputs_without_gradient(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``TrainingManager._create_autofunction_class``.

    Its Function calls ``ctx.mark_non_differentiable`` once per output, and each call replaces what the one before
    said. All but the last of these outputs then require a gradient, and a loss that uses one fails in the backward.
    """

    def create_autofunction_class(self: Any) -> Any:
        base = original(self)

        def forward(ctx: Any, *inputs: Any) -> Any:
            outputs = base.forward(ctx, *inputs)
            silent = self._graph_info.output_grad_indices_non_differentiable
            ctx.mark_non_differentiable(*(outputs[index] for index in silent))
            return outputs

        return type(base.__name__, (base,), {"forward": staticmethod(forward)})

    return create_autofunction_class
