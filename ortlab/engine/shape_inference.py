"""Symbolic shape inference that goes on where the one of onnxruntime 1.19.2 stops.

``onnxruntime/tools/symbolic_shape_infer.py`` gives up on a whole model with a bare AssertionError when it cannot
express one shape (``nn.TransformerEncoder``, relative positions, windows of a size that is computed). A shape that is
not known costs an optimisation at most: ONNX Runtime infers shapes again when it loads the graph, and its gradients
compute at run time what was not known. So the shape is left open and the inference goes on.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import onnx
from onnx import helper

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

# ATen operators of `ortlab.engine.symbolics` whose first output has the shape of their first input.
_SAME_SHAPE: Final = ("softplus", "native_batch_norm", "_log_softmax")


def install() -> None:
    """Let ORTModule use the inference of this module. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule import _graph_transition_manager as transitions

    if transitions.SymbolicShapeInference.__module__ != __name__:
        transitions.SymbolicShapeInference = _tolerant(transitions.SymbolicShapeInference)


def _tolerant(base: Any) -> Any:
    """Derive the class from ORT's, which is importable only once ORT is."""

    class TolerantShapeInference(base):  # type: ignore[misc] # base is Any: onnxruntime has no stubs
        """ORT's symbolic shape inference, with each operator's failure kept to that operator."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name in _SAME_SHAPE:
                self.aten_op_dispatcher_[name] = partial(_infer_same_shape, self)
            for table in (self.dispatcher_, self.aten_op_dispatcher_):
                for operator, infer in table.items():
                    table[operator] = partial(_infer_or_leave_open, self, infer)

        def _check_merged_dims(self, dims: Any, allow_broadcast: bool = True) -> None:  # noqa: FBT001, FBT002 - ORT's
            try:
                super()._check_merged_dims(dims, allow_broadcast)
            except AssertionError:
                _log.debug("These dimensions may differ: %s", dims)

        @staticmethod
        def infer_shapes(in_mp: onnx.ModelProto, **kwargs: Any) -> onnx.ModelProto:
            """Infer what can be inferred; ORT's own writes a file to the working directory and raises."""
            return _infer_shapes(
                TolerantShapeInference(**({"int_max": 2**31 - 1, "verbose": 0} | kwargs)), in_mp
            )

    return TolerantShapeInference


def _infer_shapes(inference: Any, model: onnx.ModelProto) -> onnx.ModelProto:
    inference._preprocess(model)
    try:
        while inference.run_:
            inference._infer_impl()
    except Exception as error:  # noqa: BLE001 - asserts, sympy's errors, None for a shape: all mean "not known"
        _log.debug("Symbolic shape inference stopped early: %r", error)
    inference._update_output_from_vi()
    inferred: onnx.ModelProto = inference.out_mp_
    known = [value for value in inferred.graph.value_info if value.type.tensor_type.elem_type]
    kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in known]
    del inferred.graph.value_info[:]
    inferred.graph.value_info.extend(kept)
    return inferred


def _infer_or_leave_open(inference: Any, infer: Callable[[Any], None], node: onnx.NodeProto) -> None:
    try:
        infer(node)
    except Exception as error:  # noqa: BLE001 - as above
        _log.debug("The shape of %s (%s) is left open: %r", node.name, node.op_type, error)
        for name in filter(None, node.output):
            tensor = inference.known_vi_[name].type.tensor_type
            if not tensor.elem_type:
                tensor.elem_type = _element_type(inference, node.input[0])
            for axis, size in enumerate(tensor.shape.dim if tensor.HasField("shape") else ()):
                if not size.dim_param and not size.HasField("dim_value"):
                    size.dim_param = str(inference._new_symbolic_dim(name, axis))


def _infer_same_shape(inference: Any, node: onnx.NodeProto) -> None:
    """Give the first output the shape of the first input; further outputs are statistics, a vector each."""
    inference._propagate_shape_and_type(node)
    for index, name in enumerate(node.output[1:], start=1):
        length = str(inference._new_symbolic_dim_from_output(node, index, 0))
        vector = helper.make_tensor_value_info(name, _element_type(inference, node.input[0]), [length])
        inference.known_vi_[name].CopyFrom(vector)


def _element_type(inference: Any, name: str) -> int:
    return int(inference.known_vi_[name].type.tensor_type.elem_type)
