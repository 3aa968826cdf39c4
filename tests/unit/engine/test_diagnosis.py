"""What ONNX Runtime says when it fails, in the user's words: what, in which module and line, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ortlab.engine.diagnosis import explain_execution_failure
from ortlab.errors import ExecutionError
from ortlab.options.options import Options

pytestmark = pytest.mark.usefixtures("ortmodule")


class Halves(nn.Module):
    """Reshapes by a number that only the trace's batch has."""

    def forward(self, x):
        return x.reshape(int(self.rows), 4) * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.halves = nn.Linear(4, 4), Halves()
        self.halves.rows = 3

    def forward(self, x):
        return self.halves(self.first(x))


def test_a_node_that_fails_is_named_by_module_and_line(wrap):
    model = Net()
    lab = wrap(model, engine="ort")
    model(torch.randn(3, 4)).sum().backward()
    execution = lab._bench.ort.execution
    with pytest.raises(RuntimeError) as raw:  # past the engine, which would first ask PyTorch for its opinion
        execution.run((torch.randn(5, 4),), {}, ())
    assert "/onnxruntime_src/" in str(raw.value)
    failure = explain_execution_failure(raw.value, lab.options, execution.lines)
    assert isinstance(failure, ExecutionError)
    assert "/onnxruntime_src/" not in str(failure)
    line = Halves.forward.__code__.co_firstlineno + 1
    assert f"Reshape failed, in halves, at {__file__}:{line}: " in failure.what
    assert "requested shape:{3,4}" in failure.what


NO_KERNEL = (
    "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for GatherGrad(1) node with name "
    "'label_filter_result_Grad/GatherGrad_1'"
)
MOVED = (
    "/onnxruntime_src/onnxruntime/core/optimizer/compute_optimizer/upstream_gather_actors.cc:92 bool "
    "onnxruntime::optimizer::compute_optimizer::UpdateSliceOutputShape(onnxruntime::NodeArg&, int) axis_to_update >= 0 "
    "was false. axis should be non-negative."
)


@pytest.mark.parametrize(
    ("message", "said", "switch"),
    [
        (NO_KERNEL, "no kernel for GatherGrad", "label_sparse_optimizer"),
        (MOVED, "axis should be non-negative.", "compute_optimizer"),
    ],
)
def test_the_optimization_that_fails_is_named_with_its_switch(message, said, switch):
    failure = explain_execution_failure(RuntimeError(message), Options())
    assert isinstance(failure, ExecutionError)
    assert said in failure.what
    assert "onnxruntime" not in failure.what.replace("ONNX Runtime", "")
    assert failure.fix == f"Leave out the optimization that failed: lab.set({switch}=False)."
    without = explain_execution_failure(RuntimeError(message), Options(**{switch: False}))
    assert isinstance(without, ExecutionError)
    assert f"{switch}=False" not in without.fix  # it is off, so it is not at fault
