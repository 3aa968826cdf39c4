"""Row T7: gradients that are handed over one by one are those of PyTorch, in every way they are used."""

from __future__ import annotations

import gc
import os
import subprocess
import weakref

import onnx
import pytest
import torch
from forked import python
from torch import nn
from torch.nn import functional as F

import ortlab
from ortlab.errors import ExecutionError, OptionError
from ortlab.options.options import Options

TOLERANCE = 1e-6


class Tagger(nn.Module):
    """Tied weights, a weight that is used twice, a buffer, one parameter that the forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.hidden = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = self.norm(x + self.scale * torch.tanh(self.hidden(x)))
        return F.cross_entropy(self.head(x).view(-1, 50), tokens.view(-1))


def with_release(model):
    return ortlab.wrap(model, options=Options(mem_efficient_grad_management=True))


def without(model):
    return ortlab.wrap(model, engine="eager")


def nothing(model):
    """Leave the model as it is."""


def freeze(model):
    model.hidden.weight.requires_grad_(requires_grad=False)
    model.norm.requires_grad_(requires_grad=False)


def clip_by_hook(model):
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def train(wrap, prepare, *, set_to_none):
    """Three optimizer steps of two batches each; return losses, and gradients and weights after each step."""
    torch.manual_seed(2)
    model = Tagger()
    prepare(model)
    lab = wrap(model)
    # Adam would divide by the gradients' own size, and show rounding in tiny ones only.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    losses, gradients = [], []
    for step in range(3):
        for batch in range(2):
            torch.manual_seed(10 * step + batch)
            loss = model(torch.randint(0, 50, (4, 8)))
            loss.backward()
            losses.append(loss.detach())
        gradients.append(
            {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert seen == ["pre", "post"] * 3
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    lab.unwrap()
    return {"losses": losses, "gradients": gradients, "weights": weights}


@pytest.mark.row("T7", "F21")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("prepare", [nothing, freeze, clip_by_hook])
def test_gradients_losses_and_weights_are_pytorchs_over_several_accumulated_steps(prepare, set_to_none):
    expected = train(without, prepare, set_to_none=set_to_none)
    found = train(with_release, prepare, set_to_none=set_to_none)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_every_parameter_that_is_used_and_trained_is_handed_over_by_itself():
    model = Tagger()
    model.hidden.bias.requires_grad_(requires_grad=False)
    lab = with_release(model)
    model(torch.randint(0, 50, (4, 8))).backward()
    graph = onnx.load_model_from_string(lab._bench.ort.execution.serialized_graph("gradient")).graph
    trained = [name for name, one in model.named_parameters() if one.requires_grad and name != "unused"]
    assert sum(node.op_type == "PythonOpGrad" for node in graph.node) == len(trained)
    assert not any("norm" in value.name for value in (*graph.input, *graph.output))
    lab.set(mem_efficient_grad_management=False)
    model(torch.randint(0, 50, (4, 8))).backward()
    graph = onnx.load_model_from_string(lab._bench.ort.execution.serialized_graph("gradient")).graph
    assert not any(node.op_type.startswith("PythonOp") for node in graph.node)
    lab.unwrap()


def test_a_parameter_that_has_been_replaced_is_the_one_that_is_trained():
    model = Tagger()
    lab = with_release(model)
    tokens = torch.randint(0, 50, (4, 8))
    model(tokens).backward()
    model.hidden.weight = nn.Parameter(model.hidden.weight.detach() * 2)
    model.zero_grad()
    model(tokens).backward()
    found = model.hidden.weight.grad.clone()
    model.zero_grad()
    lab.set(engine="eager")
    model(tokens).backward()
    torch.testing.assert_close(found, model.hidden.weight.grad, atol=TOLERANCE, rtol=0)
    lab.unwrap()


@pytest.mark.row("F21")
def test_a_hook_that_could_write_weights_in_the_middle_of_the_backward_is_refused_before_anything_is_computed():
    model = Tagger()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    lab = with_release(model)
    seen = []
    model.hidden.weight.register_post_accumulate_grad_hook(seen.append)
    with pytest.raises(ExecutionError, match=r"hidden.weight has a hook") as caught:
        model(torch.randint(0, 50, (4, 8)))
    assert "mem_efficient_grad_management=False" in caught.value.fix
    torch.testing.assert_close({name: one.detach() for name, one in model.named_parameters()}, before)
    lab.set(mem_efficient_grad_management=False)
    model(torch.randint(0, 50, (4, 8))).backward()
    assert len(seen) == 1
    lab.unwrap()


def test_the_model_goes_when_nobody_holds_it():
    model = Tagger()
    lab = with_release(model)
    model(torch.randint(0, 50, (4, 8))).backward()
    lab.unwrap()
    gone = weakref.ref(model)
    del model, lab
    gc.collect()
    assert gone() is None


def test_it_cannot_be_on_without_the_functions_that_it_is_made_of():
    with pytest.raises(OptionError, match="custom_autograd is off"):
        Options(mem_efficient_grad_management=True, custom_autograd=False)


AS_RELEASED = """
import torch
from onnxruntime.training.ortmodule import _mem_efficient_grad_mgmt as release
from onnx import TensorProto, helper
from torch import nn

model = nn.Linear(4, 4)
weights = dict(model.named_parameters())
inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(one.shape)) for name, one in weights.items()]
exported = helper.make_model(helper.make_graph([], "graph", inputs, []))
# As _graph_transition_manager._post_export_process calls it.
release.post_processing_enable_mem_efficient_training(exported, model.named_parameters(), weights)
"""


@pytest.mark.row("T7")
def test_as_released_it_gives_torch_a_dict_in_place_of_a_device():
    script = "from ortlab.engine import exporter\nexporter.prepare_torch()\n" + AS_RELEASED
    done = subprocess.run(python("-c", script), capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode
    assert "TypeError: zeros()" in done.stderr
    assert "dict" in done.stderr
