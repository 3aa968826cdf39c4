"""Leave the inferred shapes out of a processed graph where ``symbolic_shape_inference`` is off.

1.19.2 skips its inference then (``_graph_transition_manager.GraphTransitionManager._post_export_process``), and with it
all that ortlab does to an export at that place: the graph passes that give Dropout its mode and mask and Where its
right gradient, the stops of gradients, and the types of ATen nodes, which ONNX Runtime has to be told. So shapes are
inferred whatever the switch says, and taken out again at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx


def install() -> None:
    """Let the switch decide only about what ONNX Runtime is told. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_post_export_process", _infer_and_forget)


def _infer_and_forget(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_export_process(*args: Any, run_symbolic_shape_infer: bool, **kwargs: Any) -> Any:
        info = original(*args, run_symbolic_shape_infer=True, **kwargs)
        if not run_symbolic_shape_infer:
            forget_shapes(info._post_export_processed_model)
        return info

    return post_export_process


def forget_shapes(model: onnx.ModelProto) -> None:
    """Drop the shapes of all values between the inputs and the outputs; their types stay."""
    for value in model.graph.value_info:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
