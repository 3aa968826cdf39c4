"""A real SIGINT while ortlab works: the lab is as it was before the call, and goes on."""

from __future__ import annotations

import os
import signal
import threading

import pytest

STEP = """%%ort_step -n 4
loss = nn.functional.cross_entropy(net(inputs), labels)
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""

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

    stop = lab.observe(interrupt)
    with unchanged(net_shell), pytest.raises(KeyboardInterrupt):
        net_shell.run(STEP)
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


def test_during_a_step(net_shell, expected_losses, unchanged, interrupter):
    calls = []
    net_shell.user_ns["wait"] = lambda: (
        calls.append(None) or (interrupter.wait() if len(calls) == 3 else None)
    )
    with unchanged(net_shell), pytest.raises(KeyboardInterrupt):
        net_shell.run(WAITING)
    assert len(calls) == 3
    assert net_shell.run(STEP).losses == expected_losses


def test_during_a_rerun_with_other_options(net_shell, expected_losses, unchanged, interrupter):
    calls = []
    net_shell.user_ns["wait"] = lambda: (
        calls.append(None) or (interrupter.wait() if len(calls) == 7 else None)
    )
    first = net_shell.run(WAITING)
    with unchanged(net_shell), pytest.raises(KeyboardInterrupt):
        net_shell.run("%ort_rerun memory_level=1 engine=eager")
    assert len(calls) == 7
    assert net_shell.run("%ort_rerun").losses == first.losses == expected_losses


def test_during_the_rebuild_of_a_rerun(stepped_shell, unchanged, interrupter):
    lab = stepped_shell.user_ns["lab"]
    stop = lab.observe(
        lambda event: interrupter.arm(0) or interrupter.sent.wait(30) if "Creating" in event else None
    )
    with unchanged(stepped_shell), pytest.raises(KeyboardInterrupt):
        stepped_shell.run("%ort_rerun memory_level=1")
    stop()
    assert stepped_shell.run("%ort_rerun").losses == lab.runs[0].losses
