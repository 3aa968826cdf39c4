"""A custom Function whose backward is wrong: trained as PyTorch trains it, and seen by the check of its gradient."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import StepError
from ortlab.render import html, text


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class WrongSquare(Square):
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * gradient


class SquareWithSymbolic(WrongSquare):
    """Its symbolic has another gradient than its backward: ONNX Runtime would derive 2 x from the graph."""

    @staticmethod
    def symbolic(g, x):
        return g.op("Mul", x, x)


class RoundedStraightThrough(torch.autograd.Function):
    """With a context of its own, and a gradient that is meant to differ."""

    @staticmethod
    def forward(x, steps):
        return torch.round(x * steps) / steps

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(_ctx, gradient):
        return gradient, None


class SingleOnly(Square):
    """Takes float32, as a kernel of one's own often does."""

    @staticmethod
    def forward(ctx, x):
        assert x.dtype is torch.float32, "float32 only"
        return Square.forward(ctx, x)


square, kept_apply = Square.apply, WrongSquare.apply  # as users write it, bound before any check


class Net(nn.Module):
    def __init__(self, *functions) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.functions = functions

    def forward(self, x):
        x = self.norm(self.linear(x))
        for function in self.functions:
            x = function(x)
        return x.sum()


X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.mark.parametrize("kind", [WrongSquare, SquareWithSymbolic])
def test_ort_runs_the_users_own_backward_wrong_as_it_is(kind):
    model = Net(kind.apply)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lab = ortlab.wrap(model)

    def step():
        loss = model(X)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = lab.step(step, n=3)
    gradient = model.linear.weight.grad.clone()
    assert run.executed_by == "ort"
    assert lab.set(engine="eager").rerun().losses == pytest.approx(run.losses, rel=1e-5)
    torch.testing.assert_close(model.linear.weight.grad, gradient)
    assert not ortlab.parity.check_functions(model, X).ok  # which the parity of the two cannot show
    lab.unwrap()
    if kind is SquareWithSymbolic:
        assert callable(kind.symbolic)  # it is there again, for other exports


def test_a_wrong_backward_is_seen_and_a_right_one_is_not_blamed():
    model = Net(square, kept_apply, square, lambda x: RoundedStraightThrough.apply(x, 8))
    state, running = torch.get_rng_state(), model.norm.running_mean.clone()
    report = ortlab.parity.check_functions(model, X)
    found = {check.name.rpartition(".")[2]: check for check in report.checks}
    assert {name: (one.state, one.calls) for name, one in found.items()} == {
        "Square": ("agrees", 2),
        "WrongSquare": ("differs", 1),
        "RoundedStraightThrough": ("differs", 1),
    }
    assert not report.ok
    said = re.fullmatch(
        r"output 0, input 0: its forward changes by (\S+), its backward says (\S+)",
        found["WrongSquare"].found,
    )
    assert float(said[2]) / float(said[1]) == pytest.approx(1.5, rel=1e-4)  # 3 x for 2 x
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.norm.running_mean, running)
    assert model.linear.weight.grad is None
    for kind in (Square, WrongSquare, RoundedStraightThrough):
        assert kind.forward.__name__ == "forward"
    assert "straight-through" in text.render(report)
    assert "ortlab-bad" in html.render(report)


def test_what_cannot_be_checked_is_said_and_not_called_right():
    report = ortlab.parity.check_functions(Net(SingleOnly.apply), X)
    assert [(one.state, report.ok) for one in report.checks] == [("not checked", True)]
    assert "float32 only" in report.checks[0].found
    assert "not checked" in text.render(report)
    assert "calls none" in text.render(ortlab.parity.check_functions(Net(), X))
    assert "agrees" in text.render(ortlab.parity.check_functions(Net(square), X))


def test_a_batch_that_does_not_fit_is_an_error():
    with pytest.raises(StepError, match="forward of Net failed") as caught:
        ortlab.parity.check_functions(Net(square), X[:, :2])
    assert caught.value.fix
    assert Square.forward.__name__ == "forward"
