"""Ctrl-C is raised, whoever swallowed it."""

from __future__ import annotations

import contextlib
import copy
import random
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn

import ortlab
from ortlab.runs.interrupts import interrupts_kept


class Freed:
    """Something whose finaliser is interrupted, which Python reports and does not raise."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def swallow():
    """Be interrupted as an import under a bare `except` is."""
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(0.001)  # where Python notices the signal


def interrupted():
    """Be interrupted where nobody swallows it."""
    with interrupts_kept():
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(1)


def test_a_swallowed_interrupt_is_raised_before_the_next_step():
    with interrupts_kept() as raise_lost:
        raise_lost()  # none yet
        swallow()
        with pytest.raises(KeyboardInterrupt):
            raise_lost()
        raise_lost()  # once is enough


def test_one_that_got_lost_before_the_steps_is_raised_at_the_first():
    with interrupts_kept():
        swallow()
        with interrupts_kept() as raise_lost, pytest.raises(KeyboardInterrupt):
            raise_lost()


def test_one_in_a_finaliser_is_raised():
    with pytest.raises(KeyboardInterrupt), interrupts_kept() as raise_lost:
        free_and_go_on(raise_lost)


def test_one_in_a_finaliser_ends_what_runs_behind_it_and_prints_nothing(capfd):
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        free_and_compute()
    assert capfd.readouterr().err == ""


def free_and_compute():
    begun = time.monotonic()
    Freed()
    while time.monotonic() - begun < 60:
        pass


def free_and_go_on(raise_lost):
    Freed()
    for _ in range(1000):
        raise_lost()


def test_one_that_was_heard_is_forgotten():
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with interrupts_kept() as raise_lost:
        raise_lost()


def test_one_that_nobody_has_heard_is_raised_at_the_end():
    with pytest.raises(KeyboardInterrupt, match="too late"), interrupts_kept(), interrupts_kept():
        swallow()
    with interrupts_kept() as raise_lost:
        raise_lost()


def test_handler_and_hook_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_kept():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_leaves_the_handler_alone():
    seen = []

    def steps():
        with interrupts_kept() as raise_lost:
            raise_lost()
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert seen == [before]


# ---- at every line ------------------------------------------------------------------------------------------------


class Training:
    def __init__(self):
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).bfloat16()
        self.optimizer = torch.optim.NAdam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.inputs = torch.randn(3, 4, dtype=torch.bfloat16)

    def step(self):
        self.optimizer.zero_grad()
        loss = (self.model(self.inputs + torch.rand(3, 4, dtype=torch.bfloat16)) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def state(self):
        parts = self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()
        return copy.deepcopy(parts), torch.get_rng_state()

    def load(self, state):
        (model, optimizer, scheduler), generator = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        for group, held in zip(self.optimizer.state.values(), state[0][1]["state"].values(), strict=True):
            group.update(copy.deepcopy(held))  # with its dtype, which torch's own function casts
        self.scheduler.load_state_dict(scheduler)
        torch.set_rng_state(generator)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def pressed_at(number, call, again=0, where=("ortlab.runs", "contextlib")):
    """Call something and send Ctrl-C at a line of some modules, and again some calls later; count lines."""
    seen, running = {"lines": 0, "calls": 0}, [True]

    def on_line(_frame, event, _):
        if event == "line":
            seen["lines"] += 1
            if seen["lines"] == number:
                signal.raise_signal(signal.SIGINT)
        return on_line

    def on_call(frame, _, __):
        name = str(frame.f_globals.get("__name__"))
        return on_line if name.startswith(where) else None

    def second(frame, *_):
        ours = str(frame.f_globals.get("__name__")).startswith("ortlab.")
        if running and ours and seen["lines"] >= number:
            seen["calls"] += 1
            if seen["calls"] == again:
                signal.raise_signal(signal.SIGINT)

    tracer = sys.gettrace()
    sys.setprofile(second if again else None)
    sys.settrace(on_call)
    try:
        call()
        running.clear()
    except KeyboardInterrupt:
        running.clear()
    finally:
        sys.settrace(tracer)
        sys.setprofile(None)
    return seen["lines"]


def test_ctrl_c_at_any_line_of_wrap_leaves_a_model_that_can_be_wrapped():
    model, made = nn.Linear(2, 2), []
    ortlab.wrap(model).unwrap()
    lines = pressed_at(0, lambda: made.append(ortlab.wrap(model)))
    made.pop().unwrap()
    draw = random.Random(2)
    for again in (0, 1):
        for number in sorted(draw.sample(range(1, lines), 25)):
            pressed_at(number, lambda: made.append(ortlab.wrap(model)), again)
            if made:
                made.pop().unwrap()
            assert type(model) is nn.Linear, (number, again)


def test_ctrl_c_while_sessions_are_freed_leaves_those_that_run():
    """A few are kept for going back; each new one frees the oldest."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    lab = ortlab.wrap(model)
    switches = [
        {"memory_level": level, "intra_op_spinning": on} for level in (0, 1, 2) for on in (False, True)
    ]

    def step():
        model(torch.ones(2, 4)).sum().backward()

    def on_each(which):
        for one in which:
            lab.set(**one)
            step()

    on_each(switches)
    where = ("ortlab.engine.kept_builds",)
    lines = pressed_at(0, lambda: on_each(switches[:1]), where=where)
    for number in range(1, lines, 2):
        on_each(switches)
        pressed_at(number, lambda: on_each(switches[:1]), where=where)
        on_each(switches[::-1])
    lab.unwrap()


CALLS = {
    "step": lambda lab, training: lab.step(training.step, n=2, memory=False, progress=False),
    "rerun": lambda lab, _: lab.rerun(3, memory=False, progress=False),
    "rerun with an option": lambda lab, _: lab.rerun(3, memory=False, progress=False, memory_level=1),
    "restore": lambda lab, _: lab.restore(),
}


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_any_line_leaves_the_one_state_or_the_other(name):
    training = Training()
    lab = ortlab.wrap(training.model, engine="eager")
    lab.step(training.step, n=2, memory=False)
    training.step()
    before, options = training.state(), lab.options
    lines = pressed_at(0, lambda: CALLS[name](lab, training))
    after = training.state()
    training.load(before)
    assert same(training.state(), before)
    draw = random.Random(1)
    for again in (0, 1, 30):
        for number in sorted(draw.sample(range(1, lines), min(lines - 1, 12))):
            pressed_at(number, lambda: CALLS[name](lab, training), again)
            now = training.state()
            assert same(now, before) or same(now, after), (number, again)
            assert (lab.engine, lab.options) == ("eager", options)
            training.load(before)
    handler = signal.getsignal(signal.SIGINT)
    lab.unwrap()
    assert handler is signal.default_int_handler


def test_a_recorded_loop_that_is_interrupted_keeps_its_steps():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lab = ortlab.wrap(model, engine="eager")

    def loop():
        for step in range(6):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            if step == 3:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="Stopped the training; its 4 steps so far are run 1"):
        lab.record(loop)
    assert len(lab.runs[0].steps) == 4
    lab.unwrap()
