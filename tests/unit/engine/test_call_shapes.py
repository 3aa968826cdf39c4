"""Sizes of what torch returns inside a graph are those of its operands, and never a constant of one batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engine.passes.graph_edits import GraphFacts, aten_operator


class Depthwise(nn.Module):
    """A depthwise convolution, which torch executes, between layers that ONNX Runtime does."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.convolution = nn.Linear(6, 8), nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.convolution(self.into(x).transpose(1, 2)).relu().transpose(1, 2)).square().mean()


class Positions(nn.Module):
    """Embeddings of positions, cut to the length of the batch: at most twelve."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(12)[None])
        self.words, self.positions = nn.Embedding(20, 8), nn.Embedding(12, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.words(ids) + self.positions(self.places[:, : ids.shape[1]])).square().mean()


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (Depthwise, [torch.randn(2, 5, 6), torch.randn(3, 9, 6)]),
        (Positions, [torch.arange(10).view(2, 5), torch.arange(18).view(2, 9)]),
    ],
)
def test_what_torch_returns_has_the_sizes_of_the_batch(model, batches):
    torch.manual_seed(1)
    plain = model()
    expected = []
    for batch in batches:
        plain.zero_grad()
        plain(batch).backward()
        expected.append([one.grad.clone() for one in plain.parameters()])
    lab = ortlab.wrap(plain)
    for batch, gradients in zip(batches, expected, strict=True):
        plain.zero_grad()
        plain(batch).backward()
        for one, gradient in zip(plain.parameters(), gradients, strict=True):
            torch.testing.assert_close(one.grad, gradient, rtol=1e-5, atol=1e-6)
    graph = lab.graph("processed").model
    facts = GraphFacts(graph)
    sizes = {size for value in (*graph.graph.input, *graph.graph.output) for size in facts.shapes[value.name]}
    called = [
        facts.shapes.get(name, ()) for node in graph.graph.node if aten_operator(node) for name in node.output
    ]
    assert called
    assert all(isinstance(size, int) or size in sizes for shape in called for size in shape)


class Enlarged(nn.Conv2d):
    """Images that are enlarged by as many rows and columns as the batch says, and normalised."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[2] + 2, 2 * x.shape[3]
        large = nn.functional.interpolate(super().forward(x), size=(rows, columns), mode="bicubic")
        return nn.functional.normalize(large.flip(2), dim=1)


def test_a_size_that_follows_from_a_batch_ends_no_inference(wrap):
    lab = wrap(Enlarged(4, 4, 1))
    for rows in (5, 6):
        lab.module(torch.randn(2, 4, rows, 3)).sum().backward()
    graph = lab.graph("processed").model
    facts = GraphFacts(graph)
    made = {name for node in graph.graph.node for name in node.output}
    assert {name for name in made if not facts.element_types.get(name)} == set()
    (returned,) = graph.graph.output
    assert facts.shapes[returned.name][2:] == ("x_dim2 + 2", "2*x_dim3")
