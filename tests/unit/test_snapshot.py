"""A snapshot brings back every bit, whatever the optimizer."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import Adafactor

import ortlab
from ortlab.errors import StepError
from ortlab.runs.experiment import DataDigest, Snapshot, is_stateful


def make(optimizer_class, **settings):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    return model, optimizer_class(model.parameters(), **settings)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 4) + random.random() + np.random.rand()  # noqa: NPY002 - the generators under test
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
        (torch.optim.Adamax, {"lr": 0.1}),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_training_repeats_itself_bit_for_bit(optimizer_class, settings, steps_before):
    model, optimizer = make(optimizer_class, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, steps_before)
    snapshot = Snapshot(model, [optimizer, schedule])
    gradient = model[0].weight.grad
    first = train(model, optimizer, 4)
    schedule.step()
    snapshot.put_back()
    assert schedule.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (model[0].weight.grad is None) == (gradient is None)
    assert Snapshot(model, [optimizer, schedule]).digest == snapshot.digest
    assert train(model, optimizer, 4) == first


def test_objects_keep_their_identity():
    model, optimizer = make(torch.optim.AdamW)
    weight = model[0].weight
    snapshot = Snapshot(model, [optimizer])
    train(model, optimizer, 2)
    model.eval()
    snapshot.put_back()
    assert model[0].weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.data.view(-1)[3].add_(1e-6),
        lambda model: model[1].running_mean.add_(1.0),
        lambda _: torch.rand(1),
    ],
    ids=["a weight", "a buffer", "the random state"],
)
def test_the_digest_tells_one_start_from_another(change):
    model, optimizer = make(torch.optim.AdamW)
    before = Snapshot(model, [optimizer]).digest
    change(model)
    assert Snapshot(model, [optimizer]).digest != before


def test_the_seed_for_ort_follows_from_the_random_state():
    model, _ = make(torch.optim.SGD)
    torch.manual_seed(0)
    first = Snapshot(model).ort_seed
    torch.rand(1)
    second = Snapshot(model).ort_seed
    torch.manual_seed(0)
    assert Snapshot(model).ort_seed == first != second
    assert min(first, second) >= 2


def test_the_data_digest_sees_values_shapes_and_order():
    def digest(*values):
        one = DataDigest()
        one.update(*values)
        return one.hexdigest()

    a, b = torch.arange(6), torch.arange(6).flip(0)
    digests = [digest(a), digest(b), digest(a.view(2, 3)), digest(a, b), digest(b, a), digest({"x": a}, 1)]
    assert len(set(digests)) == len(digests)
    assert digest({"x": [a, None]}) == digest({"x": [a.clone(), None]})
    assert digest(torch.ones(3, dtype=torch.bfloat16)) != digest(torch.ones(3, dtype=torch.float16))


def test_what_can_be_kept():
    model, optimizer = make(torch.optim.SGD)
    assert is_stateful(optimizer)
    assert is_stateful(model)
    assert not is_stateful(torch.optim.SGD)
    assert not is_stateful({"state_dict": 1})


def held(model, optimizer):
    """Return every tensor of a model and of its optimizer's state by name, and the numbers of its groups."""
    found = {name: one.detach().clone() for name, one in model.state_dict().items()}
    for index, state in enumerate(
        optimizer.state[one] for group in optimizer.param_groups for one in group["params"]
    ):
        found |= {f"{index}.{name}": copy.deepcopy(value) for name, value in state.items()}
    groups = [{**group, "params": [id(one) for one in group["params"]]} for group in optimizer.param_groups]
    return found, copy.deepcopy(groups), [one.requires_grad for one in model.parameters()]


def is_equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return one == other


@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.NAdam, torch.optim.ASGD, Adafactor, torch.optim.Adam]
)
def test_states_keep_their_dtype(optimizer_class):
    """Torch's load_state_dict casts float32 to the bfloat16 of a parameter."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to(torch.bfloat16)
    optimizer = optimizer_class(
        model.parameters(), lr=0.1, **({"relative_step": False} if optimizer_class is Adafactor else {})
    )

    def steps():
        for _ in range(3):
            model(torch.randn(6, 4, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()

    steps()
    before, snapshot = held(model, optimizer), Snapshot(model, [optimizer])
    steps()
    snapshot.put_back()
    assert is_equal(held(model, optimizer), before)
    after = (steps(), held(model, optimizer))[1]
    snapshot.put_back()
    assert is_equal((steps(), held(model, optimizer))[1], after)


def added_group(model, optimizer, _):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 7.0})


def replaced_parameter(model, optimizer, _):
    model[0].weight = nn.Parameter(torch.zeros(8, 4))


def other_dtype(model, optimizer, _):
    model.half()


def frozen(model, optimizer, _):
    model[0].weight.requires_grad_(False)


def removed_group(model, optimizer, _):
    del optimizer.param_groups[0]["params"][1:]


def another_layer(model, optimizer, _):
    model[3] = nn.Linear(8, 5)


def registered(model, optimizer, _):
    model[0].register_buffer("scale", torch.ones(1))


def other_weights(model, optimizer, another):
    another.weight = nn.Parameter(torch.zeros(2, 2))


def pruned(model, optimizer, _):
    prune.l1_unstructured(model[0], "weight", 0.5)


def other_dropout(model, optimizer, _):
    model[2].p = 0.9


def hooked(model, optimizer, _):
    model[0].register_forward_hook(lambda *_: None)
    model[0].register_full_backward_hook(lambda *_: None)
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    model[3].bias.register_post_accumulate_grad_hook(lambda _: None)
    optimizer.register_step_pre_hook(lambda *_: None)


def made_up(model):
    """Return what modules and tensors hold beside parameters and buffers: their attributes and hooks."""
    hooks = [
        (len(one._backward_hooks or ()), len(one._post_accumulate_grad_hooks or ()))
        for one in model.parameters()
    ]
    parts = [
        {name: len(one) if isinstance(one, dict) else repr(one) for name, one in vars(part).items()}
        for part in model.modules()
    ]
    return parts, hooks


@pytest.mark.parametrize(
    "change",
    [
        added_group,
        pruned,
        other_dropout,
        hooked,
        replaced_parameter,
        other_dtype,
        frozen,
        removed_group,
        another_layer,
        registered,
        other_weights,
    ],
)
def test_a_step_that_fails_is_undone(change):
    model, optimizer = make(torch.optim.AdamW)
    another = nn.Linear(2, 2)
    lab = ortlab.wrap(model)

    def step():
        assert another
        train(model, optimizer, 1)

    lab.step(step, n=2)
    objects = [*model.parameters(), *model.buffers(), *another.parameters()]
    before, around = held(model, optimizer), made_up(model)
    hooks_of_optimizer = dict(optimizer._optimizer_step_pre_hooks)

    def fails():
        assert another
        train(model, optimizer, 1)
        change(model, optimizer, another)
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        lab.step(fails, n=2)
    assert is_equal(held(model, optimizer), before)
    assert made_up(model) == around
    assert dict(optimizer._optimizer_step_pre_hooks) == hooks_of_optimizer
    now = [*model.parameters(), *model.buffers(), *another.parameters()]
    assert [id(one) for one in now] == [id(one) for one in objects]
    lab.step(step, n=1)


def test_hooks_that_the_user_adds_between_runs_stay():
    model, optimizer = make(torch.optim.SGD)
    lab = ortlab.wrap(model, engine="eager")
    lab.step(lambda: train(model, optimizer, 1), n=1, memory=False)
    seen = []
    model[3].register_forward_hook(lambda *_: seen.append(1))
    lab.rerun(memory=False)
    lab.restore()
    lab.unwrap()
    assert seen == [1]
    assert len(model[3]._forward_hooks) == 1


def test_a_scaler_that_was_stopped_between_its_calls_unscales_again():
    model, optimizer = make(torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    off = torch.amp.GradScaler("cpu", enabled=False)

    def step(*, fails=False):
        assert off
        scaler.scale(model(torch.randn(6, 4)).pow(2).mean()).backward()
        scaler.unscale_(optimizer)
        if fails:
            raise ZeroDivisionError("of the user")
        scaler.step(optimizer)
        scaler.update()

    lab = ortlab.wrap(model, engine="eager")
    lab.step(step, memory=False)
    with pytest.raises(ZeroDivisionError):
        lab.step(lambda: step(fails=True), memory=False)
    lab.step(step, memory=False)  # torch refuses to unscale twice
    lab.unwrap()


class Stubborn:
    """Refuses the state that it has given."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise RuntimeError("never again")


def test_what_refuses_its_state_keeps_nothing_else_from_it():
    model, optimizer = make(torch.optim.AdamW)
    stubborn = Stubborn()
    snapshot = Snapshot(model, [stubborn, optimizer])
    before = held(model, optimizer)
    train(model, optimizer, 2)
    with pytest.raises(StepError, match=r"Stubborn \(never again\) could not be put back"):
        snapshot.put_back()
    assert is_equal(held(model, optimizer), before)
    try:
        _ = 1 / 0
    except ZeroDivisionError as error:
        snapshot.put_back()  # says so in the user's error instead of hiding it
        assert "never again" in error.__notes__[0]  # noqa: PT017


def test_two_quick_interrupts_leave_everything_as_it_was():
    model, optimizer = make(torch.optim.NAdam, lr=0.01)
    lab = ortlab.wrap(model)
    lab.step(lambda: train(model, optimizer, 1), n=2)
    draw = random.Random(11)

    def interrupted():
        for seconds in (0.2 * draw.random(), 0.06 * draw.random()):
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)

    calls = (lambda: lab.step(lambda: train(model, optimizer, 1), n=2000), lambda: lab.rerun(n=2000))
    for number in range(10):
        before = held(model, optimizer)
        thread = threading.Thread(target=interrupted)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the second one may come after the call
            thread.start()
            calls[number % 2]()
        with contextlib.suppress(KeyboardInterrupt):
            thread.join()
        with contextlib.suppress(KeyboardInterrupt):
            thread.join()
            time.sleep(0.02)
        assert is_equal(held(model, optimizer), before)
