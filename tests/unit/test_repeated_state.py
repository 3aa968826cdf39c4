"""A rerun repeats a step with all its state in Python, or says what it cannot put back."""

from __future__ import annotations

import collections
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import StepError

TICKS = 0


class Trainer:
    """A loop as people write it: everything hangs on one object."""

    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 0.5**epoch)
        self.generator, self.done, self.seen = torch.Generator().manual_seed(1), 0, []

    def step(self):
        self.optimizer.zero_grad()
        loss = (self.model(torch.ones(2, 4)) ** 2).mean() * torch.rand((), generator=self.generator)
        (loss / (1 + self.done)).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.done += 1
        self.seen.append(float(loss.detach()))
        return loss


def scaled(model, scale):
    """Return a step whose loss is multiplied by what a function returns."""
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4)

    def step():
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean() * scale()
        loss.backward()
        optimizer.step()
        return loss

    return step


def averages(model, advance):
    held = {name: one.detach().clone() for name, one in model.named_parameters()}

    def scale():
        advance(held, model)
        return 1 + sum(one.abs().sum() for one in held.values())

    return scaled(model, scale)


def replace(held, model):
    held.update({name: 0.5 * held[name] + one.detach() for name, one in model.named_parameters()})


def write(held, model):
    for name, one in model.named_parameters():
        held[name].mul_(0.5).add_(one.detach())


def counter(model):
    count = 0

    def scale():
        nonlocal count
        count += 1
        return 1 / count

    return scaled(model, scale)


def counter_of_module(model):
    def scale():
        global TICKS  # noqa: PLW0603 - what is tested
        TICKS += 1
        return 1 / TICKS

    return scaled(model, scale)


def counter_of_model(model):
    model.ticks = 0

    def scale():
        model.ticks += 1
        return 1 / model.ticks

    return scaled(model, scale)


def made_in_the_step(model):
    held = SimpleNamespace()

    def scale():
        held.rate = getattr(held, "rate", 1.0) * 0.5
        return held.rate

    return scaled(model, scale)


def array(model):
    held = np.ones(2)

    def scale():
        held[0] *= 0.5
        return float(held[0])

    return scaled(model, scale)


def window(model):
    held = collections.deque([1.0], maxlen=2)

    def scale():
        held.append(len(held) + sum(held))
        return sum(held)

    return scaled(model, scale)


def drawing(generator, draw):
    return lambda model: scaled(model, lambda: draw(generator))


CASES = {
    "an object": lambda model: Trainer(model).step,
    "averages replaced": lambda model: averages(model, replace),
    "averages written to": lambda model: averages(model, write),
    "a counter": counter,
    "a global counter": counter_of_module,
    "a counter on the model": counter_of_model,
    "an attribute made in the step": made_in_the_step,
    "an array": array,
    "a deque": window,
    "torch.Generator": drawing(torch.Generator().manual_seed(1), lambda one: torch.rand((), generator=one)),
    "numpy's Generator": drawing(np.random.default_rng(1), lambda one: float(one.random())),
    "numpy's RandomState": drawing(np.random.RandomState(1), lambda one: float(one.rand())),
    "Python's Random": drawing(random.Random(1), lambda one: one.random()),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("name", CASES)
def test_a_rerun_repeats_every_loss(model, name):
    lab = ortlab.wrap(model, engine="eager")
    first = lab.step(CASES[name](model), n=3, memory=False)
    again = lab.rerun(memory=False)
    lab.unwrap()
    assert again.losses == first.losses
    assert len(set(first.losses)) == 3
    assert again.start_digest == first.start_digest
    assert again.unkept == ()


def growing(model, items):
    """A step that appends to a long list, and computes with its length."""
    held = list(range(items))

    def scale():
        held.append(len(held))
        return 1 + (len(held) - items)

    return scaled(model, scale)


@pytest.mark.parametrize(("items", "is_put_back"), [(3_000, True), (30_000, False)])
def test_a_long_list_is_put_back_or_said(model, items, is_put_back):
    lab = ortlab.wrap(model, engine="eager")
    first = lab.step(growing(model, items), n=3, memory=False)
    again = lab.rerun(memory=False)
    lab.unwrap()
    assert (again.losses == first.losses) is is_put_back
    assert again.unkept == (() if is_put_back else ("held, which is too large to keep a copy of",))


def test_a_failing_step_leaves_python_as_it_was(model):
    trainer = Trainer(model)

    def step():
        trainer.step()
        if trainer.done == 2:
            raise ValueError("of the step")
        return trainer.done

    lab = ortlab.wrap(model, engine="eager")
    with pytest.raises(ValueError, match="of the step"):
        lab.step(step, n=3, memory=False)
    lab.unwrap()
    assert trainer.done == 0
    assert trainer.scheduler.last_epoch == 0
    assert torch.equal(trainer.generator.get_state(), torch.Generator().manual_seed(1).get_state())


def test_what_the_user_changes_between_runs_stays(model):
    settings, names = SimpleNamespace(scale=1.0, ticks=0), {"scale": 1.0}

    def scale():
        settings.ticks += 1
        return settings.scale * names["scale"] / settings.ticks

    lab = ortlab.wrap(model, engine="eager")
    first = lab.step(scaled(model, scale), n=2, memory=False)
    settings.scale, names["scale"] = 2.0, 3.0
    again = lab.rerun(memory=False)
    lab.unwrap()
    assert again.losses[0] == pytest.approx(6 * first.losses[0])
    assert (settings.scale, names["scale"]) == (2.0, 3.0)


def test_what_is_only_written_down_goes_on(model):
    steps, losses = 0, []
    inner = scaled(model, lambda: 1.0)

    def step():
        nonlocal steps
        steps += 1
        losses.append(float(inner().detach()))

    lab = ortlab.wrap(model, engine="eager")
    lab.step(step, n=2, memory=False)
    lab.rerun(memory=False)
    lab.unwrap()
    assert steps == len(losses) == 4


def test_what_cannot_be_put_back_is_said_of_the_run_and_in_comparisons(model):
    ticks = itertools.count(1)
    lab = ortlab.wrap(model, engine="eager")
    first = lab.step(scaled(model, lambda: 1 / next(ticks)), n=3, memory=False)
    lab.rerun(memory=False)
    words = "nothing puts back ticks, a count of itertools"
    pages = [str(first), str(lab.compare())]
    read = type(first).from_dict(first.to_dict())
    lab.unwrap()
    assert all(words in " ".join(page.split()) for page in pages)
    assert read == first


def test_an_error_of_an_object_that_refuses_its_state_is_still_said(model):
    class Refusing:
        def state_dict(self):
            return {}

        def load_state_dict(self, _):
            raise ValueError("no")

    holder = SimpleNamespace(one=Refusing())

    def step():
        holder.one.state_dict()
        return inner()

    inner = scaled(model, lambda: 1.0)
    lab = ortlab.wrap(model, engine="eager")
    lab.step(step, memory=False)
    with pytest.raises(StepError, match="Refusing"):
        lab.restore()
    lab.unwrap()
