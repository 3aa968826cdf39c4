"""What is done where a process needs more than was predicted: less is asked for, three times at most."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest

from ortlab.errors import ExecutionError
from ortlab.studies.budget import Compared, Obstacle, Setting
from ortlab.studies.budget_problem import Choice, Problem
from ortlab.studies.budget_run import read_request
from ortlab.studies.budget_search import Ground, answer

MIB = 1 << 20


class Step:
    """Twelve activations of 10 MiB at the peak, each of which can be recomputed for 1 ms."""

    def __init__(self) -> None:
        live = np.array([20.0, 200.0, 100.0]) * MIB
        savings = np.tile(np.array([0.0, 10.0, 2.0]) * MIB, (12, 1))
        self.problem = Problem(live, (Choice("Gelu+:1", savings, np.ones(12)),))

    def peak(self, counts) -> float:
        return self.problem.peak(counts)

    settings: Mapping[Setting, tuple[float, float]] = MappingProxyType({})
    held_less, no_blocks = 0, ""

    def obstacle(self, counts, setting=None) -> Obstacle:
        return Obstacle("the backward, where Gemm runs", self.peak(counts), (("logits", 60 * MIB),))


def ground(optimizer: int = 100) -> Ground:
    """A step with 300 MiB beside its buffers."""
    return Ground(
        model="net",
        step=Step(),
        without=Compared("without plans", 500 * MIB),
        within_bytes=500 * MIB,
        beyond_bytes=optimizer * MIB,
        kind="resident set",
        device="cpu",
    )


def places(plans: tuple[str, ...]) -> int:
    if not plans:
        return 0
    count = int(plans[0].rsplit(":", 1)[1])
    return 12 if count < 0 else count


def asked(limit: int, saved_mib: float, *, optimizer: int = 100):
    """Ask for a limit in MiB of a process in which each place saves so much."""
    told: list[str] = []

    def run(prediction):
        return int(max(500 - saved_mib * places(prediction.plans), optimizer) * MIB)

    request = read_request(limit * MIB, None)
    return answer(ground(optimizer), request, run, told.append), told


def test_plans_that_save_as_predicted_are_run_once():
    budget, told = asked(456, 10)
    assert (budget.outcome, budget.plans, len(budget.trials)) == ("met", ("Gelu+:1:5",), 1)
    assert budget.best.error == 0
    assert told[0] == "Choosing plans"
    assert budget.solver.cost_ms == 5


def test_plans_that_save_less_than_predicted_are_more_the_next_time():
    budget, _ = asked(456, 7.5)
    assert [trial.prediction.plans for trial in budget.trials] == [("Gelu+:1:5",), ("Gelu+:1:7",)]
    assert budget.outcome == "met"
    assert budget.plans == ("Gelu+:1:7",)


def test_a_budget_is_missed_only_after_what_a_person_would_tick():
    budget, _ = asked(456, 2)
    assert budget.outcome == "missed"
    assert len(budget.trials) == 3
    assert budget.trials[-1].prediction.plans == ("Gelu+:1:-1",)
    budget, _ = asked(495, 0.1)  # what is chosen is of few places: all of them are run all the same
    assert budget.trials[-1].prediction.plans == ("Gelu+:1:-1",)
    assert budget.best.step_memory_bytes == min(trial.step_memory_bytes for trial in budget.trials)


def test_plans_that_fail_are_left_out_for_others():
    def run(prediction):
        if places(prediction.plans) < 12:
            raise ExecutionError("Gelu failed.")
        return 380 * MIB

    request = read_request(456 * MIB, None)
    budget = answer(ground(), request, run, lambda _: None)
    assert (budget.outcome, budget.plans) == ("met", ("Gelu+:1:-1",))
    assert [(one.prediction.plans, one.error, one.why) for one in budget.failed] == [
        (("Gelu+:1:5",), "Gelu failed.", "cheapest")
    ]

    def fail(prediction):
        raise ExecutionError(f"{places(prediction.plans)} failed.")

    with pytest.raises(
        ExecutionError, match="5 failed"
    ):  # nothing runs: the first error is the user's to see
        answer(ground(), request, fail, lambda _: None)


def test_what_is_below_the_floor_is_run_once_and_explained():
    budget, _ = asked(100, 10)
    assert (budget.outcome, budget.plans, len(budget.trials)) == ("too small", ("Gelu+:1:-1",), 1)
    assert budget.floor.step_memory_bytes == 380 * MIB
    assert (budget.obstacle.where, budget.obstacle.live) == (
        "the backward, where Gemm runs",
        (("logits", 60 * MIB),),
    )


def test_the_optimizer_is_a_floor_that_no_plan_lowers():
    budget, _ = asked(420, 10, optimizer=450)
    assert budget.outcome == "too small"
    assert budget.floor.step_memory_bytes == 450 * MIB
    assert "optimizer" in budget.obstacle.where


@pytest.mark.parametrize("limit", [500, 600])
def test_nothing_is_run_where_all_fits(limit):
    budget, _ = asked(limit, 10)
    assert (budget.outcome, budget.trials, budget.plans) == ("no plans needed", (), ())


def test_the_curve_goes_from_nothing_to_the_floor():
    budget, _ = asked(456, 10)
    assert [one.cost_ms for one in budget.curve] == list(range(13))
    assert budget.curve[-1].step_memory_bytes == budget.floor.step_memory_bytes
