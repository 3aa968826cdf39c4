"""A time or a draw of the system that decides is refused; one that goes into a log is said."""
# ruff: noqa: DTZ005, DTZ011 - as forwards are written

from __future__ import annotations

import copy
import datetime as dt
import math
import os
import random
import secrets
import time
import uuid
from os import urandom
from time import perf_counter
from timeit import default_timer

import numpy as np
import pytest
import torch
from fault_cases import Deciding
from torch import nn

from ortlab.errors import BuildError

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

STARTED = time.time()
SYSTEM = random.SystemRandom()


def in_a_buffer(h):
    h[0] = time.monotonic()
    return h


def imported_inside(h):
    from time import process_time

    return h * process_time()


@pytest.mark.parametrize(
    ("decide", "line"),
    [
        (lambda h: h * time.time(), "h * time.time()"),
        (lambda h: (time.perf_counter() - STARTED) * h, "perf_counter() - STARTED"),
        (lambda h: h * (perf_counter() / 2), "perf_counter() / 2"),
        (lambda h: h + default_timer(), "default_timer()"),
        (lambda h: h * (time.time_ns() / 1e9), "time.time_ns() / 1e9"),
        (lambda h: h * torch.tensor([time.time(), 1, 2, 3]), "torch.tensor"),
        (lambda h: h * torch.full((4,), round(time.monotonic())), "torch.full"),
        (lambda h: h[:, : time.time_ns() % 3 + 1], "time.time_ns() % 3"),
        (lambda h: h * 2 if time.time() - STARTED < 60 else h, "time.time() - STARTED < 60"),
        (lambda h: h * min(1.0, time.time() - STARTED), "min(1.0"),
        (lambda h: h * 2 if time.time_ns() % 2 else h, "time.time_ns() % 2"),
        (in_a_buffer, "h[0] = time.monotonic()"),
        (imported_inside, "h * process_time()"),
    ],
)
def test_a_time_that_a_tensor_or_a_branch_takes_is_refused_with_its_line(decide, line, wrap):
    lab = wrap(Deciding(lambda h, _: decide(h)).train())
    with pytest.raises(
        BuildError, match=r"A time that the forward reads .*test_clocks.py, line \d+"
    ) as refusal:
        lab.module(torch.rand(3, 4))
    assert line in refusal.value.what
    assert refusal.value.why
    assert "hand the time over" in refusal.value.fix


@pytest.mark.parametrize(
    ("decide", "line"),
    [
        (lambda h: h * os.urandom(1)[0], "os.urandom(1)"),
        (lambda h: h * int.from_bytes(urandom(2), "big"), "urandom(2)"),
        (lambda h: h * secrets.randbelow(9), "secrets.randbelow(9)"),
        (lambda h: h * secrets.choice([1, 2, 3]), "secrets.choice"),
        (lambda h: h * SYSTEM.random(), "SYSTEM.random()"),
        (lambda h: h * random.Random().random(), "random.Random()"),
        (lambda h: h * np.random.default_rng().random(), "default_rng()"),
        (lambda h: h * np.random.RandomState().rand(), "RandomState()"),
    ],
)
def test_a_draw_of_the_system_is_refused_with_its_line(decide, line, wrap):
    lab = wrap(Deciding(lambda h, _: decide(h)).train())
    with pytest.raises(BuildError, match=r"Python or numpy draws .*test_clocks.py, line \d+") as refusal:
        lab.module(torch.rand(3, 4))
    assert line in refusal.value.what


class Logging(nn.Module):
    """As a training script times its parts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.log = []

    def forward(self, x):
        started, began = time.perf_counter(), dt.datetime.now()
        h = self.layer(x)
        elapsed = time.perf_counter() - started
        name = f"{uuid.uuid4()} {secrets.token_hex(4)} {elapsed:.3f} s, %.1f ms" % (1e3 * elapsed)
        date = f"{began:%H:%M} {dt.datetime.now() - began} {began.isoformat()} {time.ctime()}"
        self.log.append((elapsed, name, date))
        seeded = np.random.RandomState(2)
        assert isinstance(seeded, np.random.RandomState)
        return h * np.random.default_rng(0).random() * random.Random(1).random() * seeded.rand()


def test_a_time_for_a_log_is_said_and_does_not_stop_the_export(wrap):
    model = Logging().train()
    reference, x = copy.deepcopy(model), torch.rand(3, 4)
    clocks = [vars(time).copy(), vars(os).copy(), random.Random.seed, np.random.RandomState]
    lab = wrap(model)
    for _ in range(2):
        torch.testing.assert_close(model(x), reference(x))
    assert lab.status.executed_by == "ort"
    assert clocks == [vars(time), vars(os), random.Random.seed, np.random.RandomState]
    (said,) = [one for one in lab.messages if "reads the clock" in one.text]
    assert said.level == "WARNING"
    assert said.text.count("test_clocks.py, line") == 4
    assert "elapsed = time.perf_counter() - started" in said.text
    assert model.log
    for elapsed, name, date in model.log:
        assert 0 < elapsed < 60  # outside a trace it is a number like any other
        assert " s, " in name
        assert ":" in date


class Noisy(torch.autograd.Function):
    """Draws from the system and reads a clock in each step, since ONNX Runtime calls it in each."""

    @staticmethod
    def forward(_, x):
        return x * (1 + os.urandom(1)[0] / 255) + 0 * time.time()

    @staticmethod
    def backward(_, grad):
        return grad


def test_a_function_may_draw_and_read_clocks(wrap):
    lab = wrap(Deciding(lambda h, _: Noisy.apply(h)).train())
    x = torch.rand(3, 4)
    results = {lab.module(x).sum().item() for _ in range(8)}
    assert len(results) > 1
    assert lab.status.executed_by == "ort"
    assert not any("clock" in one.text for one in lab.messages)


def test_what_a_date_decides_is_said(wrap):
    lab = wrap(Deciding(lambda h, _: h * 2 if dt.date.today().weekday() > 4 else h).train())
    lab.module(torch.rand(3, 4))
    (said,) = [one for one in lab.messages if "reads the clock" in one.text]
    assert "test_clocks.py, line" in said.text
    assert "what comes from a date, stays as it is now" in said.text


def test_a_model_that_reads_no_clock_says_nothing(wrap):
    lab = wrap(Deciding(lambda h, _: h * math.sqrt(2)).train())
    lab.module(torch.rand(3, 4))
    assert not any("clock" in one.text for one in lab.messages)
