"""A real SIGINT while ortlab works: one line says what is kept, the lab is as it was before the call, and goes on."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import pytest

from ortlab.lab.following import observe

from .conftest import STEP, lab_state

# Where the third step of a call waits for the signal, after the weights have changed twice.
WAITING = STEP.replace("optimizer.zero_grad()", "optimizer.zero_grad()\nwait()")


class Interrupter:
    """Sends SIGINT to this process from a thread, once, a moment after `arm`."""

    def __init__(self) -> None:
        self.sent = threading.Event()
        self._timer: threading.Timer | None = None

    def arm(self, delay_s: float) -> None:
        if self._timer is None:
            self._timer = threading.Timer(delay_s, self._send)
            self._timer.start()

    def _send(self) -> None:
        self.sent.set()
        os.kill(os.getpid(), signal.SIGINT)

    def wait(self) -> None:
        """Send the signal and do nothing until it has come."""
        self.arm(0.05)
        threading.Event().wait(30)

    def join(self) -> None:
        if self._timer is not None:
            self._timer.join()


@pytest.fixture
def interrupter():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    one = Interrupter()
    yield one
    one.join()


def waiting_at(interrupter, call):
    """Return what waits for the signal at one of its calls, which are counted where no rerun counts anew."""
    calls = ctypes.c_int()

    def wait():
        calls.value += 1
        if calls.value == call:
            interrupter.wait()

    return wait, calls


def stopped(shell, cell: str) -> str:
    """Run a cell that is interrupted, and return the line that IPython shows in place of a traceback."""
    with pytest.raises(KeyboardInterrupt) as caught:
        shell.run(cell)
    (line,) = caught.value._render_traceback_()
    assert line == str(caught.value)
    assert "\n" not in line
    return line


def same_but_for_one_more_run(before, after) -> None:
    assert after["runs"][:-1] == before["runs"]
    assert len(after["runs"]) == len(before["runs"]) + 1
    assert {**after, "runs": []} == {**before, "runs": []}


@pytest.fixture
def expected_losses(net_shell):
    """What the step gives if nothing interrupts it."""
    run = net_shell.run(STEP)
    lab = net_shell.user_ns["lab"]
    lab.restore()
    lab.unwrap(forget=True)  # so that the next call exports and builds again
    net_shell.run("lab = %ort_wrap net --no-panel")
    return run.losses


@pytest.mark.parametrize("stage", ["Exporting", "Building", "Creating"])
def test_during_a_build(net_shell, expected_losses, unchanged, interrupter, stage):
    lab = net_shell.user_ns["lab"]

    def interrupt(event: str) -> None:
        if event.startswith(f"progress:{stage}"):
            interrupter.arm(0)
            assert interrupter.sent.wait(30)

    stop = observe(lab, interrupt)
    with unchanged(net_shell):
        line = stopped(net_shell, STEP)
    assert line.startswith("Stopped before the first step was done; nothing is kept")
    stop()
    assert interrupter.sent.is_set()
    assert lab.status.state == "not built"
    assert net_shell.run(STEP).losses == expected_losses


def test_in_the_middle_of_an_export(net_shell, expected_losses, unchanged, interrupter):
    class Slow(type(net_shell.user_ns["net"][1])):
        def forward(self, x):
            interrupter.wait()
            return super().forward(x)

    net = net_shell.user_ns["net"]
    quick = net[1]
    net[1] = Slow()
    with unchanged(net_shell), pytest.raises(KeyboardInterrupt):
        net_shell.run(STEP)
    net[1] = quick
    assert net_shell.run(STEP).losses == expected_losses


@pytest.mark.parametrize("at", [1, 3])
def test_during_a_step(net_shell, expected_losses, unchanged, interrupter, at):
    lab = net_shell.user_ns["lab"]
    net_shell.user_ns["wait"], calls = waiting_at(interrupter, at)
    before = lab_state(net_shell)
    line = stopped(net_shell, WAITING)
    assert calls.value == at
    if at == 1:
        assert lab_state(net_shell) == before
    else:
        same_but_for_one_more_run(before, lab_state(net_shell))
        assert line.startswith(
            "Stopped after 2 of 4 steps; kept as run 1 (partial). The lab is as it was before"
        )
        assert lab.runs[0].losses == expected_losses[:2]
        assert net_shell.run("%ort_rerun").losses == expected_losses
        lab.restore()
    assert net_shell.run(STEP).losses == expected_losses


def test_during_a_rerun_with_other_options(net_shell, expected_losses, interrupter):
    net_shell.user_ns["wait"], calls = waiting_at(interrupter, 7)
    first = net_shell.run(WAITING.replace("\n", " --no-memory\n", 1))
    before = lab_state(net_shell)
    line = stopped(net_shell, "%ort_rerun memory_level=1 engine=eager")
    assert "2 of 4 steps; kept as run 2 (partial)" in line
    same_but_for_one_more_run(before, lab_state(net_shell))
    assert calls.value == 7
    assert net_shell.user_ns["lab"].runs[1].engine == "eager"
    assert net_shell.run("%ort_rerun").losses == first.losses == expected_losses


def test_during_the_rebuild_of_a_rerun(stepped_shell, unchanged, interrupter):
    lab = stepped_shell.user_ns["lab"]
    stop = observe(
        lab, lambda event: interrupter.arm(0) or interrupter.sent.wait(30) if "Creating" in event else None
    )
    with unchanged(stepped_shell), pytest.raises(KeyboardInterrupt):
        stepped_shell.run("%ort_rerun memory_level=1")
    stop()
    assert stepped_shell.run("%ort_rerun").losses == lab.runs[0].losses
