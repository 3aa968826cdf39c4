"""Ctrl-C is raised, whoever swallowed it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

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
    with interrupts_kept() as raise_lost, pytest.raises(KeyboardInterrupt):
        free_and_go_on(raise_lost)


def test_one_in_a_finaliser_ends_what_runs_behind_it_and_prints_nothing(capfd):
    with interrupts_kept(), pytest.raises(KeyboardInterrupt):
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


def test_one_of_an_earlier_call_is_forgotten():
    with interrupts_kept():
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
