"""ONNX Runtime's kernels get one thread where a step has little to compute, and PyTorch's number where it has more."""

from __future__ import annotations

import copy

import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ortlab.engine import threads
from ortlab.engine.passes.graph_edits import GraphFacts

pytestmark = pytest.mark.usefixtures("ortmodule")


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_of(lab):
    session = lab._bench.ort.execution._manager._execution_agent._inference_session
    return session.get_session_options().intra_op_num_threads


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8)
        )

    def forward(self, x):
        return self.layers(x).square().mean()


def test_a_session_gets_more_threads_when_the_batch_grows(wrap):
    torch.manual_seed(0)
    model = Deep()
    twin = copy.deepcopy(model)
    lab = wrap(model)
    small, large = torch.rand(16, 64), torch.rand(512, 64)
    seen = []
    for batch in (small, torch.rand(17, 64), large, small):
        for net in (model, twin):
            net.zero_grad()
            net(batch).backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        seen.append((threads_of(lab), lab.status.executed_by))
    assert seen == [(1, "ort"), (1, "ort"), (3, "ort"), (3, "ort")]


def test_a_session_never_has_more_threads_than_pytorch(wrap):
    torch.set_num_threads(1)
    lab = wrap(Deep())
    for size in (16, 512):
        lab.module(torch.rand(size, 64)).backward()
        assert threads_of(lab) == 1


def test_a_kept_graph_gets_a_session_for_the_batch_that_it_runs(wrap):
    model = Deep()
    lab = wrap(model)
    model(torch.rand(512, 64)).backward()
    assert threads_of(lab) == 3
    lab.unwrap()
    lab = wrap(model)
    model(torch.rand(16, 64)).backward()
    assert threads_of(lab) == 1


def test_inference_and_other_sessions_have_as_many(wrap):
    model = Deep()
    lab = wrap(model)
    lab.step(lambda: model(torch.rand(16, 64)).backward(), n=1)
    lab.profile(progress=False)
    assert threads_of(lab) == 1
    model.eval()
    with torch.no_grad():
        model(torch.rand(512, 64))
    inference = lab._bench.ort.execution_for(training=False)
    session = inference._manager._execution_agent._inference_session
    assert session.get_session_options().intra_op_num_threads == 3


def graph_of(*nodes, shapes):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    made = {name for node in nodes for name in node.output}
    inputs = [value for value in values if value.name not in made]
    known = [value for value in values if value.name in made]
    output = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(nodes, "graph", inputs, [output], value_info=known))


def multiplications(*nodes, shapes, batch=5):
    model = graph_of(*nodes, shapes=shapes)
    return threads.Work(GraphFacts(model), model.graph, {"batch": batch}).multiplications


RELU = helper.make_node("Relu", ["x"], ["y"])
GEMM = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)
CONV = helper.make_node("Conv", ["x", "w"], ["y"], strides=[2, 2])
PRODUCT = helper.make_node("MatMul", ["x", "w"], ["y"])
AN_ENTRY = threads._AN_ENTRY


@pytest.mark.parametrize(
    ("nodes", "shapes", "expected"),
    [
        ([PRODUCT], {"x": ["batch", 7, 3], "w": [3, 11]}, 5 * 7 * 3 * 11),
        ([PRODUCT], {"x": ["batch", 7, 3], "w": ["batch", 3, 7]}, 5 * 7 * 3 * 7),
        ([GEMM], {"x": ["batch", 3], "w": [11, 3], "b": [11]}, 5 * 3 * 11),
        ([CONV], {"x": ["batch", 4, 6, 6], "w": [8, 4, 3, 3]}, 5 * 8 * 3 * 3 * 4 * 9),
        ([RELU], {"x": ["batch", 3]}, 5 * 3 * AN_ENTRY),
        (
            [helper.make_node("Reshape", ["x", "to"], ["flat"]), helper.make_node("Relu", ["flat"], ["y"])],
            {"x": ["batch", 3], "to": [2]},
            5 * 3 * AN_ENTRY,
        ),
        (
            [helper.make_node("Gather", ["x", "at"], ["y"])],
            {"x": [100, 7], "at": ["batch", 2]},
            5 * 2 * 7 * AN_ENTRY,
        ),
        ([helper.make_node("Concat", ["x", "x"], ["y"], axis=0)], {"x": ["batch", 3]}, 2 * 5 * 3 * AN_ENTRY),
        ([RELU], {"x": ["unknown", 3]}, 0),
    ],
    ids=["matrix", "matrices", "Gemm", "Conv", "entries", "reshaped", "rows", "joined", "unknown"],
)
def test_what_a_graph_computes_is_counted(nodes, shapes, expected):
    assert multiplications(*nodes, shapes=shapes) == expected


def test_threads_are_woken_for_one_long_node():
    entries = graph_of(RELU, shapes={"x": ["batch", 1000]})
    product = graph_of(PRODUCT, shapes={"x": ["batch", 1000], "w": [1000, 8]})
    assert [threads.threads_for(entries, {"batch": batch}) for batch in (399, 400)] == [1, 3]
    assert [threads.threads_for(product, {"batch": batch}) for batch in (9_999, 10_000)] == [1, 3]


def test_a_loop_keeps_all_threads():
    inside = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "inside", [], [])
    branch = helper.make_node("If", ["choice"], ["y"], then_branch=inside, else_branch=inside)
    loop = graph_of(branch, shapes={"choice": [], "x": ["batch", 3]})
    plain = graph_of(RELU, shapes={"x": ["batch", 3]})
    assert threads.threads_for(plain, {"batch": 5}) == 1
    assert threads.threads_for(plain, {"batch": 5_000_000}) == 3
    assert threads.threads_for(loop, {"batch": 5}) == 3
