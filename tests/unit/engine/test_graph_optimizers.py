"""Graph optimizers in Python: ORT's by the options of each build, and the user's own."""

from __future__ import annotations

import math

import onnx
import pytest
import torch
from torch import nn

import ortlab
from ortlab.engine.build_environment import building_with
from ortlab.errors import BuildError, OptionError
from ortlab.options.options import Options


class WrittenOut(nn.Module):
    """Attention as models of transformers 4.20 wrote it; with that, 1.19.2 knows it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], 2, 16).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.split(part(x)) for part in (self.query, self.key, self.value))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(16) + mask
        attended = torch.matmul(self.dropout(torch.softmax(scores, -1)), value)
        return self.out(attended.permute(0, 2, 1, 3).reshape(*x.shape)).square().mean()


def step(model, sizes=(2, 8)):
    torch.manual_seed(2)
    loss = model(torch.randn(*sizes, 32), torch.zeros(sizes[0], 1, 1, sizes[1]))
    loss.backward()
    return loss


def gradient_graph(lab):
    return onnx.load_model_from_string(lab._bench.ort.execution.serialized_graph("gradient")).graph


def operators(graph):
    return [
        attribute.s.decode()
        for node in graph.node
        for attribute in node.attribute
        if attribute.name == "operator"
    ]


@pytest.fixture
def optimize_all(ortmodule):
    from onnxruntime.training.ortmodule.graph_optimizer_registry import GraphOptimizerRegistry

    return GraphOptimizerRegistry.optimize_all


@pytest.mark.row("D9")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_efficient_attention_is_there_with_its_switch_and_gone_without(dropout, optimize_all):
    model = WrittenOut(dropout)
    lab = ortlab.wrap(model, aten_backward=False)  # as it is on a GPU: softmax has ORT's own gradient
    step(model)
    plain, other = gradient_graph(lab), gradient_graph(lab)
    lab.unwrap()

    with building_with(Options(efficient_attention=True)):
        optimize_all("WrittenOut", "cuda", plain)
    with building_with(Options()):
        optimize_all("WrittenOut", "cuda", other)
    forward, backward = "_efficient_attention_forward", "_efficient_attention_backward"
    assert sorted(operators(plain)) == [backward, forward]
    assert not operators(other)
    # The last thing before the device call: every argument that the nodes leave out has a default in this torch.
    for node in plain.node:
        if node.op_type == "ATen":
            taken = getattr(torch.ops.aten, operators_of(node)).default._schema.arguments
            assert len(node.input) <= len(taken)
            assert all(argument.has_default_value() for argument in taken[len(node.input) :])


def operators_of(node):
    return next(attribute.s.decode() for attribute in node.attribute if attribute.name == "operator")


def test_efficient_attention_says_when_it_finds_nothing(optimize_all):
    model = nn.Sequential(nn.Linear(4, 4))
    lab = ortlab.wrap(model)
    model(torch.randn(2, 4)).sum().backward()
    graph = gradient_graph(lab)
    lab.unwrap()
    with (
        building_with(Options(efficient_attention=True)),
        pytest.warns(UserWarning, match="efficient_attention has found no attention"),
    ):
        optimize_all("Sequential", "cuda", graph)


@pytest.mark.row("D9", "H6")
def test_nothing_of_orts_runs_on_another_device_or_outside_of_a_build(optimize_all):
    model = WrittenOut()
    lab = ortlab.wrap(model, aten_backward=False)
    step(model)
    graph = gradient_graph(lab)
    lab.unwrap()
    with building_with(Options(efficient_attention=True)):
        optimize_all("WrittenOut", "cpu", graph)
    optimize_all("WrittenOut", "cuda", graph)
    assert not operators(graph)


def scale_by(factor):
    """Make an optimizer that multiplies the model's output, the first input of ORT's YieldOp."""

    def scale(graph):
        output = next(node for node in graph.node if node.op_type == "YieldOp")
        constant = onnx.helper.make_tensor("factor", onnx.TensorProto.FLOAT, [], [factor])
        graph.initializer.append(constant)
        scaled = onnx.helper.make_node("Mul", [output.input[0], "factor"], ["scaled"])
        output.input[0] = "scaled"
        graph.node.insert(list(graph.node).index(output), scaled)

    return scale


@pytest.mark.row("D9")
def test_an_optimizer_of_ones_own_changes_the_next_graph_and_a_cell_run_again_replaces_it(wrap):
    model = WrittenOut()
    expected = step(model)
    lab = wrap(model)
    torch.testing.assert_close(step(model), expected)

    first = ortlab.register_graph_optimizer("WrittenOut|Other", devices="cpu")(scale_by(3.0))
    torch.testing.assert_close(step(model), 3 * expected)
    assert "scale" in lab.status.reason

    again = ortlab.register_graph_optimizer("WrittenOut")(scale_by(5.0))
    torch.testing.assert_close(step(model), 5 * expected)

    ortlab.unregister_graph_optimizer(first)  # the same name
    torch.testing.assert_close(step(model), expected)
    ortlab.unregister_graph_optimizer(again)


def test_the_decorator_needs_no_brackets(wrap):
    model = WrittenOut()
    expected = step(model)
    wrap(model)
    scale = scale_by(3.0)
    assert ortlab.register_graph_optimizer(scale) is scale
    torch.testing.assert_close(step(model), 3 * expected)
    ortlab.unregister_graph_optimizer(scale)
    torch.testing.assert_close(step(model), expected)


def test_optimizers_for_other_models_and_devices_leave_a_graph_alone(wrap):
    model = WrittenOut()
    expected = step(model)
    wrap(model)
    for target, devices in (("Other", "all"), ("all", "cuda|rocm")):
        function = ortlab.register_graph_optimizer(target, devices)(scale_by(3.0))
        torch.testing.assert_close(step(model), expected)
        ortlab.unregister_graph_optimizer(function)


def test_an_optimizer_that_fails_is_named_and_the_lab_goes_on_without_it(wrap):
    def broken(graph):
        raise KeyError(graph.node[0].op_type)

    model = WrittenOut()
    expected = step(model)
    wrap(model)
    ortlab.register_graph_optimizer()(broken)
    with pytest.raises(BuildError, match=r"broken failed: KeyError"):
        step(model)
    ortlab.unregister_graph_optimizer(broken)
    torch.testing.assert_close(step(model), expected)


def test_a_device_that_ort_does_not_have_is_refused():
    with pytest.raises(OptionError, match="no device 'gpu'"):
        ortlab.register_graph_optimizer(devices="gpu")
