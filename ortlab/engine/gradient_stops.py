"""Stop gradients in a graph where PyTorch stops them: `detach`, `.data`, and blocks under ``torch.no_grad()``.

Torch exports `detach` as nothing and does not record the other two, and ORTModule 1.19.2 exports the whole module
under ``no_grad`` (``_graph_transition_manager._get_exported_model``), so that nothing inside can be told apart.
Gradients then flow where the module's author cut them, and training goes wrong without a word.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ortlab.engine.graph_edits import GraphFacts
from ortlab.engine.patching import replace
from ortlab.engine.symbolic_words import aten, is_training_export

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import torch


def install() -> None:
    """Record in each export where gradients stop. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._io import _FlattenedModule

    CustomOpSymbolicRegistry.register("detach", "", _detach)
    CustomGradientRegistry.register_custom_stop_gradient_edges(
        [0], "org.pytorch.aten", "ATen", "detach_copy", ""
    )
    replace(_FlattenedModule, "forward", _trace_with_gradients)
    replace(GraphTransitionManager, "_post_export_process", _ask_only_for_gradients_that_exist)


def _detach(g: Any, x: Any) -> Any:
    """``Tensor.detach``: a copy that torch makes, through which no gradient flows."""
    if not is_training_export() or x.type().scalarType() not in {"Float", "Double", "Half", "BFloat16"}:
        return x
    return aten(g, "detach_copy", x).setType(x.type())


def _trace_with_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run the forward of an export with gradients on, so that the blocks without them show."""
    import torch
    from onnxruntime.training import ortmodule
    from torch.overrides import TorchFunctionMode

    data_of = torch.Tensor.data.__get__  # type: ignore[attr-defined] # a property, typed as a Tensor

    def detached(tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return tensor.detach()

    class StopGradients(TorchFunctionMode):
        """Put a recorded `detach` on each result that torch cuts off without recording it."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function == data_of:  # the tracer does not see this one and would make its value a constant
                return detached(args[0])
            result = function(*args, **(kwargs or {}))
            if (
                isinstance(result, torch.Tensor)
                and result.is_floating_point()
                and not result.requires_grad
                and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in _flat(args))
                and not _inside_autograd_function()
            ):
                return detached(result)
            return result

    def forward(self: Any, *args: Any) -> Any:
        if not (ortmodule.ORTMODULE_ONNX_EXPORT_CONTEXT[0] and self.training):
            return original(self, *args)
        with torch.enable_grad(), StopGradients():
            return original(self, *args)

    return forward


def _flat(args: Any) -> Any:
    for arg in args:
        if isinstance(arg, (tuple, list)):
            yield from _flat(arg)
        else:
            yield arg


def _inside_autograd_function() -> bool:
    """Say whether the forward of an autograd Function is running: its operators are not part of the graph."""
    from torch.autograd.function import FunctionCtx

    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if names and isinstance(frame.f_locals.get(names[0]), FunctionCtx):
            return True
        frame = frame.f_back
    return False


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
