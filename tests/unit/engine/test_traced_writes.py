"""A write through one view and a read through another is right in ONNX Runtime, or refused; never silently wrong."""

from __future__ import annotations

import copy
import subprocess

import pytest
import torch
from forked import python
from torch import nn

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


def through_parts(y):
    base = y.detach() * 1  # PyTorch refuses such writes where they have a gradient
    left, right = base.chunk(2, dim=1)
    left.mul_(3)
    right.add_(left)
    first, rest = base.split([1, base.shape[0] - 1])
    first.add_(1)
    return y * base + rest.sum()


def through_one_of_all(y):
    base = y.detach() * 1
    columns = base.unbind(1)
    columns[1].add_(columns[0])
    columns[2].add_(columns[1])
    return y.T * base.T


def through_overlapping_views(y):
    flat, turned, upper = y.view(-1), y.t(), y[1:]
    flat.mul_(2)
    turned[1].add_(1)
    upper[:, 2:] += flat[:2]
    turned.add_(upper.sum())
    return y + flat.view_as(y) + turned.t()


def through_a_view_of_a_permuted_tensor(y):
    """As LED writes its band of attention scores."""
    scores = y.new_zeros(2, y.shape[0], 2, 2)
    scores[:, :, 1:, :] = y.view(1, y.shape[0], 2, 2)[:, :, :1].expand(2, -1, -1, -1)
    turned = scores.permute(0, 2, 1, 3)
    start = turned[:, :1, :, :1]
    turned[:, :1, :, :1] = torch.full_like(start, 2.0).where(start > 0, start)
    turned[:, 1:, :, 1] *= 3
    return scores.sum((0, 2)) + turned[0, 1]


def by_a_scan_over_its_steps(y):
    """As a parallel scan of Mamba: each step is written through a view and read by the next."""
    steps = y.clone().view(y.shape[0], 2, 2)
    for step in range(1, 2):
        previous, present = steps[:, step - 1], steps[:, step]
        present.add_(previous * 3)
    return steps.transpose(1, 2)


def through_a_diagonal(y):
    y[:3, :3].diagonal().add_(1)
    return y * 1


def through_the_diagonal_of_a_product(y):
    """As Barlow Twins computes its loss."""
    product = y.T @ y
    product.div_(y.shape[0])
    kept = product.diagonal().add_(-1).pow_(2)
    return kept.sum() + product.flatten()[:-1].view(product.shape[0] - 1, -1)[:, 1:].pow(2)


SHOWN = [
    through_a_diagonal,
    through_the_diagonal_of_a_product,
    through_parts,
    through_one_of_all,
    through_overlapping_views,
    through_a_view_of_a_permuted_tensor,
    by_a_scan_over_its_steps,
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


def through_another_diagonal(y):
    y[:3, :3].diagonal(1).add_(1)
    return y * 1


def through_an_as_strided(y):
    y.as_strided((2, 2), (4, 1)).add_(1)
    return y * 1


UNKNOWN = [through_another_diagonal, through_an_as_strided]


@pytest.fixture
def nets():
    def make(body):
        torch.manual_seed(2)
        net = Net(body)
        return net, copy.deepcopy(net)

    return make


@pytest.mark.parametrize("body", [*RIGHT, *SHOWN], ids=lambda body: body.__name__)
def test_writes_that_the_graph_shows_are_exported(nets, body, wrap):
    net, reference = nets(body)
    lab = wrap(net)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        outputs, expected = net(x), reference(x)
        outputs.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        torch.testing.assert_close(outputs, expected)
        torch.testing.assert_close(net.linear.weight.grad, reference.linear.weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), reference.eval()(x))
    assert lab.status.executed_by == "ort"


@pytest.mark.parametrize("body", UNKNOWN, ids=lambda body: body.__name__)
def test_reads_of_what_the_graph_does_not_show_are_refused(nets, body, wrap):
    net, _ = nets(body)
    wrap(net)
    for module in (net.train(), net.eval()):
        with pytest.raises(BuildError, match="memory was written through another") as caught:
            module(torch.randn(3, 4))
        assert __file__ in caught.value.what


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
    done = subprocess.run(python("-W", "ignore", "-c", program), capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "1.0"  # and not 3
