"""What belongs to which lab and step depends on what is trained, not on which thread comes first."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import ortlab


class Training:
    """A small training, which meets another one in the middle of each step."""

    def __init__(self, seed, meeting=None):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.inputs, self.meeting = torch.randn(3, 4), meeting

    def meet(self):
        if self.meeting is not None:
            self.meeting.wait(60)

    def step(self):
        self.optimizer.zero_grad()
        loss = (self.model(self.inputs) ** 2).mean()
        self.meet()
        loss.backward()
        self.meet()
        self.optimizer.step()
        return loss.detach()


def in_thread(function):
    found = []

    def run():
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001 - it is raised by who asks
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(120)
        (one,) = found
        if isinstance(one, BaseException):
            raise one
        return one

    return result


@pytest.mark.parametrize("engine", ["ort", "eager"])
@pytest.mark.parametrize("ends_first", [0, 1])
def test_two_labs_are_stepped_in_two_threads(engine, ends_first):
    """The one that begins first ends first, and last."""
    counts = [6, 6]
    counts[ends_first] = 3
    alone = []
    for seed in (0, 1):
        training = Training(seed)
        lab = ortlab.wrap(training.model, engine=engine)
        alone.append(lab.step(training.step, n=counts[seed], memory=False))
        lab.unwrap()

    first_has_begun, ended = threading.Event(), threading.Event()
    trainings = [Training(seed) for seed in (0, 1)]
    labs = [ortlab.wrap(one.model, engine=engine) for one in trainings]

    def step_of(number):
        def step():
            first_has_begun.set()
            step.done += 1
            if number != ends_first and step.done == 4:
                assert ended.wait(60)  # from here on it is alone
            return trainings[number].step()

        step.done = 0
        return step

    steps = [step_of(number) for number in (0, 1)]
    first = in_thread(lambda: labs[0].step(steps[0], n=counts[0], memory=False))
    assert first_has_begun.wait(60)
    second = in_thread(lambda: labs[1].step(steps[1], n=counts[1], memory=False))
    results = [first, second]
    runs: list = [None, None]
    runs[ends_first] = results[ends_first]()
    ended.set()
    runs[1 - ends_first] = results[1 - ends_first]()
    for lab in labs:
        lab.unwrap()
    for one, before in zip(runs, alone, strict=True):
        assert one.losses == pytest.approx(before.losses, rel=1e-5)
        assert len(one.optimizers) == 1
        assert all(step.backward_ms > 0 and step.optimizer_ms > 0 for step in one.steps)
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_another_models_optimizer_in_a_thread_is_left_alone():
    mine, other, meeting = Training(0), Training(1), threading.Barrier(2)
    lab = ortlab.wrap(mine.model, engine="eager")

    def beside():
        for _ in range(2):
            meeting.wait(60)
            other.step()
            meeting.wait(60)

    def step():
        meeting.wait(60)
        meeting.wait(60)
        return mine.step()

    before = [one.detach().clone() for one in other.model.parameters()]
    result = in_thread(beside)
    run = lab.step(step, n=2, memory=False)
    result()
    lab.restore()
    lab.unwrap()
    assert len(run.optimizers) == 1
    assert [int(one["step"]) for one in other.optimizer.state.values()] == [2] * 4
    assert not all(torch.equal(one, now) for one, now in zip(before, other.model.parameters(), strict=True))
    assert mine.optimizer.state == {}


@pytest.mark.parametrize("engine", ["ort", "eager"])
def test_a_thread_that_trains_this_model_belongs_to_the_step(engine):
    training = Training(0)
    lab = ortlab.wrap(training.model, engine=engine)

    def step():
        return in_thread(training.step)()

    run = lab.step(step, n=2, memory=False)
    lab.restore()
    lab.unwrap()
    assert len(run.optimizers) == 1
    assert training.optimizer.state == {}
