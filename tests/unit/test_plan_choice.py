"""Choosing plans from a table: in some places, beside others, and what they come to."""

from __future__ import annotations

import pytest

from ortlab.memory.plan import Choice, MemoryPlan, PlanRow


def row(config: str, places: int, saving: float | None, **more) -> PlanRow:
    cluster, strategy, _ = config.split(",", maxsplit=1)[0].split(":")
    return PlanRow(config, cluster, int(strategy), places, "", saving, False, f"Recompute {cluster}.", **more)


GELU = row("Gelu+:1:-1", 4, 400.0, peak_saving_bytes=300.0, cost_ms=2.0, excludes=("FusedMatMul+Gelu+:1:-1",))
LONGER = row("FusedMatMul+Gelu+:1:-1", 4, 800.0, peak_saving_bytes=500.0, cost_ms=8.0)
CAST = row("Cast+:2:-1", 3, 30.0)
BOTH = row("A+:1:-1,B+:1:-1", 2, 60.0)
SLICE = row("Slice+:1:-1", 1, None)
PLAN = MemoryPlan((LONGER, GELU, BOTH, CAST, SLICE), {}, 0, "")


def test_counts_are_those_of_the_options():
    choice = Choice(PLAN, ("Gelu+:1:3", "Cast+:2:-1", "A+:1:1", "B+:1:-1", "FusedMatMul+Gelu+:2:-1"))
    assert [choice.count(one) for one in PLAN.rows] == [0, 3, 1, 3, 0]


def test_more_places_than_there_are_count_as_all():
    assert Choice(PLAN, ("Gelu+:1:9",)).count(GELU) == 4


def test_adding_takes_what_cannot_act_beside_it_away_whichever_of_the_two_says_so():
    assert Choice(PLAN, ("Gelu+:1:-1", "Cast+:2:1")).adding(LONGER.config) == (
        "Cast+:2:1",
        "FusedMatMul+Gelu+:1:-1",
    )
    assert Choice(PLAN, ("FusedMatMul+Gelu+:1:2",)).adding(GELU.config) == ("Gelu+:1:-1",)


def test_adding_again_changes_the_count_and_all_places_are_minus_one():
    choice = Choice(PLAN, ("Gelu+:1:-1", "Other+:1:-1"))
    assert choice.adding(GELU.config, 2) == ("Other+:1:-1", "Gelu+:1:2")
    assert choice.adding(GELU.config, 4) == ("Other+:1:-1", "Gelu+:1:-1")


def test_a_row_of_two_plans_comes_and_goes_whole():
    chosen = Choice(PLAN, ()).adding(BOTH.config)
    assert chosen == ("A+:1:-1", "B+:1:-1")
    assert Choice(PLAN, (*chosen, "Gelu+:1:-1")).removing(BOTH.config) == ("Gelu+:1:-1",)


def test_a_plan_that_no_row_has_is_refused_and_an_unknown_chosen_one_is_kept():
    with pytest.raises(KeyError):
        Choice(PLAN, ()).adding("Nothing+:1:-1")
    assert Choice(PLAN, ("OfAnotherModel+:1:-1",)).adding(CAST.config)[0] == "OfAnotherModel+:1:-1"


def test_totals_add_up_again_from_the_rows_as_they_are_chosen():
    choice = Choice(PLAN, ("Gelu+:1:1", "Cast+:2:-1", "Slice+:1:-1"))
    shown = [choice.as_chosen(one) for one in PLAN.rows if choice.count(one)]
    assert [one.saving_bytes for one in shown] == [100.0, 30.0, None]
    totals = choice.totals
    assert totals.plans == 3
    assert totals.saving_bytes == sum(one.saving_bytes or 0.0 for one in shown) == 130.0
    assert totals.peak_saving_bytes == 75.0
    assert totals.cost_ms == 0.5
    assert totals.bytes_per_ms == 150.0
    assert totals.unknown == ("Cast+:2:-1", "Slice+:1:-1")


def test_a_number_that_no_chosen_row_has_is_no_zero():
    totals = Choice(PLAN, ("Cast+:2:-1",)).totals
    assert (totals.saving_bytes, totals.peak_saving_bytes, totals.cost_ms) == (30.0, None, None)
    assert totals.bytes_per_ms is None
    assert totals.unknown == ()


def test_nothing_measured_is_scaled():
    measured = row("Gelu+:1:-1", 4, 400.0, measured_saving_bytes=10.0, measured_cost_ms=3.0)
    shown = Choice(MemoryPlan((measured,), {}, 0, ""), ("Gelu+:1:2",)).as_chosen(measured)
    assert (shown.saving_bytes, shown.measured_saving_bytes, shown.measured_cost_ms) == (200.0, 10.0, 3.0)
