"""autograd.Functions inside ONNX Runtime: each promise of PyTorch, trained with both and compared."""

# ruff: noqa: ARG004, PLR0917 - the signatures of a Function are torch's
from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ortlab.engine.border import take_error
from ortlab.engine.functions import abi as function_abi
from ortlab.engine.functions import context as function_context

# How ORTModule 1.19.2 asks torch for a training export; the product's own builds collect such warnings.
pytestmark = pytest.mark.filterwarnings("ignore:Setting `training` to something:DeprecationWarning")

seen: list[object] = []
"""What backwards saw, for the tests that compare it."""


class Scale(Function):
    """Non-tensor arguments of every kind that an export can carry."""

    @staticmethod
    def forward(ctx, x, factor, times, negate, exponents, name, extra, nothing):
        assert (name, extra, nothing) == ("scale", {"bias": 1.0}, None)
        assert isinstance(times, int)
        assert isinstance(negate, bool)
        ctx.total = factor * times * (-1.0 if negate else 1.0) * sum(exponents)
        return x * ctx.total + extra["bias"]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.total, None, None, None, None, None, None, None


EXTRA = {"bias": 1.0}


class Square(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class SquareOfViews(Function):
    """Keeps a view of its input as a saved tensor, and the input in a list on ctx."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.view(-1))
        ctx.kept = ["x", x]
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (flat,) = ctx.saved_tensors
        return (flat.view_as(gradient) + ctx.kept[1]) * gradient


class Exp(Function):
    """Saves its output; the shape is known to ORT, so that a kernel after it may work in place."""

    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y

    @staticmethod
    def infer_shape(node, shapes, types):
        return shapes, types


class DoubleInPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class DoubleInItsBuffer(DoubleInPlace):
    """Tells ORT that the output takes the place of the input, in both directions."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)

    @staticmethod
    def alias_input(node):
        return [0], [0]


class RoundAside(Function):
    """A differentiable output and one that is not, both used."""

    @staticmethod
    def forward(ctx, x):
        rounded = torch.round(x * 4)
        ctx.mark_non_differentiable(rounded)
        return x * 2, rounded

    @staticmethod
    def backward(ctx, gradient, of_rounded):
        assert not of_rounded.any(), "a gradient flowed into a non-differentiable output"
        return gradient * 2


class Halves(Function):
    """Two outputs, of which only one is used: the other's gradient is missing."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, x[:, :2] * 3

    @staticmethod
    def backward(ctx, gradient, missing):
        seen.append((tuple(missing.shape), missing.abs().sum().item()))
        return gradient * 2


class HalvesUnmaterialized(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x[:, :2] * 3

    @staticmethod
    def backward(ctx, gradient, missing):
        seen.append(missing)
        return gradient * 2


class Identity(Function):
    """Returns its input and its gradient themselves."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Add(Function):
    """Returns one gradient for two inputs."""

    @staticmethod
    def forward(ctx, x, y):
        seen.append(ctx.needs_input_grad)
        return x + y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient, gradient


class AddStopped(Function):
    """Leaves out a gradient that is needed."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class AddBias(Function):
    """Returns a gradient of the output's shape for a smaller input, in double, and one None too many."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.double(), None


class Cube(Function):
    """Written in the style with setup_context."""

    @staticmethod
    def forward(x, factor):
        return factor * x**3, x.detach().sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.factor = inputs
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, gradient, _):
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * x**2 * gradient, None


class SquareAgain(Square):
    """Derives from a Function that derives from torch's."""


class Masked(Function):
    """A boolean input and a boolean output."""

    @staticmethod
    def forward(ctx, x, mask):
        assert mask.dtype is torch.bool
        ctx.save_for_backward(mask)
        return x.masked_fill(mask, 0.0), ~mask

    @staticmethod
    def backward(ctx, gradient, _):
        (mask,) = ctx.saved_tensors
        return gradient.masked_fill(mask, 0.0), None


def train(model, parameters, batches):
    """Train, and return everything that could differ: losses, gradients, weights, and what backwards saw."""
    seen.clear()
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses, gradients = [], []
    for rows in batches:
        x = torch.linspace(-1, 1, rows * 6).reshape(rows, 6).requires_grad_()
        loss = model(x)
        loss.backward()
        losses.append(loss.detach())
        gradients += [parameter.grad.clone() for parameter in parameters if parameter.grad is not None] + [
            x.grad
        ]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), gradients, list(seen)


@pytest.fixture
def assert_parity(nets, with_ort):
    def check(body, batches=(3, 3, 3)):
        return compare(*nets(body), with_ort, batches)

    return check


def compare(eager, wrapped, with_ort, batches):
    losses, gradients, eager_seen = train(eager, list(eager.parameters()), batches)
    ort_losses, ort_gradients, ort_seen = train(with_ort(wrapped), list(wrapped.parameters()), batches)
    error = take_error()
    assert error is None, error
    torch.testing.assert_close(ort_losses, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ort_gradients, gradients, rtol=1e-4, atol=1e-6)
    assert function_context.waiting() == 0
    return eager_seen, ort_seen[-len(eager_seen) :] if eager_seen else []


BODIES = {
    "non-tensor arguments": lambda _, h: Scale.apply(h, 0.5, 3, True, (1, 2), "scale", EXTRA, None),
    # Tanh works in place on a buffer that nobody reads after it; only ctx still has it.
    "saved input": lambda _, h: torch.tanh(h) + Square.apply(h),
    "saved view and attribute": lambda _, h: torch.tanh(h) + SquareOfViews.apply(h),
    "saved output, overwritten by the next kernel": lambda _, h: torch.tanh(Exp.apply(h)),
    "dirty input that others read": lambda _, h: torch.add(h, 1) + DoubleInPlace.apply(h),
    "dirty input used afterwards": lambda _, h: DoubleInPlace.apply(h) + h,
    "output in the input's buffer": lambda _, h: DoubleInItsBuffer.apply(h * 1.5),
    "non-differentiable output": lambda _, h: sum(RoundAside.apply(h)),
    "used twice": lambda _, h: Square.apply(h) + Square.apply(h * 0.5),
    "feeding itself": lambda _, h: Square.apply(Square.apply(h)),
    "input returned": lambda _, h: Identity.apply(h) * h,
    "one gradient for two inputs": lambda net, h: Add.apply(h, net.bias.expand_as(h) * 2),
    "input without gradient": lambda _, h: Add.apply(h, torch.ones_like(h)),
    "gradient left out": lambda net, h: AddStopped.apply(h, net.bias.expand_as(h) * 2) + net.bias,
    "gradient of another shape and dtype": lambda net, h: AddBias.apply(h, net.bias * 2),
    "setup_context": lambda _, h: Cube.apply(h, 0.5)[0],
    "indirect subclass": lambda _, h: SquareAgain.apply(h),
    "boolean tensors": lambda _, h: torch.where(
        Masked.apply(h, h > 0.2)[1], Masked.apply(h, h > 0.2)[0], h * 3
    ),
}


@pytest.mark.parametrize("case", BODIES)
def test_trains_like_pytorch(case, runners, assert_parity):
    in_eager, in_ort = assert_parity(BODIES[case])
    assert in_ort == in_eager


def test_missing_gradient_is_zero_of_each_steps_own_shape(runners, assert_parity):
    # 1.19.2's C++ remembers the shape of the first step.
    in_eager, in_ort = assert_parity(lambda _, h: Halves.apply(h)[0], batches=(2, 5, 3))
    assert in_ort == in_eager == [((2, 2), 0.0), ((5, 2), 0.0), ((3, 2), 0.0)]


def test_missing_gradient_is_none_without_materialization(runners, assert_parity):
    in_eager, in_ort = assert_parity(lambda _, h: HalvesUnmaterialized.apply(h)[0])
    assert in_ort == in_eager == [None, None, None]


def test_gradient_that_others_need_may_be_overwritten(runners, nets, with_ort):
    # PyTorch's own result is undefined then, so it is compared with a Function that keeps its hands off.
    class Triple(Function):
        in_place = False

        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mul_(3) if Triple.in_place else gradient * 3

    eager, wrapped = nets(lambda _, h: Triple.apply(h) + h)
    expected = train(eager, list(eager.parameters()), (3, 3, 3))
    Triple.in_place = True
    result = train(with_ort(wrapped), list(wrapped.parameters()), (3, 3, 3))
    torch.testing.assert_close(result[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result[1], expected[1], rtol=1e-4, atol=1e-6)


def test_redefined_function_runs_its_new_code(assert_parity):
    # What a notebook does when the cell with the class is run again.
    def define(factor):
        class Times(Function):
            @staticmethod
            def forward(ctx, x):
                return x * factor

            @staticmethod
            def backward(ctx, gradient):
                return gradient * factor

        return Times

    for factor in (2.0, 5.0):
        function = define(factor)
        assert_parity(lambda _, h, function=function: function.apply(h))


def test_runs_in_another_thread(runners, assert_parity):
    failures = []

    def work():
        try:
            assert_parity(BODIES["saved input"])
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


def test_without_protection_for_functions_that_ort_trusts(runners, assert_parity, monkeypatch):
    from onnxruntime.training.ortmodule import _custom_autograd_function_exporter as exporter
    from onnxruntime.training.ortmodule._pythonop_helper import set_safe_run_mode

    class Triple(Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            assert not torch.is_grad_enabled()
            return x * factor

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.factor, None

    post_process = exporter.post_process_enabling_autograd_function

    def trust(model):
        model = post_process(model)
        names = [
            attribute.s.decode()
            for node in model.graph.node
            if node.op_type == "PythonOp"
            for attribute in node.attribute
            if attribute.name == "func_name"
        ]
        assert len(names) == 1
        return set_safe_run_mode(model, names)

    monkeypatch.setattr(exporter, "post_process_enabling_autograd_function", trust)
    unsafe = []
    run_forward = function_abi.run_forward

    def note(call):
        unsafe.append(not call.safe)
        return run_forward(call)

    monkeypatch.setattr(function_abi, "run_forward", note)
    assert_parity(lambda _, h: Triple.apply(h, 3.0))
    assert unsafe == [True] * 3
