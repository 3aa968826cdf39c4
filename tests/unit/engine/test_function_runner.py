"""autograd.Functions inside ONNX Runtime: errors, and how long things live."""

# ruff: noqa: ARG004 - the signatures of a Function are torch's
from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from torch.autograd import Function

from ortlab.engine import extensions
from ortlab.engine.border import take_error
from ortlab.engine.functions import abi as function_abi
from ortlab.engine.functions import context as function_context
from ortlab.errors import ExecutionError

# How ORTModule 1.19.2 asks torch for a training export; the product's own builds collect such warnings.
pytestmark = pytest.mark.filterwarnings("ignore:Setting `training` to something:DeprecationWarning")


class Square(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.kept = [x]
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class DoubleInPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def square(_, h):
    return Square.apply(h)


def square_twice(_, h):
    return Square.apply(h) + Square.apply(h * 0.5)


def double_in_place(_, h):
    return torch.add(h, 1) + DoubleInPlace.apply(h)


class Broken(Function):
    where = ""

    @staticmethod
    def forward(ctx, x):
        if Broken.where == "forward":
            raise ZeroDivisionError("no forward today")
        if Broken.where == "type":
            return [x]
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if Broken.where == "backward":
            raise ZeroDivisionError("no backward today")
        if Broken.where == "count":
            return gradient * 2, gradient
        if Broken.where == "shape":
            return gradient[:1, :3]
        return gradient * 2


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("forward", "Broken.forward failed: ZeroDivisionError: no forward today"),
        ("type", "Broken.forward failed: TypeError: forward returned a list"),
        ("backward", "Broken.backward failed: ZeroDivisionError: no backward today"),
        ("count", "Broken.backward failed: RuntimeError: backward returned 2 gradients, expected 1"),
        ("shape", "Broken.backward failed: RuntimeError: size {[4, 4]} is not expandable to size {[3, 4]}"),
    ],
)
def test_exception_reaches_the_caller_and_the_next_step_works(
    where, message, runners, nets, with_ort, monkeypatch
):
    model = with_ort(nets(lambda _, h: Broken.apply(h))[1])
    x = torch.ones(3, 6)
    model(x).backward()
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    expected = [parameter.grad.clone() for parameter in trained]
    assert len(expected) == 4
    model.zero_grad()
    take_error()

    monkeypatch.setattr(Broken, "where", where)
    with pytest.raises(Exception, match="PythonOp"):
        model(x).backward()
    error = take_error()
    assert isinstance(error, ExecutionError)
    if where != "shape":
        assert message in str(error)
    assert isinstance(error.__cause__, (ZeroDivisionError, TypeError, RuntimeError))
    assert take_error() is None

    monkeypatch.setattr(Broken, "where", "")
    model.zero_grad()
    model(x).backward()
    torch.testing.assert_close([parameter.grad for parameter in trained], expected)
    gc.collect()
    assert function_context.waiting() == 0


def test_interrupt_stays_an_interrupt(runners, nets, with_ort, monkeypatch):
    model = with_ort(nets(lambda _, h: Broken.apply(h))[1])
    model(torch.ones(3, 6))

    def interrupt(ctx, x):
        raise KeyboardInterrupt

    monkeypatch.setattr(Broken, "forward", staticmethod(interrupt))
    with pytest.raises(Exception, match="PythonOp"):
        model(torch.ones(3, 6))
    assert isinstance(take_error(), KeyboardInterrupt)


def test_write_that_the_first_call_did_not_announce_is_an_error(runners, nets, with_ort):
    calls = []

    class Moody(Function):
        @staticmethod
        def forward(ctx, x):
            calls.append(1)
            return x.mul_(2) if len(calls) == 4 else x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    model = with_ort(nets(lambda _, h: Moody.apply(h))[1])
    while len(calls) < 3:  # the export calls it, too
        model(torch.ones(3, 6)).backward()
    with pytest.raises(Exception, match="PythonOp"):
        model(torch.ones(3, 6))
    assert "not in its first call" in str(take_error())


def test_promised_reuse_that_is_not_kept_is_an_error(runners, nets, with_ort):
    class Liar(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

        @staticmethod
        def alias_input(node):
            return [0], [-1]

    with pytest.raises(Exception, match="PythonOp"):
        with_ort(nets(lambda _, h: Liar.apply(h * 1.5))[1])(torch.ones(3, 6))
    assert "alias_input" in str(take_error())


def test_export_says_where_functions_cannot_run(nets, with_ort):
    chosen = extensions._choose_runners()
    extensions.use_runners(function_abi.Runners("unavailable: There is no C++ compiler.", 0, 0))
    try:
        assert extensions.status().functions.startswith("unavailable")
        with pytest.raises(
            Exception, match=r"Square cannot run inside ONNX Runtime here.*\n*.*no C\+\+ compiler"
        ):
            with_ort(nets(square)[1])(torch.ones(3, 6))
        with_ort(nets(lambda _, h: h * 2)[1])(torch.ones(3, 6)).backward()
    finally:
        extensions.use_runners(chosen)
    assert not extensions.status().functions.startswith("unavailable")


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_training_leaks_nothing(runners, nets, with_ort):
    model = with_ort(nets(square)[1])
    x = torch.ones(3, 6)

    def steps(count):
        for _ in range(count):
            model(x).backward()
            model.zero_grad()

    steps(5)
    tensors, objects = live_tensors(), len(gc.get_objects())
    steps(200)
    assert live_tensors() == tensors
    assert len(gc.get_objects()) - objects < 50
    assert function_context.waiting() == 0


def test_forward_without_backward_frees_what_it_saved_with_its_loss(runners, nets, with_ort):
    model = with_ort(nets(square_twice)[1])
    x = torch.ones(3, 6)
    model(x).backward()
    losses = [model(x) for _ in range(3)]
    assert function_context.waiting() == 6
    saved = [weakref.ref(t) for context in function_context._waiting.values() for t in context.saved_tensors]
    assert len(saved) == 6
    losses.pop().backward()  # a later pass's backward leaves the earlier ones alone
    assert function_context.waiting() == 4
    losses.clear()
    gc.collect()
    assert function_context.waiting() == 0
    assert not any(reference() is not None for reference in saved)


def test_two_passes_before_one_backward(runners, nets, with_ort):
    eager, wrapped = nets(square)
    model = with_ort(wrapped)
    for net in (eager, model):
        (net(torch.ones(3, 6)) + net(torch.full((3, 6), 2.0))).backward()
    for parameter, expected in zip(wrapped.parameters(), eager.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6)
    assert function_context.waiting() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_keeps_nothing_and_does_not_use_up_none(mode, runners, nets, with_ort):
    eager, wrapped = nets(double_in_place)
    model = with_ort(wrapped).eval()
    x = torch.linspace(-1, 1, 18).reshape(3, 6)
    with mode():
        torch.testing.assert_close(model(x), eager(x), rtol=1e-5, atol=1e-6)
        before, tensors = sys.getrefcount(None), live_tensors()
        for _ in range(200):
            model(x)
        # ORT's pool never releases its None of an evaluation, so 200 references more are right; without the
        # reference that the runner adds there would be none more, and the pool would release them at exit.
        if sys.version_info < (3, 12):  # None is immortal since
            assert sys.getrefcount(None) - before >= 190
        assert live_tensors() == tensors
    assert function_context.waiting() == 0
