"""What a forward writes into its arguments stands in the tensors of the call, as in PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import BuildError, ExecutionError

pytestmark = pytest.mark.usefixtures("no_fallback")


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body

    def forward(self, x, labels):
        return self.body(self.linear, x, labels)


def whole(linear, x, _):
    x.mul_(2)
    return linear(x)


def a_column(linear, x, _):
    x[:, 0] = 5.0
    return linear(x)


def through_a_view(linear, x, _):
    x.view(-1).add_(1)
    return linear(x)


def in_place_activation(linear, x, _):
    return linear(nn.functional.relu(x, inplace=True))


def labels_left_out(linear, x, labels):
    labels[labels == 0] = -100
    return nn.functional.cross_entropy(linear(x), labels)


def without_gradient(linear, x, _):
    with torch.no_grad():
        x.add_(linear(x))
    return linear(x)


def detached(linear, x, _):
    x = x.detach()
    x.mul_(2)
    return linear(x)


def into_out(linear, x, labels):
    torch.mul(x, 2, out=x)
    return linear(x) + labels[:, None]


def with_what_has_a_gradient(linear, x, _):
    x.add_(linear(x * 2))
    return x * 3


def only_written(linear, x, labels):
    y = linear(x)
    labels.zero_()
    return y


WRITES = [
    whole,
    a_column,
    through_a_view,
    in_place_activation,
    labels_left_out,
    without_gradient,
    detached,
    into_out,
    with_what_has_a_gradient,
    only_written,
]


def batches():
    torch.manual_seed(1)
    return [(torch.randn(size, 4), torch.arange(size) % 4) for size in (3, 3, 5)]


@pytest.mark.parametrize("body", WRITES, ids=lambda body: body.__name__)
def test_a_batch_has_what_was_written_to_it(body):
    torch.manual_seed(0)
    model = Net(body)
    reference, lab = copy.deepcopy(model), ortlab.wrap(model)
    for call, expected in zip(batches(), batches(), strict=True):
        for _ in range(2):  # a batch that comes twice is written to twice
            given, known = ([one.detach() for one in each] for each in (call, expected))
            output, wanted = model(*given), reference(*known)
            output.sum().backward()
            wanted.sum().backward()
            torch.testing.assert_close(output, wanted)
            torch.testing.assert_close(given, known)
            torch.testing.assert_close(model.linear.weight.grad, reference.linear.weight.grad)
    with torch.no_grad():
        call, expected = batches()[0], batches()[0]
        torch.testing.assert_close(model.eval()(*call), reference.eval()(*expected))
        torch.testing.assert_close(call, expected)
    assert lab.status.executed_by == "ort"
    lab.unwrap()


class Residual(nn.Module):
    """A block of the first residual networks: its activation writes to what the skip connection reads."""

    def __init__(self):
        super().__init__()
        self.before, self.block = nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x):
        h = self.before(x)
        return self.block(h) + h


def test_an_activation_that_a_part_writes_to_goes_on_with_its_gradient():
    torch.manual_seed(0)
    model = Residual()
    reference, lab = copy.deepcopy(model), ortlab.wrap(model, only=["block"])
    for size in (3, 5):
        x = torch.randn(size, 4)
        output, wanted = model(x), reference(x)
        output.pow(2).sum().backward()
        wanted.pow(2).sum().backward()
        torch.testing.assert_close(output, wanted)
        torch.testing.assert_close(model.before.weight.grad, reference.before.weight.grad)
    lab.unwrap()


def test_arguments_that_share_the_memory_that_is_written_to_are_refused(wrap):
    model = Net(lambda linear, x, y: linear(x.mul_(2) + y))
    wrap(model)
    x = torch.randn(3, 4)
    model(x, torch.randn(3, 4))
    before = x.clone()
    with pytest.raises(ExecutionError, match="another one shares its memory"):
        model(x, x)
    torch.testing.assert_close(x, before)


def test_an_argument_that_is_written_to_in_an_unknown_way_is_refused():
    def diagonal(linear, x, _):
        y = linear(x)
        x[:3, :3].diagonal(1).add_(1)
        return y * 1

    for mode in (True, False):
        model = Net(diagonal).train(mode)
        lab = ortlab.wrap(model)
        call = batches()[0]
        with pytest.raises(BuildError, match="memory was written through another"):
            model(*call)
        torch.testing.assert_close(call, batches()[0])
        lab.unwrap()


def test_data_of_an_argument_is_that_of_each_batch():
    """No trace sees `.data`, and a graph for evaluation kept that of the first batch."""
    model = Net(lambda linear, x, _: linear(x) + x.data * 2).eval()
    reference, lab = copy.deepcopy(model), ortlab.wrap(model)
    for call in batches():
        with torch.no_grad():
            torch.testing.assert_close(model(*call), reference(*call))
    lab.unwrap()
