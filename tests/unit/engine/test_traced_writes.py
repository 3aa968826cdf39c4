"""A write through one view and a read through another is right in ONNX Runtime, or refused; never silently wrong."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import BuildError

pytestmark = pytest.mark.usefixtures("ortmodule")


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.body = body

    def forward(self, x):
        return self.body(self.linear(x))


def sliced(y):
    y[0:1].mul_(3)
    return y


def assigned(y):
    y = y * 1
    y[:, 0] = 2.0
    return y


def augmented(y):
    y = y * 1
    y[1] += 1
    y[1:, 2:] *= 3
    return y


def in_place_after_a_view(y):
    return torch.relu_(y.view(-1))


def in_place_after_a_transpose(y):
    y = y.transpose(0, 1)
    y.mul_(3)
    return y


def relu_after_a_flatten(y):
    y = y + 1
    y += y
    assert y.shape[1] == 4
    return nn.functional.relu(y.flatten(), inplace=True)


def view_after_the_write(y):
    y = y * 1
    y.mul_(3)
    return y.view(-1) + y.flatten()


def another_row_after_the_write(y):
    y = y * 1
    row = y[0]
    for other in (1, 2):  # as the positions of Qwen3.5
        row[other:] = y[other, other:]
    return row * y[2]


RIGHT = [
    another_row_after_the_write,
    sliced,
    assigned,
    augmented,
    in_place_after_a_view,
    in_place_after_a_transpose,
    relu_after_a_flatten,
    view_after_the_write,
]


def through_a_view(y):
    y.view(-1).mul_(3)
    return y


def through_a_transpose(y):
    y.t().mul_(3)
    return y


def through_two_views(y):
    y.unsqueeze(0).squeeze(0).mul_(3)
    return y


def through_a_slice_of_a_view(y):
    y.unsqueeze(0)[0, 0].mul_(3)
    return y


def through_a_slice_made_on_another_line(y):
    row = y.select(0, 1)
    row.add_(1)
    return y.sum() + row.sum()


def through_a_narrow(y):
    y.narrow(0, 1, 1).add_(1)
    return y


def view_before_the_write(y):
    flat = y.view(-1)
    y.mul_(3)
    return flat * 1


def slice_before_the_write(y):
    row = y[0]
    y.mul_(3)
    return row * 1


def the_same_row_after_the_write(y):
    y = y * 1
    row = y[0]
    row[1:3] = 2.0
    return y[0] * 1


def all_rows_after_the_write(y):
    y = y * 1
    row = y[0]
    row[1:3] = 2.0
    return y * 1


WRONG = [
    all_rows_after_the_write,
    the_same_row_after_the_write,
    through_a_view,
    through_a_transpose,
    through_two_views,
    through_a_slice_of_a_view,
    through_a_slice_made_on_another_line,
    through_a_narrow,
    view_before_the_write,
    slice_before_the_write,
]


@pytest.fixture
def nets():
    def make(body):
        torch.manual_seed(2)
        net = Net(body)
        return net, copy.deepcopy(net)

    return make


@pytest.mark.parametrize("body", RIGHT, ids=lambda body: body.__name__)
def test_writes_that_the_graph_shows_are_exported(nets, body):
    net, reference = nets(body)
    x = torch.randn(3, 4)
    lab = ortlab.wrap(net)
    outputs, expected = net(x), reference(x)
    outputs.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(net.linear.weight.grad, reference.linear.weight.grad)
    lab.unwrap()


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body.__name__)
def test_reads_of_what_the_graph_does_not_show_are_refused(nets, body):
    net, _ = nets(body)
    lab = ortlab.wrap(net)
    with pytest.raises(BuildError, match="memory was written through another") as caught:
        net(torch.randn(3, 4))
    assert __file__ in caught.value.what
    lab.unwrap()


def test_the_exporter_gets_them_wrong_without_a_word():
    program = """
import io, onnx, numpy, torch
from onnx.reference import ReferenceEvaluator
class Net(torch.nn.Module):
    def forward(self, y):
        y = y * 1
        y.view(-1).mul_(3)
        return y
file = io.BytesIO()
torch.onnx.export(Net(), torch.ones(2, 2), file, **({"dynamo": False} if torch.__version__ >= "2.5" else {}))
outputs = ReferenceEvaluator(onnx.load_model_from_string(file.getvalue())).run(None, {
    onnx.load_model_from_string(file.getvalue()).graph.input[0].name: numpy.ones((2, 2), "float32")})
print(outputs[0][0, 0])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == "1.0"  # and not 3
