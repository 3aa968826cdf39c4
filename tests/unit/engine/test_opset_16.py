"""A graph of opset 17 is declared as opset 16 only where nothing in it means anything else there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from forked import python
from onnx import TensorProto, helper

from ortlab.engine.passes.graph_passes import declare_opset_16


def graph(*operators: str, opset: int = 17) -> onnx.ModelProto:
    nodes = [helper.make_node(name, ["x"], ["y"], domain=domain) for domain, name in map(split, operators)]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    made = helper.make_graph(nodes, "graph", [value], [value])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)])


def split(name: str) -> tuple[str, str]:
    domain, _, operator = name.rpartition("::")
    return domain, operator


@pytest.mark.parametrize(
    ("operators", "opset", "lowered"),
    [
        (("LayerNormalization", "MatMul", "Add"), 17, True),
        (("LayerNormalization", "org.pytorch.aten::ATen"), 17, True),
        (("MatMul",), 17, False),  # there is nothing to gain
        (("LayerNormalization", "DFT"), 17, False),  # which is new in 17, too
        (("LayerNormalization", "HannWindow"), 17, False),
        (("LayerNormalization",), 18, False),
        (("LayerNormalization",), 16, False),
    ],
)
def test_it_is_lowered_where_nothing_changes(operators, opset, lowered):
    model = graph(*operators, opset=opset)
    assert declare_opset_16(model) is lowered
    assert model.opset_import[0].version == (16 if lowered else opset)


RAW = """
from fault_cases import unrepaired
ortmodule = unrepaired()
import torch
from torch import nn

class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
    def forward(self, x):
        return self.norm(self.layer(x))[:, 0, :]

wrapped = ortmodule.ORTModule(First())
wrapped(torch.randn(2, 5, 8)).sum().backward()
used = [node.op_type for node in wrapped._torch_module._execution_manager(True)._onnx_models.optimized_model.graph.node]
print("ahead" if used.index("Gather") < used.index("LayerNormalization") else "behind")
"""


@pytest.mark.parametrize(("opset", "place"), [("16", "ahead"), ("17", "behind")])
def test_as_released_a_slice_stops_at_a_layer_normalisation_of_opset_17(opset, place):
    finished = subprocess.run(
        python("-W", "ignore", "-c", RAW),
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "ORTMODULE_ONNX_OPSET_VERSION": opset},
    )
    assert finished.stdout.split()[-1] == place
