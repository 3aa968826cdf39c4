"""Times and memory, with a clock that the test winds by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortlab.runs.process_memory import ResidentSet, memory_probe
from ortlab.runs.stopwatch import Stopwatch, synchronizer


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_ms(self, milliseconds: float) -> None:
        self.now += milliseconds / 1000


@pytest.fixture
def clock():
    return Clock()


class Timed(torch.autograd.Function):
    """Takes 7 ms of the test's clock in backward."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.pass_ms(7)
        return gradient, None


def test_a_step_is_split_into_its_parts(clock):
    class SlowSGD(torch.optim.SGD):
        def step(self, closure=None):
            clock.pass_ms(5)
            return super().step(closure)

    model = nn.Linear(2, 1)
    seen = []
    watch = Stopwatch(clock, on_optimizer=seen.append)
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    with watch.watching():
        watch.start_step()
        clock.pass_ms(1)
        with watch.forward():
            clock.pass_ms(3)
            loss = Timed.apply(model(torch.ones(1, 2)), clock).sum()
        loss.backward()
        optimizer.step()
        with watch.excluded():
            clock.pass_ms(1000)
        clock.pass_ms(2)
        total = watch.elapsed_ms()
    assert (watch.forward_ms, watch.backward_ms, watch.optimizer_ms) == pytest.approx((3, 7, 5))
    assert total == pytest.approx(1 + 3 + 7 + 5 + 2)
    assert watch.backward_root is loss
    assert (watch.forward_calls, watch.backward_calls) == (1, 1)
    assert seen == [optimizer]


def test_initialisation_and_excluded_time_are_no_part_of_forward(clock):
    watch = Stopwatch(clock)
    with watch.forward():
        clock.pass_ms(500)
        watch.initialization_ms += 500
        with watch.excluded():
            clock.pass_ms(40)
        clock.pass_ms(3)
    assert watch.forward_ms == pytest.approx(3)
    assert watch.elapsed_ms() == pytest.approx(3)


def test_a_backward_within_a_backward_counts_once(clock):
    model = nn.Linear(2, 2)
    watch = Stopwatch(clock)
    with watch.watching():
        watch.start_step()
        x = torch.ones(1, 2, requires_grad=True)
        checkpoint(lambda value: Timed.apply(model(value), clock), x, use_reentrant=True).sum().backward()
    assert watch.backward_calls == 1
    assert watch.backward_ms == pytest.approx(7)


def test_watching_leaves_torch_as_it_was(clock):
    backward = torch.autograd.backward
    watch = Stopwatch(clock)
    with watch.watching():
        assert torch.autograd.backward is not backward
    with pytest.raises(RuntimeError, match="does not require grad"), watch.watching():
        torch.ones(1).backward()
    assert torch.autograd.backward is backward
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    watch.start_step()
    optimizer.step()
    assert watch.optimizer_ms == 0
    assert watch.backward_calls == 0


def test_the_device_is_waited_for(clock):
    waits = []
    watch = Stopwatch(clock, synchronize=lambda: waits.append(clock.now))
    with watch.forward():
        clock.pass_ms(1)
    assert len(waits) == 3  # once for the step, and at both ends of the forward


def test_the_resident_set_rises_with_what_is_allocated():
    size = 64 * 1024 * 1024
    probe = ResidentSet()
    probe.start()
    block = torch.ones(size // 4)
    held = probe.read()
    del block
    released = probe.read()
    probe.start()
    after = probe.read()
    assert held.kind == "resident set"
    assert size * 0.9 < held.rise_bytes < size * 1.5
    # The kernel sums the counters of its processors only now and then, so two readings differ by some pages.
    assert released.peak_bytes == pytest.approx(held.peak_bytes, abs=1024 * 1024)
    assert after.rise_bytes < size * 0.5


def test_the_cpu_needs_no_waiting():
    assert synchronizer(torch.device("cpu")) is None
    assert isinstance(memory_probe(torch.device("cpu")), ResidentSet)
