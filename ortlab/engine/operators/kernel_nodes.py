"""Nodes that call the kernels of `ortlab.engine.operators.torch_kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

from ortlab.engine.operators.torch_kernels import NAMESPACE
from ortlab.engine.passes.graph_edits import ATEN


def kernel_call(
    kernel: str, inputs: Sequence[str], outputs: Sequence[str], instead_of: onnx.NodeProto
) -> onnx.NodeProto:
    """Return a call of a kernel that takes the place of a node, and is named after it."""
    return helper.make_node(
        "ATen",
        inputs,
        outputs,
        name=f"{instead_of.name or outputs[0]}_{kernel}",
        domain=ATEN,
        operator=f"{NAMESPACE}::{kernel}",
    )


def call_kernel(node: onnx.NodeProto, kernel: str) -> None:
    """Turn a node into a call of a kernel; it keeps its inputs and outputs."""
    node.op_type, node.domain = "ATen", ATEN
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("operator", f"{NAMESPACE}::{kernel}"))
