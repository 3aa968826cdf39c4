"""Bisection on a real model and real ONNX Runtime sessions: numbers, failures, the user's own metric, interrupts."""

from __future__ import annotations

import ctypes
import functools
import math
import random

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import LedgerError, OptionError, StepError
from ortlab.render import text
from ortlab.runs import recording
from ortlab.runs.stopwatch import Stopwatch
from ortlab.studies.bisection import (
    NO_CHANGE,
    RESPONSIBLE,
    TOO_NOISY,
    UNFINISHED,
    Bisection,
    Metric,
    Trial,
    ratio_of_pairs,
)
from ortlab.studies.bisection_search import _apart

# What changes nothing in the numbers of these models. 1.19.2 reads the last when it is imported.
INNOCENT = {
    "intra_op_spinning": True,
    "cpu_memory_arena": False,
    "compute_optimizer": False,
    "deepcopy_before_export": False,
    "sdpa_fallback": True,
}


class Doubling(torch.autograd.Function):
    """Multiplies by two; with its backward, by three, which only custom_autograd keeps."""

    @staticmethod
    def forward(_ctx, x):
        return x * 2

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 3


class Doubled(nn.Module):
    """A model whose gradients depend on a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.outer(Doubling.apply(self.inner(x))).square().mean()


class Training:
    """A model, an optimizer and a step; the n-th call may raise."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = Doubled()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.randn(8, 4)
        self.raises, self.made = {}, ctypes.c_int()  # in C, where no way back to the start looks

    @property
    def calls(self) -> int:
        return self.made.value

    def step(self):
        self.made.value += 1
        if self.calls in self.raises:
            raise self.raises.pop(self.calls)
        self.optimizer.zero_grad()
        loss = self.model(self.x)
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.fixture(scope="module")
def trained():
    training = Training()
    lab = ortlab.wrap(training.model)
    lab.step(training.step, n=2)
    yield lab, training
    lab.unwrap()


@pytest.fixture
def ready(trained):
    lab, training = trained
    training.raises.clear()
    before = (
        [one.detach().clone() for one in training.model.parameters()],
        lab._bench.configuration,
        len(lab.runs),
    )
    generator = torch.get_rng_state()
    yield lab, training
    assert all(torch.equal(a, b) for a, b in zip(before[0], training.model.parameters(), strict=True))
    assert (lab._bench.configuration, len(lab.runs)) == before[1:]
    assert torch.equal(generator, torch.get_rng_state())


def level(run):
    """Tell a memory level."""
    return run.options.memory_level


def test_the_switch_that_changes_the_loss_is_found_among_others(ready):
    lab, _ = ready
    bisection = lab.bisect("loss", changes={**INNOCENT, "custom_autograd": False}, progress=False)
    assert bisection.outcome == RESPONSIBLE
    assert [one.names for one in bisection.culprits] == [("custom_autograd",)]
    assert bisection.runs <= 2 * math.log2(6) + 4
    alone = bisection.of(bisection.culprits[0])
    assert alone.value == pytest.approx(bisection.whole.value, rel=1e-3)
    assert bisection.rest.value <= bisection.tolerance
    shown = " ".join(text.render(bisection).split())
    assert f"Without it, the other {len(bisection.rest.names)} changes: " in shown
    assert lab.bisections[-1] is bisection


def test_parity_names_the_same_switch_by_its_distance_to_pytorch(ready):
    lab, _ = ready
    changes = {"custom_autograd": False, "compute_optimizer": False, "intra_op_spinning": True}
    bisection = lab.bisect("parity", changes=changes, progress=False)
    assert [one.names for one in bisection.culprits] == [("custom_autograd",)]
    assert bisection.baseline.value < 1e-5 < bisection.whole.value


def test_the_defaults_are_the_baseline_if_none_is_given(ready):
    lab, _ = ready
    lab.set(custom_autograd=False, cpu_memory_arena=False)
    try:
        bisection = lab.bisect(progress=False)
        assert set(bisection.changes) == {"custom_autograd", "cpu_memory_arena"}
        against = lab.bisect("loss", baseline={"custom_autograd": True}, progress=False)
    finally:
        lab.set(custom_autograd=True, cpu_memory_arena=True)
    assert [one.names for one in bisection.culprits] == [("custom_autograd",)]
    assert list(against.changes) == ["custom_autograd"]
    assert against.against.cpu_memory_arena is False


def test_where_nothing_changes_nobody_is_blamed(ready):
    lab, _ = ready
    bisection = lab.bisect("loss", changes=INNOCENT, progress=False)
    assert (bisection.outcome, bisection.culprits) == (NO_CHANGE, ())
    assert bisection.runs == 3


def test_a_function_of_a_run_is_a_metric_and_two_that_act_together_are_found(ready):
    lab, _ = ready

    def both(run):
        return run.options.memory_level == 1 and not run.options.compute_optimizer

    changes = {**INNOCENT, "memory_level": 1}
    bisection = lab.bisect(both, changes=changes, progress=False)
    assert [set(one.names) for one in bisection.culprits] == [{"memory_level", "compute_optimizer"}]
    assert bisection.metric == "both"


def test_a_switch_that_fails_is_found(ready):
    lab, training = ready

    def step():
        if not lab.options.cpu_memory_arena and lab.options.intra_op_spinning:
            raise MemoryError("no room")
        return training.step()

    lab.step(step, n=1)
    try:
        bisection = lab.bisect("loss", changes=INNOCENT, progress=False)
        mended = None
        lab.set(cpu_memory_arena=False, intra_op_spinning=True)
        mended = lab.bisect(
            "loss", changes={"cpu_memory_arena": True, "aten_backward": False}, progress=False
        )
    finally:
        lab.set(cpu_memory_arena=True, intra_op_spinning=False)
        lab.restore()
        lab.runs._runs.pop()
        lab.step(training.step, n=2)
        lab.restore()
        lab.runs._runs.pop()
    assert [set(one.names) for one in bisection.culprits] == [{"cpu_memory_arena", "intra_op_spinning"}]
    assert bisection.whole.failure == "MemoryError: no room"
    assert mended.baseline.failure
    assert [one.names for one in mended.culprits] == [("cpu_memory_arena",)]


def test_an_interrupt_leaves_the_lab_and_is_resumed(ready):
    lab, training = ready
    training.raises[training.calls + 9] = KeyboardInterrupt()
    changes = {**INNOCENT, "custom_autograd": False}
    with pytest.raises(KeyboardInterrupt, match=r"resume=lab.bisections"):
        lab.bisect("loss", changes=changes, progress=False)
    stopped = lab.bisections[-1]
    assert stopped.outcome == UNFINISHED
    done = [trial.names for trial in stopped.trials]
    assert done
    again = lab.bisect(resume=Bisection.from_dict(stopped.to_dict()), progress=False)
    assert [one.names for one in again.culprits] == [("custom_autograd",)]
    assert [trial.names for trial in again.trials[: len(done)]] == done
    whole = lab.bisect("loss", changes=changes, progress=False)
    assert again.runs - whole.runs in {0, 1}  # the one that was interrupted, if it is one that counts
    with pytest.raises(LedgerError, match="nothing to resume"):
        lab.bisect(resume=again)


def test_time_is_measured_in_pairs_and_the_answer_is_honest(ready):
    lab, _ = ready
    bisection = lab.bisect("step_ms", changes={"cpu_memory_arena": False}, rounds=2, n=3, progress=False)
    assert bisection.outcome in {RESPONSIBLE, NO_CHANGE, TOO_NOISY}
    assert bisection.count == 3
    assert len(bisection.whole.runs) in {2, 4, 6}
    assert bisection.runs == 1 + 2 * len(bisection.whole.runs)
    assert bisection.whole.low < bisection.whole.value < bisection.whole.high


def factors(noise):
    draw = random.Random(5)
    while True:
        yield math.exp(draw.gauss(0, noise))


class Paced:
    """A step whose time is read from a clock that only it winds: by what the switches cost, with noise and a drift."""

    def __init__(self, noise: float) -> None:
        self.training = Training()
        self.lab = ortlab.wrap(self.training.model)
        self.now, self.steps = ctypes.c_double(), ctypes.c_int()  # no way back to a start turns them back
        self._factors = factors(noise)

    def clock(self) -> float:
        return self.now.value

    def cost(self) -> float:
        """Return the ms of a step: two switches that act together, and one that makes it faster."""
        options = self.lab.options
        both = not options.compute_optimizer and options.intra_op_spinning
        return 10.0 * (3.0 if both else 1.0) * (0.4 if not options.cpu_memory_arena else 1.0)

    def step(self):
        self.steps.value += 1
        drift = 1 + self.steps.value / 200  # the machine gets slower meanwhile
        self.now.value += self.cost() * drift * next(self._factors) / 1000
        return self.training.step()


@pytest.fixture
def paced(request, monkeypatch):
    paced = Paced(request.param)
    monkeypatch.setattr(recording, "Stopwatch", functools.partial(Stopwatch, paced.clock))
    paced.lab.step(paced.step, n=2)
    yield paced
    paced.lab.unwrap()


@pytest.mark.parametrize("paced", [0.05], indirect=True)
@pytest.mark.parametrize(
    ("changes", "culprits", "ratio"),
    [
        (
            {"compute_optimizer": False, "intra_op_spinning": True},
            {"compute_optimizer", "intra_op_spinning"},
            3,
        ),
        ({"cpu_memory_arena": False}, {"cpu_memory_arena"}, 0.4),
    ],
)
def test_what_makes_the_step_slower_or_faster_is_found_through_noise_and_drift(
    paced, changes, culprits, ratio
):
    innocent = {"deepcopy_before_export": False, "sdpa_fallback": True, "aten_backward": False}
    bisection = paced.lab.bisect("step_ms", changes={**innocent, **changes}, n=5, progress=False)
    assert [set(one.names) for one in bisection.culprits] == [culprits]
    alone = bisection.of(bisection.culprits[0])
    assert alone.low < ratio < alone.high
    assert alone.amount == pytest.approx(
        10 * ratio, rel=2.5
    )  # the drift is in the times, and not in the ratio
    assert bisection.rest.low < 1 < bisection.rest.high


@pytest.mark.parametrize("paced", [1.5], indirect=True)
def test_noise_that_hides_the_answer_is_said_after_more_pairs(paced):
    bisection = paced.lab.bisect(
        "step_ms", changes={"cpu_memory_arena": False}, n=2, rounds=2, progress=False
    )
    assert (bisection.outcome, bisection.culprits) == (TOO_NOISY, ())
    assert len(bisection.whole.runs) == 6


@pytest.mark.parametrize("paced", [0.001], indirect=True)
def test_where_no_switch_changes_the_time_nobody_is_blamed(paced):
    changes = {"sdpa_fallback": True, "aten_backward": False}
    bisection = paced.lab.bisect("step_ms", changes=changes, n=3, progress=False)
    assert (bisection.outcome, bisection.culprits) == (NO_CHANGE, ())


def test_memory_is_measured(ready):
    lab, _ = ready
    bisection = lab.bisect("peak_bytes", changes={"cpu_memory_arena": False}, progress=False)
    assert bisection.whole.amount > 0
    # The arena is off whenever memory is measured, so this switch can change nothing.
    assert bisection.outcome == NO_CHANGE


def test_a_record_comes_back_from_its_file(ready, tmp_path):
    lab, _ = ready
    bisection = lab.bisect(level, changes={"memory_level": 1, "intra_op_spinning": True}, progress=False)
    again = Bisection.load(bisection.save(tmp_path / "bisection.json"))
    assert again.to_dict() == bisection.to_dict()
    assert again.table().equals(bisection.table())
    assert repr(again) == repr(bisection)
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    with pytest.raises(LedgerError, match="is not a bisection"):
        Bisection.load(tmp_path / "other.json")
    with pytest.raises(LedgerError, match="layout"):
        Bisection.from_dict({**bisection.to_dict(), "schema": 0})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"metric": "speed"}, "There is no metric 'speed'"),
        ({"metric": "loss", "changes": {}}, "Nothing differs"),
        ({"metric": "loss"}, "Nothing differs"),
        ({"metric": "loss", "changes": {"memory_levle": 1}}, "no option 'memory_levle'"),
        ({"metric": "loss", "changes": {"memory_level": 1}, "baseline": {"memory_level": 1}}, "go together"),
        ({"metric": "loss", "changes": {"engine": "eager"}}, "engine is no switch"),
        ({"metric": "loss", "changes": ["memory_level"]}, "a dict of values"),
        ({"metric": "loss", "changes": {"memory_level": 1}, "tolerance": -1}, "tolerance must be"),
        ({"metric": lambda _: "x", "changes": {"memory_level": 1}}, "returned 'x'"),
        ({"metric": lambda run: run.speed, "changes": {"memory_level": 1}}, "AttributeError"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_kept(ready, call, message):
    lab, _ = ready
    known = list(lab.bisections)
    with pytest.raises(OptionError, match=message):
        lab.bisect(**call, progress=False)
    assert lab.bisections == known


def test_a_step_that_fails_in_any_case_blames_no_switch(ready):
    lab, training = ready
    training.raises = {training.calls + more: ValueError("bad batch") for more in range(1, 5)}
    with pytest.raises(StepError, match="with these switches and without them"):
        lab.bisect("loss", changes={"memory_level": 1}, progress=False)


# --- judging -----------------------------------------------------------------------------------------------------


def test_a_ratio_of_pairs_has_a_t_interval():
    from scipy.stats import ttest_1samp

    values, base = [1.1, 1.3, 1.2, 1.25], [1.0, 1.1, 1.05, 1.0]
    ratio, low, high = ratio_of_pairs(values, base)
    logs = [math.log(a / b) for a, b in zip(values, base, strict=True)]
    expected = ttest_1samp(logs, 0).confidence_interval(0.95)
    assert (math.log(low), math.log(high)) == pytest.approx((expected.low, expected.high))
    assert ratio == pytest.approx(math.exp(sum(logs) / 4))
    assert math.isnan(ratio_of_pairs([1.0], [1.0])[1])


@pytest.mark.parametrize(
    ("value", "low", "high", "answer"),
    [(1.21, 1.2, 1.22, True), (1.0, 0.98, 1.02, False), (1.1, 1.0, 1.2, None), (1.3, 1.15, 1.5, True)],
)
def test_a_time_shows_the_change_only_if_its_interval_says_so(value, low, high, answer):
    metric = Metric.read("step_ms", None)
    whole = Trial(("a", "b"), 1.21, 1.19, 1.23)
    assert metric.shows(Trial(("a",), value, low, high), whole, 1.0, 0.0) is answer
    faster = Trial(("a", "b"), 1 / 1.21, 1 / 1.23, 1 / 1.19)
    assert metric.shows(Trial(("a",), 1 / value, 1 / high, 1 / low), faster, 1.0, 0.0) is answer


def test_noise_of_equal_runs_raises_what_counts_as_a_change():
    metric = Metric.read("loss", None)
    assert metric.is_change(Trial(("a",), 1e-4), 0.0, 0.0)
    assert not metric.is_change(Trial(("a",), 1e-4), 0.0, 5e-5)
    assert not metric.is_change(Trial(("a",), 1e-6), 0.0, 0.0)
    nan = Trial(("a",), math.inf)
    assert metric.shows(nan, nan, 0.0, 0.0)
    assert metric.is_change(Trial(("a",), 1.01, 0.9, 1.2), 0.0, 0.0)
    timed = Metric.read("step_ms", None)
    assert timed.is_change(Trial(("a",), 1.1, 0.9, 1.3), 1.0, 0.0) is None
    assert timed.is_change(Trial(("a",), 1.01, 1.005, 1.015), 1.0, 0.0) is False


@pytest.mark.parametrize(
    ("ours", "theirs", "distance"),
    [
        ([math.nan, 2.0], [math.nan, 2.0], 0.0),
        ([math.nan, 2.0], [math.nan, 1.0], 1.0),
        ([math.inf, 2.0], [math.inf, 1.0], 1.0),
        ([1.0, 2.0], [math.nan, 2.0], math.inf),
        ([math.inf, 2.0], [1.0, 2.0], math.inf),
    ],
)
def test_numbers_that_are_not_finite_hide_no_difference(ours, theirs, distance):
    assert _apart(torch.tensor(ours), torch.tensor(theirs)) == distance
