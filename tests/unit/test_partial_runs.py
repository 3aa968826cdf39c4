"""What Ctrl-C leaves of a run: its finished steps as a record, and a lab that stands where the call began."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest
import torch
from torch import nn

import ortlab
from ortlab.records.runs import Ledger, Run
from ortlab.render import html, text
from ortlab.runs.experiment import _Optimizer
from ortlab.runs.interrupts import undisturbed


class Training:
    """A small training whose step sends Ctrl-C to its own process once it has been called so many times."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
        self.inputs, self.labels = torch.randn(8, 6), torch.randint(0, 3, (8,))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.calls, self.stops_at, self.presses = 0, 0, 1

    def step(self):
        loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.calls += 1
        if self.calls == self.stops_at:
            for _ in range(self.presses):
                os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(30)
        return loss

    def state(self):
        values = [one.detach().clone() for one in self.model.parameters()]
        moments = [one.clone() for held in self.optimizer.state.values() for one in held.values()]
        return [*values, *moments, torch.get_rng_state()]


@pytest.fixture
def training():
    return Training()


@pytest.fixture(params=["ort", "eager"])
def lab(training, request):
    lab = ortlab.wrap(training.model, engine=request.param)
    yield lab
    lab.unwrap(forget=True)


def same(one, other) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_finished_steps_are_a_run(lab, training, tmp_path):
    before = training.state()
    training.stops_at = 4
    with pytest.raises(KeyboardInterrupt) as caught:
        lab.step(training.step, n=2000)
    assert str(caught.value) == (
        "Stopped after 3 of 2,000 steps; kept as run 1 (partial). "
        "The lab is as it was before; rerun with %ort_rerun, or lab.rerun()."
    )
    assert same(training.state(), before)
    (run,) = lab.runs
    assert (len(run.steps), run.planned_steps, run.is_partial) == (3, 2000, True)
    assert run.title.endswith(", partial: 3 of 2,000 steps")
    for page in (text.render(run), html.render(run)):
        assert "is partial: Ctrl-C stopped it after 3 of 2,000 steps" in page
    path = lab.runs.save(tmp_path / "runs.json")
    assert Ledger.load(path)[0] == run

    assert training.calls == 0
    training.stops_at = 0
    whole = lab.rerun(5)
    assert whole.losses[:3] == run.losses
    assert not whole.is_partial
    comparison = lab.compare(2, 1)
    assert any("run 1 is partial" in remark for remark in comparison.contrasts[0].remarks)


def test_a_record_without_the_field_is_read_as_a_whole_run(lab, training):
    run = lab.step(training.step, n=2)
    record = json.loads(json.dumps(run.to_dict()))
    del record["planned_steps"]
    assert not Run.from_dict(record).is_partial


def test_without_a_finished_step_nothing_is_kept(lab, training):
    lab.step(training.step, n=2)
    before, training.stops_at = training.state(), 1  # a rerun counts from the start
    with pytest.raises(KeyboardInterrupt, match=r"^Stopped before the first step was done; nothing is kept"):
        lab.rerun(7)
    assert same(training.state(), before)
    assert len(lab.runs) == 1
    training.stops_at = 0
    assert len(lab.rerun().steps) == 2  # the step call before that one


def test_two_quick_presses_are_one(lab, training):
    before = training.state()
    training.stops_at, training.presses = 3, 2
    with pytest.raises(KeyboardInterrupt, match=r"^Stopped after 2 of 9 steps"):
        lab.step(training.step, n=9)
    assert same(training.state(), before)
    assert [len(run.steps) for run in lab.runs] == [2]


def test_a_press_while_weights_are_put_back_comes_after_that(lab, training, monkeypatch):
    """The optimizer's state is put back in the middle of it."""
    lab.step(training.step, n=2)
    lab.restore()
    start = training.state()
    lab.rerun()
    put_back = _Optimizer.put_back

    def pressed(self, state):
        os.kill(os.getpid(), signal.SIGINT)
        put_back(self, state)

    monkeypatch.setattr(_Optimizer, "put_back", pressed)
    with pytest.raises(KeyboardInterrupt):
        lab.restore()
    assert same(training.state(), start)


def test_a_press_in_an_answer_to_ctrl_c_is_dropped():
    done = []

    def answered():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            with undisturbed():
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(0.001)
                done.append("put back")
            raise

    with pytest.raises(KeyboardInterrupt):
        answered()
    assert done == ["put back"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_that_an_interrupt_causes_is_an_interrupt(lab, training):
    """As where Ctrl-C comes in a callback whose result C++ code needs."""

    def step():
        loss = training.step()
        if training.calls == 3:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(30)
            except KeyboardInterrupt:
                message = "Unsupported device type"
                raise RuntimeError(message) from None
        return loss

    with pytest.raises(KeyboardInterrupt, match=r"^Stopped after 2 of 5 steps"):
        lab.step(step, n=5)
