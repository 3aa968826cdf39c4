"""Hooks, checkpoints and torch.compile, around and inside a wrapped model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ortlab
from ortlab.errors import BuildError, WrapError

pytestmark = pytest.mark.zoo


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.b(self.middle(torch.tanh(self.a(x))))

    def middle(self, hidden):
        return hidden


class Checkpointed(Net):
    def forward(self, x):
        return self.b(checkpoint(lambda value: torch.tanh(self.a(value)), x, use_reentrant=False))


class Watching(Net):
    """Keeps the gradient of a tensor inside."""

    def middle(self, hidden):
        if hidden.requires_grad:
            hidden.retain_grad()
        self.hidden = hidden
        return hidden


class Hooking(Net):
    def middle(self, hidden):
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 2)
        return hidden


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def train(model, calls=None, steps=2):
    """Return how often a hook ran in each step, and the last gradients."""
    x, counts = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_(), []
    for _ in range(steps):
        before = len(calls or ())
        model.zero_grad()
        model(x).pow(2).sum().backward()
        counts.append(len(calls or ()) - before)
    return counts, {name: one.grad.clone() for name, one in model.named_parameters()}


def assert_same_training(register, reference, model):
    found = []
    for one in (reference, model):
        calls = []
        register(one, calls)
        found.append(train(one, calls))
    assert found[0][0] == found[1][0], "a hook runs as often as in PyTorch"
    assert found[0][0][-1] > 0
    torch.testing.assert_close(found[1][1], found[0][1])


def doubled(calls):
    def hook(gradient):
        calls.append(1)
        return gradient * 2

    return hook


REGISTER = {
    "forward": lambda model, calls: model.register_forward_hook(
        lambda *got: (calls.append(1), got[2] * 2)[1]
    ),
    "forward pre": lambda model, calls: model.register_forward_pre_hook(
        lambda _, given: (calls.append(1), (given[0] * 2,))[1]
    ),
    "backward": lambda model, calls: model.register_full_backward_hook(lambda *_: calls.append(1)),
    "backward pre": lambda model, calls: model.register_full_backward_pre_hook(
        lambda _, given: (calls.append(1), (given[0] * 2,))[1]
    ),
    "parameter": lambda model, calls: [one.register_hook(doubled(calls)) for one in model.parameters()],
    "after accumulation": lambda model, calls: [
        one.register_post_accumulate_grad_hook(lambda _: calls.append(1)) for one in model.parameters()
    ],
}


@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_on_the_model_and_its_parameters_run_as_in_pytorch(kind, wrap):
    model = Net()
    reference = copy.deepcopy(model)
    lab = wrap(model)
    assert_same_training(REGISTER[kind], reference, model)
    assert lab.status.executed_by == "ort"


def test_a_hook_on_an_output_runs(wrap):
    model = Net()
    reference = copy.deepcopy(model)
    wrap(model)
    found = []
    for one in (reference, model):
        calls = []
        output = one(torch.ones(2, 8))
        output.retain_grad()
        output.register_hook(doubled(calls))
        output.sum().backward()
        found.append((len(calls), output.grad, one.a.weight.grad))
    assert found[0][0] == found[1][0] == 1
    torch.testing.assert_close(found[1][1:], found[0][1:])


def test_a_forward_hook_inside_is_part_of_the_graph_and_said_to_be(wrap):
    model = Net()
    reference = copy.deepcopy(model)
    lab = wrap(model)
    results = []
    for one in (reference, model):
        one.b.register_forward_hook(lambda _module, _given, output: output * 2)
        results.append(train(one)[1])
    torch.testing.assert_close(results[1], results[0])
    (said,) = [message.text for message in lab.messages if "forward hook" in message.text]
    assert said.startswith("b has a forward hook: what it returns is part of the graph")


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("late", [False, True])
def test_a_backward_hook_inside_is_refused_whenever_it_comes(register, late, wrap):
    model = Net()
    wrap(model)
    if late:
        train(model)
    hook = getattr(model.b, register)(lambda *_: None)
    with pytest.raises(BuildError, match="b has a backward hook, which would never run") as caught:
        train(model)
    assert "only=" in caught.value.fix
    hook.remove()
    train(model)


@pytest.mark.parametrize(("kind", "name"), [(Hooking, "register_hook"), (Watching, "retain_grad")])
def test_a_hook_on_a_tensor_inside_is_refused(kind, name, wrap):
    model = kind()
    wrap(model)
    with pytest.raises(BuildError, match=rf"calls {name}\(\) on a tensor that it has made"):
        train(model)


@pytest.mark.parametrize("options", [{}, {"memory_level": 1}])
def test_a_checkpoint_inside(options, wrap):
    model = Checkpointed()
    reference = copy.deepcopy(model)
    lab = wrap(model, **options)
    torch.testing.assert_close(train(model)[1], train(reference)[1])
    assert lab.status.executed_by == "ort"


def test_torch_compile_goes_around_or_in_place_but_not_inside(wrap):
    model = Net()
    reference = copy.deepcopy(model)
    lab = wrap(model)
    x = torch.ones(2, 8)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), reference(x))
    assert lab.status.executed_by == "ort"
    with pytest.raises(WrapError, match=r"torch\.compile"):
        ortlab.wrap(torch.compile(Net(), backend="eager"))
    in_place = copy.deepcopy(reference)
    in_place.compile(backend="eager")
    lab = wrap(in_place)
    torch.testing.assert_close(train(in_place)[1], train(reference)[1])
    assert lab.status.executed_by == "ort"
    torch.compiler.reset()


def test_a_copy_a_pickle_and_a_state_dict_are_those_of_a_plain_model(wrap):
    model = Net()
    lab = wrap(model)
    train(model)
    x = torch.ones(2, 8)
    expected = model(x)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), plain):  # noqa: S301 - its own
        assert type(one) is Net
        assert one.state_dict().keys() == lab.module.state_dict().keys()
        output = one(x)
        torch.testing.assert_close(output, expected)
        assert "ORTModule" not in type(output.grad_fn).__name__
