"""Sweeps of a lab on a real model and real ONNX Runtime sessions."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import LedgerError, OptionError, StepError
from ortlab.lab.following import observe
from ortlab.studies.sweep import Sweep

GRID = {"memory_level": [0, 1], "engine": ["ort", "eager"]}

# What a second sweep of the same points measures again; everything else has to be equal.
TIMED = [
    "step [ms]",
    "time ratio",
    "low",
    "high",
    "verdict",
    "step memory [bytes]",
    "memory ratio",
    "on the front",
    "rebuild [ms]",
    "rebuilds",
    "rebuilt from",
    "runs",
    "why not comparable",
    "remarks",  # they say what the machine did meanwhile
]


class Interrupting:
    """A training step that is interrupted, or fails, at one of its calls."""

    def __init__(self, experiment, error: BaseException | None = None, at: int = 0) -> None:
        self.experiment = experiment
        self.optimizer = experiment.optimizer
        self.error, self.at = error, at
        self.calls = 0

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def step(self) -> torch.Tensor:
        self.calls += 1
        loss = self.experiment.step()
        if self.calls == self.at and self.error is not None:
            raise self.error
        return loss


def everything(lab, experiment):
    """All that a sweep has to leave as it was, comparable."""
    return (
        [tensor.tolist() for tensor in experiment.state()],
        [None if p.grad is None else p.grad.tolist() for p in experiment.model.parameters()],
        [part.training for part in experiment.model.modules()],
        random.getstate(),
        [str(part) for part in np.random.get_state()],  # noqa: NPY002 - the global generator is what is kept
        lab._bench.configuration,
    )


# --- points ------------------------------------------------------------------------------------------------------


def test_a_grid_tries_every_combination_from_the_same_start(noisy_experiment, wrap):
    lab = wrap(noisy_experiment.model)
    first = lab.step(noisy_experiment.step, n=3)
    sweep = lab.sweep({"compute_optimizer": [True, False], "engine": ["ort", "eager"]}, n=4, rounds=2)
    assert [point.changes for point in sweep.points] == [
        {"compute_optimizer": True, "engine": "ort"},
        {"compute_optimizer": True, "engine": "eager"},
        {"compute_optimizer": False, "engine": "ort"},
        {"compute_optimizer": False, "engine": "eager"},
    ]
    measured = [point for point in sweep.points if point.state == "measured"]
    assert [point.number for point in measured] == [1, 2, 3]
    for point in measured:
        assert [run.losses for run in point.runs] == [point.runs[0].losses] * 2
        for run in point.runs:
            assert run.options == point.configuration.options
            assert run.executed_by == point.changes["engine"]
            assert (run.start_digest, len(run.steps), run.sweep) == (first.start_digest, 4, 1)
    # Dropout masks are drawn from the same seed at every point of ONNX Runtime.
    assert measured[2].runs[0].losses == measured[0].runs[0].losses
    assert measured[0].runs[0].losses[:3] == first.losses
    assert lab.sweeps == [sweep]
    assert [run.sweep for run in lab.runs] == [0] + [1] * 6


def test_dropout_that_is_recomputed_is_said_to_differ_between_rounds(noisy_experiment, wrap):
    lab = wrap(noisy_experiment.model)
    lab.step(noisy_experiment.step, n=2)
    sweep = lab.sweep({"memory_level": [0, 1]}, rounds=3)
    said = {outcome.point.number: outcome.remarks for outcome in sweep.outcomes()}
    assert said[1] == ()
    differ = len({run.losses for run in sweep.points[1].runs}) > 1
    assert any("rounds gave different losses" in remark for remark in said[2]) == differ


def test_what_eager_cannot_tell_apart_is_run_once(lab, experiment):
    lab.set(engine="eager").step(experiment.step, n=2)
    sweep = lab.sweep({"memory_level": [0, 1], "engine": ["eager"]})
    assert [point.state for point in sweep.points] == ["measured", "skipped"]
    assert sweep.points[1].skipped == "The same as point 1: eager reads no switches of ONNX Runtime."


def test_a_grid_may_be_given_by_name(lab, experiment):
    lab.step(experiment.step, n=2)
    named = lab.sweep(memory_level=[0, 1], custom_autograd=False, memory=False)
    assert [point.changes for point in named.points] == [
        point.changes
        for point in lab.sweep({"memory_level": [0, 1], "custom_autograd": [False]}, memory=False).points
    ]
    with pytest.raises(OptionError, match="in one call"):
        lab.sweep({"memory_level": [0, 1]}, opset=16)


def test_explicit_points_are_named_by_what_differs(lab, experiment):
    lab.set(engine="eager").step(experiment.step, n=2)
    sweep = lab.sweep([{"engine": "compile"}, {"engine": "ort", "memory_level": 1}, {"engine": "ort"}])
    assert [sweep.name(point) for point in sweep.points] == [
        "as the lab was set",
        "engine=compile",
        "engine=ort, memory_level=1",
        "engine=ort",
    ]
    assert sweep.baseline is sweep.points[0]
    assert [point.number for point in sweep.points] == [0, 1, 2, 3]
    assert {point.runs[0].executed_by for point in sweep.points} == {"eager", "compile", "ort"}


def test_options_that_hold_lists_take_lists_of_lists(lab, experiment):
    lab.step(experiment.step, n=2)
    plan = lab.plan().rows[0].config
    sweep = lab.sweep({"memory_plan": [(), [plan], f"{plan}"], "opset": 17})
    assert [point.changes["memory_plan"] for point in sweep.points] == [(), (plan,), (plan,)]
    assert sweep.axes == ("memory_plan",)
    assert sweep.constants == {"opset": 17}
    assert sweep.points[2].skipped == "The same as point 2."


def test_a_baseline_can_be_chosen(lab, experiment):
    lab.set(engine="eager").step(experiment.step, n=5)
    sweep = lab.sweep({"engine": ["eager", "ort"]}, baseline={"engine": "ort"})
    assert sweep.baseline is sweep.points[1]
    ratios = {outcome.point.value("engine"): outcome.time_ratio for outcome in sweep.outcomes()}
    assert ratios["ort"] == 1.0
    assert ratios["eager"] == sweep.points[0].step_ms / sweep.points[1].step_ms
    outcome = next(one for one in sweep.outcomes() if one.point.number == 1)
    assert outcome.time_low <= outcome.time_ratio <= outcome.time_high
    assert outcome.loss_difference < 1e-5


def test_rounds_go_to_and_fro_and_build_as_little_as_possible(lab, experiment):
    lab.step(experiment.step, n=1)
    sweep = lab.sweep(
        {"opset": [17, 16], "memory_level": [0, 1], "compute_optimizer": [True, False]}, rounds=2
    )
    tried = [
        (run.options.opset, run.options.compute_optimizer, run.options.memory_level) for run in lab.runs
    ][1:]
    assert tried[8:] == tried[:8][::-1]
    for changing in (tried[:8], [one[:2] for one in tried[:8]]):
        groups = [key for key, _ in itertools.groupby(one[0] for one in changing)]
        assert len(groups) == 2
    stages = [run.initialization.stage for run in lab.runs[1:] if run.initialization]
    assert stages.count("export") <= 2
    for point in sweep.points:
        assert point.rebuilt is None or point.rebuilt.total_ms > 0
        assert all(step.initialization_ms == 0 for step in point.warm_steps) or point.runs[0].steps == (
            point.runs[0].warm_steps
        )


# --- what cannot be done -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({}, "has no points"),
        ([], "has no points"),
        ({"memory_level": []}, "memory_level has no values"),
        ({"memory_lvel": [0, 1]}, "Did you mean 'memory_level'"),
        ({"engin": ["ort"]}, "Did you mean 'engine'"),
        ({"engine": ["ort", "eagre"]}, "Did you mean 'eager'"),
        ({"memory_level": [0, "much"]}, "memory_level cannot be 'much'"),
        ({"memory_level": [0, 1.5]}, "memory_level cannot be 1.5"),
        ({"memory_level": (level for level in (0, 1))}, "needs a list of values"),
        ({3: [0, 1]}, "no option '3'"),
        ([{"memory_level": 1}, "memory_level=2"], "is a dict of values by option"),
        (None, "lists of values by option"),
        ("memory_level", "lists of values by option"),
        ({"opset": [16, 17] * 16, "memory_level": [0, 1] * 16}, "The sweep has 1,024 points"),
        ({"memory_level": 1, "memory_plan": "Gelu+:1:-1"}, "No point of this sweep can run"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_before_anything_runs(lab, experiment, grid, said):
    lab.set(engine="eager").step(experiment.step, n=1)
    before = everything(lab, experiment)
    with pytest.raises(OptionError) as caught:
        lab.sweep(grid)
    assert said in str(caught.value)
    assert everything(lab, experiment) == before
    assert (len(lab.runs), lab.sweeps) == (1, [])


@pytest.mark.parametrize("bad", [{"n": 0}, {"n": 2.5}, {"rounds": 0}, {"rounds": True}])
def test_numbers_that_make_no_sense_are_refused(lab, experiment, bad):
    lab.set(engine="eager").step(experiment.step, n=1)
    with pytest.raises(StepError, match="whole number from 1 on"):
        lab.sweep(GRID, **bad)
    assert len(lab.runs) == 1


def test_a_sweep_needs_a_step_to_repeat(lab):
    with pytest.raises(StepError, match="no step to go back to"):
        lab.sweep(GRID)


def test_a_sweep_inside_a_step_is_refused(lab, experiment):
    lab.set(engine="eager").step(experiment.step, n=1)

    def step():
        lab.sweep(GRID)

    with pytest.raises(StepError, match="cannot sweep while a step is running"):
        lab.step(step)


def test_contradictions_are_skipped_with_their_reason(lab, experiment):
    lab.step(experiment.step, n=2)
    sweep = lab.sweep(
        {
            "memory_level": [0, 1],
            "memory_plan": [(), "Gelu+:1:-1"],
            "compute_optimizer": [True],
            "triton": [False],
        }
    )
    assert [point.state for point in sweep.points] == ["measured", "measured", "measured", "skipped"]
    assert "contradict each other" in sweep.points[3].skipped
    assert "choose the plans themselves" in sweep.points[3].skipped


def test_what_cannot_act_here_is_skipped_with_its_reason(lab, experiment):
    lab.set(engine="eager").step(experiment.step, n=2)
    sweep = lab.sweep(
        [
            {},
            {"efficient_attention": True},
            {"label_sparse_optimizer": True, "compute_optimizer": False},
        ]
    )
    assert [point.state for point in sweep.points] == ["measured", "skipped", "skipped"]
    assert "needs an NVIDIA GPU" in sweep.points[1].skipped
    assert "compute_optimizer is off" in sweep.points[2].skipped


def test_a_point_that_fails_is_recorded_and_the_sweep_goes_on(lab, experiment):
    step = Interrupting(experiment, ValueError("the data has\nended"), at=2 + 3)
    lab.step(step.step, n=2, memory=False)
    before = everything(lab, experiment)
    sweep = lab.sweep({"memory_level": [0, 1, 2]}, rounds=2, memory=False)
    assert [point.state for point in sweep.points] == ["measured", "failed", "measured"]
    assert sweep.points[1].failure == "ValueError: the data has"
    assert sweep.points[1].runs == ()
    assert [len(sweep.points[i].runs) for i in (0, 2)] == [2, 2]
    assert sweep.complete
    assert everything(lab, experiment) == before
    assert list(sweep.table()["reason"]) == ["", "ValueError: the data has", ""]


def test_a_point_that_cannot_be_built_is_recorded_and_a_fallback_is_named(wrap):
    class OnlyEager(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.onnx.is_in_onnx_export():
                raise NotImplementedError("this layer has no ONNX form")
            return super().forward(x).sum()

    torch.manual_seed(3)
    model, x = OnlyEager(3, 3), torch.randn(3, 3)
    lab = wrap(model, engine="eager")

    def step():
        loss = model(x)
        loss.backward()
        return loss

    lab.step(step, n=2)
    sweep = lab.sweep([{"engine": "ort"}, {"engine": "ort", "fallback": True}])
    assert [point.state for point in sweep.points] == ["measured", "failed", "measured"]
    assert "this layer has no ONNX form" in sweep.points[1].failure
    fallback = next(one for one in sweep.outcomes() if one.point.number == 2)
    assert "executed by PyTorch, not ORT" in fallback.remarks[0]
    assert lab._bench.configuration.engine == "eager"


# --- the lab afterwards ------------------------------------------------------------------------------------------


def test_a_sweep_leaves_the_lab_as_it_was(noisy_experiment, wrap):
    lab = wrap(noisy_experiment.model, log_level="INFO")
    lab.step(noisy_experiment.step, n=3)
    noisy_experiment.step()  # beyond the end of the run, with a state that no snapshot of it holds
    random.random(), np.random.rand()  # noqa: NPY002 - the global generators are what is kept
    before = everything(lab, noisy_experiment)
    sweep = lab.sweep(GRID, n=2)
    assert sweep.complete
    assert everything(lab, noisy_experiment) == before
    again = lab.rerun()
    assert len(again.steps) == 3
    assert again.losses == lab.runs[0].losses
    assert again.sweep == 0


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_graph_of_the_present_options_is_there_after_a_sweep(lab, experiment, rounds):
    lab.set(memory_level=1).step(experiment.step, n=1)
    lab.sweep({"opset": [16, 17, 18], "memory_level": [0, 1]}, rounds=rounds)
    assert lab.plan().memory_level == 1
    assert lab.rerun().initialization is None


def test_runs_of_sweeps_are_compared_in_the_sweep(lab, experiment):
    lab.set(engine="eager").step(experiment.step, n=2)
    lab.sweep({"engine": ["eager", "ort"]})
    with pytest.raises(LedgerError, match="only one run"):
        lab.compare()
    assert len(lab.compare(1, 2, 3).contrasts) == 2
    lab.rerun()
    assert [contrast.run.number for contrast in lab.compare().contrasts] == [4]
    assert list(lab.runs.table()["sweep"]) == [0, 1, 1, 0]


def test_observers_hear_of_one_course_from_nought_to_one(lab, experiment):
    lab.step(experiment.step, n=1)
    heard = []
    stop = observe(lab, lambda event: heard.append(event) if event.startswith("progress:") else None)
    lab.sweep({"memory_level": [0, 1]}, n=3, rounds=2)
    stop()
    fractions = [float(event.rpartition(":")[2]) for event in heard]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0
    assert fractions[-1] == 1.0
    assert heard[-1] == "progress::1.000"
    assert any("Run 2 of 4 (memory_level=1, round 1 of 2)" in event for event in heard)
    assert any("session" in event for event in heard)


# --- interrupt and resume ----------------------------------------------------------------------------------------


@pytest.fixture
def whole(experiment):
    """The table of a sweep that nothing interrupts, with another model of the same seed."""
    lab = ortlab.wrap(experiment.model)
    lab.step(Interrupting(experiment).step, n=3, memory=False)
    table = lab.sweep(GRID, rounds=2, memory=False).table()
    lab.unwrap()
    return table


def same_but_for_times(one, other):
    return all(one[name].equals(other[name]) for name in other.columns.drop(TIMED))


def fresh_experiment(experiment):
    """Another model, optimizer and batch as the fixture's were at first."""
    return type(experiment)()


def test_a_run_that_ended_before_the_interrupt_is_in_the_sweep_as_in_the_ledger(experiment, lab):
    lab.step(experiment.step, n=2)
    came = []

    def interrupt(event):
        if event == "runs" and len(lab.runs) == 3 and not came:
            came.append(event)
            raise KeyboardInterrupt

    stop = observe(lab, interrupt)
    with pytest.raises(KeyboardInterrupt, match="the sweep after 2 of 3 runs"):
        lab.sweep(memory_level=[0, 1, 2], n=2)
    stop()
    made = lab.sweeps[-1]
    assert {run.number for point in made.points for run in point.runs} == {2, 3}
    assert [run.sweep for run in lab.sweep(resume=made) and lab.runs] == [0, 1, 1, 1]

    def interrupt_again(event):
        if event == "runs":
            raise KeyboardInterrupt

    stop = observe(lab, interrupt_again)
    with pytest.raises(KeyboardInterrupt, match="Stopped the comparison after 1 of 12 runs"):
        lab.compare(memory_level=1)
    stop()


@pytest.mark.parametrize("call", [1, 5, 6, 17])
def test_resuming_gives_what_an_uninterrupted_sweep_gives(experiment, whole, call, wrap):
    again = fresh_experiment(experiment)
    lab = wrap(again.model)
    step = Interrupting(again, KeyboardInterrupt(), at=3 + call)
    lab.step(step.step, n=3, memory=False)
    before = everything(lab, again)
    with pytest.raises(KeyboardInterrupt) as caught:
        lab.sweep(GRID, rounds=2, memory=False)
    done = (call - 1) // 3
    assert str(caught.value) == (
        f"Stopped the sweep after {done} of 6 runs; kept as lab.sweeps[0]. "
        "The lab is as it was before; go on with %ort_sweep --resume, or lab.sweep(resume=lab.sweeps[0])."
    )
    assert everything(lab, again) == before
    sweep = lab.sweeps[0]
    assert (sweep.runs_done, sweep.complete, len(lab.runs)) == (done, False, 1 + done)
    assert lab.sweep(resume=sweep, memory=False) is sweep
    assert lab.sweeps == [sweep]
    assert sweep.complete
    assert len(lab.runs) == 7
    assert everything(lab, again) == before
    assert same_but_for_times(sweep.table(), whole)


def test_a_saved_sweep_is_resumed_in_another_lab(experiment, whole, tmp_path):
    first = fresh_experiment(experiment)
    lab = ortlab.wrap(first.model)
    lab.step(Interrupting(first, KeyboardInterrupt(), at=3 + 7).step, n=3, memory=False)
    with pytest.raises(KeyboardInterrupt):
        lab.sweep(GRID, rounds=2, memory=False)
    path = lab.sweeps[0].save(tmp_path / "sweep.json")
    lab.unwrap()

    second = fresh_experiment(experiment)
    lab = ortlab.wrap(second.model)
    lab.step(Interrupting(second).step, n=3, memory=False)
    sweep = Sweep.load(path)
    assert (sweep.runs_done, sweep.runs_planned) == (2, 6)
    lab.sweep(resume=sweep, memory=False)
    assert sweep.complete
    assert len(lab.runs) == 5
    assert same_but_for_times(sweep.table(), whole)
    lab.unwrap()


def test_another_start_is_refused(lab, experiment):
    lab.set(engine="eager")
    step = Interrupting(experiment, KeyboardInterrupt(), at=4)
    lab.step(step.step, n=2, memory=False)
    with pytest.raises(KeyboardInterrupt):
        lab.sweep({"engine": ["eager", "ort"]}, memory=False)
    lab.step(step.step, n=2, memory=False)
    with pytest.raises(LedgerError, match="it started from another point"):
        lab.sweep(resume=lab.sweeps[0])
    assert lab.sweeps[0].runs_done == 0


def test_other_versions_are_refused(lab, experiment):
    lab.set(engine="eager")
    step = Interrupting(experiment, KeyboardInterrupt(), at=5)
    lab.step(step.step, n=2, memory=False)
    with pytest.raises(KeyboardInterrupt):
        lab.sweep({"engine": ["eager", "ort"]}, memory=False)
    record = lab.sweeps[0].to_dict()
    done = next(point for point in record["points"] if point["runs"])
    done["runs"][0]["versions"]["torch"] = "1.0"
    with pytest.raises(LedgerError, match="torch had other versions"):
        lab.sweep(resume=Sweep.from_dict(record))
    assert len(lab.sweeps) == 1


def test_a_complete_sweep_has_nothing_to_resume(lab, experiment):
    lab.set(engine="eager").step(experiment.step, n=2)
    sweep = lab.sweep({"engine": ["eager"]})
    with pytest.raises(LedgerError, match="nothing to resume"):
        lab.sweep(resume=sweep)
    with pytest.raises(OptionError, match="has its points"):
        lab.sweep({"engine": ["ort"]}, resume=sweep)


# --- JSON --------------------------------------------------------------------------------------------------------


def test_a_sweep_survives_json(lab, experiment, tmp_path):
    lab.step(experiment.step, n=4)
    sweep = lab.sweep(
        [{"memory_plan": ["Gelu+:1:-1"]}, {"memory_level": 1, "memory_plan": "Gelu+:1:-1"}, {"opset": 16}]
    )
    loaded = Sweep.load(sweep.save(tmp_path / "sweep.json"))
    assert loaded.points == sweep.points
    assert loaded.to_dict() == sweep.to_dict()
    assert loaded.table().equals(sweep.table())
    assert [loaded.name(point) for point in loaded.points] == [sweep.name(point) for point in sweep.points]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not a sweep"),
        ("{", "cannot be read"),
        ('{"schema": 99}', "layout 99"),
        ('{"schema": 1, "points": []}', "cannot be read"),
        (json.dumps({"schema": 1, "points": [{}], "number": 1, "model": "m"}), "cannot be read"),
    ],
)
def test_what_is_no_sweep_is_refused(tmp_path, text, said):
    path = tmp_path / "sweep.json"
    path.write_text(text)
    with pytest.raises(LedgerError, match=said):
        Sweep.load(path)
