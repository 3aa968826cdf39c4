"""What a forward returns stays what it was, whatever the backward and later steps do with the memory."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ortlab.engine.passes.training_graph import hand_over

FORWARDS = {
    "a view": lambda net, x: (net.first(x).view(16, 32),),
    "an activation": lambda net, x: (net.first(x).relu(),),
    "an activation behind a normalisation": lambda net, x: (net.norm(net.first(x)).relu(),),
    "a softmax": lambda net, x: ((net.first(x).view(2, 16, 16) * 2).softmax(-1),),
    "a convolution": lambda net, x: (net.grouped(x.view(4, 4, 4, 8)).relu(),),
    "a sum": lambda net, x: (net.first(x) + 1, net.first(x) + x),
    "booleans": lambda net, x: (net.first(x).relu() > 0.5,),
    "an input": lambda net, x: (x, net.first(x)),
    "a value twice": lambda net, x: (net.first(x).tanh(),) * 2,
}


class Net(nn.Module):
    """Returns something, and what it computes of that."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.grouped = nn.LayerNorm(16), nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.returned = forward

    def forward(self, x):
        returned = self.returned(self, x)
        rest = self.second(returned[0].reshape(-1, 16).float())
        return (*returned, rest, rest.sin())


def step(module, x):
    outputs = module(x)
    sum(output.pow(2).mean() for output in outputs if output.requires_grad).backward()
    return outputs


@pytest.mark.parametrize("aten_backward", [False, True])
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_a_backward_writes_over_nothing_that_was_returned(forward, aten_backward, wrap):
    torch.manual_seed(0)
    module, x = Net(forward).train(), torch.randn(32, 16)
    expected = copy.deepcopy(module)(x)
    lab = wrap(module, aten_backward=aten_backward)
    first = step(module, x)
    step(module, x + 1)
    assert lab.status.executed_by == "ort"
    for mine, theirs in zip(first, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_copy_of_what_has_lost_its_type_has_that_of_the_exported_graph():
    def value(name):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT16, None)

    forward = [
        helper.make_node("MatMul", ["x", "x"], ["product"]),
        helper.make_node("Reshape", ["product", "shape"], ["view"]),
        helper.make_node("Relu", ["view"], ["positive"]),
        helper.make_node("Identity", ["view"], ["output-0"]),
    ]
    backward = [helper.make_node("YieldOp", ["output-0", "positive"], ["grad"])]
    exported = helper.make_model(helper.make_graph(forward, "forward", [value("x")], [value("output-0")]))
    model = helper.make_model(
        helper.make_graph([*forward, *backward], "training", [value("x")], [value("grad")])
    )
    hand_over(model, exported)
    (copied,) = (node for node in model.graph.node if "copy_of" in str(node.attribute))
    types = {one.name: one.type.tensor_type.elem_type for one in model.graph.value_info}
    assert types[copied.output[0]] == TensorProto.FLOAT16


def test_1_19_2_writes_over_what_it_returned(ortmodule, no_fallback):
    torch.manual_seed(0)
    module, x = Net(FORWARDS["a view"]).train(), torch.randn(32, 16)
    expected = copy.deepcopy(module)(x)
    wrapped = ortmodule.ORTModule(module, ortmodule.DebugOptions(log_level=ortmodule.LogLevel.ERROR))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = wrapped(x)
        torch.testing.assert_close(outputs[0], expected[0])
        sum(output.pow(2).mean() for output in outputs).backward()
    assert not torch.allclose(outputs[0], expected[0])


class ThreeOutputs(nn.Module):
    """The gradient of its third output goes through a product that is added to another one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.first(x)
        return hidden, hidden * self.second(x), self.second(hidden)


def test_1_19_2_does_not_build_a_product_of_a_third_gradient(ortmodule, no_fallback):
    from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

    module = ThreeOutputs().train()
    wrapped = ortmodule.ORTModule(module, ortmodule.DebugOptions(log_level=ortmodule.LogLevel.ERROR))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeException, match="gemm_sum_fusion"):
            wrapped(torch.randn(4, 16))


def test_a_product_of_a_third_gradient_is_built(wrap):
    torch.manual_seed(0)
    module, x = ThreeOutputs().train(), torch.randn(4, 16)
    plain = copy.deepcopy(module)
    wrap(module)
    step(module, x)
    step(plain, x)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
