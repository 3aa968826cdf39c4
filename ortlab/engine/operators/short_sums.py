"""Sums of gradients in bfloat16 and float16, which PyTorch computes on the CPU.

ORT adds the gradients that come from several readers of a value with `Sum`, which its CPU provider has for float32 and
float64 only. Float16 it casts to float32 and back; PyTorch adds one after another, and rounds each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from onnx import TensorProto

from ortlab.engine.operators.kernel_nodes import call_kernel
from ortlab.engine.passes.graph_edits import GraphFacts, declare_aten

if TYPE_CHECKING:
    import onnx

_SHORT: Final = frozenset({TensorProto.BFLOAT16, TensorProto.FLOAT16})


def leave_short_sums(model: onnx.ModelProto) -> None:
    """Let PyTorch compute the sums of short floats in a gradient graph; it is changed in place.

    Parameters
    ----------
    model
        A gradient graph whose values have their types.
    """
    facts = GraphFacts(model)
    for node in model.graph.node:
        if node.op_type != "Sum" or node.domain or facts.element_types.get(node.output[0]) not in _SHORT:
            continue
        call_kernel(node, "sum_of")
        declare_aten(model)
