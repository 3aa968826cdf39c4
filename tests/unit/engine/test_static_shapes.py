"""A graph for one batch shape: raw 1.19.2 cannot build it, ortlab's has the sizes and follows a new shape."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

from ortlab.engine.passes.shapes import with_sizes


class Model(nn.Module):
    """Sizes are computed in its forward, and one input is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("offset", torch.ones(6))

    def forward(
        self, x: torch.Tensor, unused: torch.Tensor | None = None, *, y: torch.Tensor
    ) -> torch.Tensor:
        hidden = (self.linear(x) + self.offset).view(x.shape[0] * x.shape[1], 2, 3)
        return (hidden.transpose(1, 2).reshape(x.shape[0], x.shape[1], 6) * y).relu().mean()


def batch(rows, positions):
    torch.manual_seed(2)
    return torch.randn(rows, positions, 4), torch.randn(rows, positions, 6)


def step(model, rows, positions):
    x, y = batch(rows, positions)
    model.zero_grad()
    loss = model(x, y=y)
    loss.backward()
    return loss, model.linear.weight.grad.clone()


def dimensions(value):
    return [dimension.dim_value or dimension.dim_param for dimension in value.type.tensor_type.shape.dim]


def test_as_released_the_graph_builder_refuses_the_shapes(with_ort):
    wrapped = with_ort(Model())
    wrapped._torch_module._execution_manager(True)._runtime_options.use_static_shape = True
    x, y = batch(2, 3)
    with pytest.raises(
        RuntimeError, match="concrete input shapes and the size of user inputs does not match"
    ):
        wrapped(x, y=y)


def test_with_ortlab_the_graph_has_the_sizes_and_fewer_nodes_and_follows_the_batch(wrap):
    model = Model()
    wanted = {sizes: step(model, *sizes) for sizes in ((2, 3), (5, 7))}
    lab = wrap(model)
    step(model, 2, 3)
    dynamic = onnx.load_model_from_string(lab._bench.ort.execution.serialized_graph("execution")).graph
    lab.set(static_shape=True)
    for sizes in ((2, 3), (5, 7), (2, 3)):
        torch.testing.assert_close(step(model, *sizes), wanted[sizes])
        assert "size of tensor 0" in lab.status.reason
        static = onnx.load_model_from_string(lab._bench.ort.execution.serialized_graph("execution")).graph
        inputs = {value.name: dimensions(value) for value in static.input}
        assert (inputs["x"], inputs["y"]) == ([*sizes, 4], [*sizes, 6])
        assert len(static.node) < len(dynamic.node)

    lab.set(static_shape=False)
    torch.testing.assert_close(step(model, 5, 7), wanted[5, 7])
    assert lab.status.reason != "`size of tensor 0` changed from 2 x 3 to 5 x 7"


def test_dimensions_that_are_computed_from_sizes_become_numbers_and_others_stay():
    value = onnx.helper.make_tensor_value_info(
        "x", onnx.TensorProto.FLOAT, ["rows", "2*rows + 1", "unknown", 3]
    )
    model = onnx.helper.make_model(onnx.helper.make_graph([], "graph", [value], []))
    fixed = with_sizes(model, {"rows": 4})
    assert dimensions(fixed.graph.input[0]) == [4, 9, "unknown", 3]
    assert dimensions(model.graph.input[0]) == ["rows", "2*rows + 1", "unknown", 3]
