"""What is asked for, and the record of the answer: JSON in and out, tables, pages, figures."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from ortlab.errors import LedgerError, OptionError
from ortlab.render import html, text
from ortlab.render.budget_page import budget_plot
from ortlab.render.plots import svg
from ortlab.studies.budget import Budget, Compared, Device, Obstacle, PlanTrial, Prediction, Solver, Timing
from ortlab.studies.budget_run import read_request
from ortlab.studies.budget_search import counted

MIB = 1 << 20
FIRST = Prediction(("Gelu+:1:3",), 690 * MIB, 12.5)
SECOND = Prediction(("Gelu+:1:-1", "Add+:1:1"), 660 * MIB, 18.0)
MET = Budget(
    model="bert",
    asked="700 MiB",
    limit_bytes=700 * MIB,
    kind="resident set, this process",
    without=Compared("without plans", 800 * MIB, 403.0),
    prediction=FIRST,
    floor=Prediction(("Gelu+:1:-1",), 500 * MIB, 99.0),
    solver=Solver(12, 48, 120, 12.5, 13.0, 0.0, proven=True, seconds=0.21),
    trials=(PlanTrial(FIRST, 705 * MIB), PlanTrial(SECOND, 670 * MIB)),
    curve=(Prediction((), 800 * MIB, 0.0), FIRST, SECOND),
    compared=(Compared("ort", 800 * MIB, 410.0), Compared("eager", 900 * MIB, 380.0)),
    timing=Timing((400.0, 404.0, 402.0, 406.0), (420.0, 424.0, 422.0, 426.0), 1.03, 1.06),
    whole_device=Device(1000 * MIB, 300 * MIB),
    before={"engine": "eager", "memory_plan": ["Gelu+:1:-1"]},
    applied=True,
)
TOO_SMALL = replace(
    MET,
    asked="100 MiB",
    limit_bytes=100 * MIB,
    applied=False,
    timing=None,
    before={},
    whole_device=None,
    trials=(PlanTrial(FIRST, 705 * MIB),),
    obstacle=Obstacle("the backward, at Gemm_Grad_3 <b>", 500 * MIB, (("logits", 80 * MIB), ("other", 5))),
)


@pytest.mark.parametrize(
    ("budget", "outcome", "plans"),
    [
        (MET, "met", SECOND.plans),
        (replace(MET, trials=MET.trials[:1]), "missed", FIRST.plans),
        (replace(MET, trials=()), "predicted to fit", FIRST.plans),
        (TOO_SMALL, "too small", FIRST.plans),
        (replace(MET, limit_bytes=900 * MIB, trials=()), "no plans needed", FIRST.plans),
    ],
)
def test_a_budget_says_what_came_out_everywhere(budget, outcome, plans, tmp_path):
    assert (budget.outcome, budget.plans) == (outcome, plans)
    assert Budget.load(budget.save(tmp_path / "budget.json")) == budget
    shown, page = text.render(budget), html.render(budget)
    words = {
        "missed": "cannot be reached",
        "too small": "cannot be reached",
        "predicted to fit": "predicted to cost",
    }
    assert (
        words.get(outcome, "no plans are needed" if outcome == "no plans needed" else "costs")
        in shown.lower()
    )
    assert "<b>" not in page
    assert len(repr(budget)) < 300
    assert len(budget.table()) == 1 + max(1, len(budget.trials)) + len(budget.curve) + len(budget.compared)
    assert svg(budget_plot(budget), "figure").startswith("<svg")


def said(budget: Budget) -> str:
    """Return the page as one line."""
    return " ".join(text.render(budget).split())


def test_the_first_line_is_the_answer():
    shown = said(MET)
    assert (
        "16 % less memory costs 5 % time (measured): 2 plans (Gelu, Add); measured 670 MiB of 800 MiB."
        in shown
    )
    assert "predicted from the profile: 18.0 ms more (4 % of 403 ms)" in shown
    assert "Measured: 20.0 ms more, 1.05 times [1.03, 1.06] the time" in shown
    assert "Of 1,000 MiB for this process, 300 MiB are held at the start of a step (measured)" in shown
    assert 'The lab had engine "eager" and 1 plan before' in shown
    assert 'Back: lab.set(memory_plan=["Gelu+:1:-1"], engine="eager").' in shown


def test_a_time_that_cannot_be_told_is_the_predicted_one():
    told = replace(MET, timing=Timing((400.0,) * 4, (404.0,) * 4, 0.97, 1.05))
    assert "costs 4 % time (predicted)" in said(told)
    assert "no difference that could be told" in said(told)
    drifting = replace(MET, timing=Timing((400.0, 400.0, 500.0, 500.0), (460.0,) * 4, 1.01, 1.05))
    assert drifting.timing is not None
    assert not drifting.timing.holds
    assert "costs 4 % time (predicted)" in said(drifting)
    assert "the machine was not steady, steps without plans took 25 % longer" in said(drifting)


def test_what_was_missed_says_the_closest_and_the_floor():
    shown = said(replace(TOO_SMALL, trials=(*TOO_SMALL.trials, PlanTrial(SECOND, 640 * MIB, "by hand"))))
    assert (
        "100 MiB cannot be reached: the closest needs 640 MiB of 800 MiB (measured), 20 % less memory"
        in shown
    )
    assert "Ask for 643 MiB or more, or take a smaller batch." in shown
    assert "ticked by hand: largest saving first" in shown
    assert 'Switch the closest on: lab.set(memory_plan=["Gelu+:1:-1", "Add+:1:1"]).' in shown
    assert "Gemm_Grad_3" in shown
    assert "What keeps memory" not in said(MET)


def test_what_needs_more_than_no_plans_is_no_saving():
    shown = said(
        replace(TOO_SMALL, trials=(PlanTrial(FIRST, 805 * MIB), PlanTrial(SECOND, 801 * MIB, "by hand")))
    )
    assert (
        "nothing that was run needs less; the closest needs 801 MiB (measured): 2 plans (Gelu, Add)." in shown
    )
    assert "The lab is as it was. Take a smaller batch; lab.memory() shows which phase" in shown
    assert "-0 %" not in shown
    assert "Switch the closest on" not in shown


def test_the_size_to_ask_for_is_no_less_than_what_the_closest_needs():
    near = (PlanTrial(FIRST, int(87.44 * MIB)), PlanTrial(replace(SECOND, cost_ms=90.0), int(87.43 * MIB)))
    shown = said(replace(TOO_SMALL, limit_bytes=70 * MIB, trials=near))
    assert "the closest needs 87.4 MiB" in shown
    assert "Ask for 87.9 MiB or more" in shown


def test_no_smaller_batch_is_advised_where_the_optimizer_needs_the_rest():
    left = replace(TOO_SMALL, obstacle=Obstacle("the optimizer's step or another phase", 87 * MIB))
    shown = said(replace(left, no_blocks="logits are 18 % of the peak; it is looked at from 20 % on."))
    assert "smaller batch" not in shown
    assert "chunked_loss=True" not in shown
    assert "lab.memory() shows the phase that needs the rest" in shown


def test_a_trial_of_a_setting_names_it():
    layers = Prediction((), 600 * MIB, 30.0, recompute=("layers",))
    shown = said(replace(MET, trials=(PlanTrial(layers, 810 * MIB), *MET.trials)))
    assert "cheapest that is predicted to fit: recompute=layers" in shown


def test_the_way_back_to_many_plans_is_the_record_that_has_them():
    plans = [f"{name}+:1:-1" for name in ("Gelu", "Add", "Mul", "Softmax")]
    assert "Back: lab.set(**lab.budgets[-1].before)." in said(replace(MET, before={"memory_plan": plans}))
    shown = said(replace(MET, before={"memory_plan": plans, "engine": "eager"}))
    assert "Back: lab.set(**lab.budgets[-1].before)." in shown


def test_as_many_plans_are_named_as_there_are():
    long = (
        "Add+Reshape+Transpose+Softmax+MatMul+Mul+Cast+Div+:1:-1",
        "Add+Reshape+Transpose+Softmax+MatMul+Mul+Pow+Div+:1:-1",
    )
    shown = said(replace(MET, trials=(PlanTrial(replace(FIRST, plans=long), 610 * MIB),)))
    names = shown.partition("2 plans (")[2].partition(")")[0]
    assert len(names.split(", ")) == 2


def test_of_two_that_are_as_close_the_cheaper_one_is_the_closest():
    same = (PlanTrial(SECOND, 640 * MIB), PlanTrial(FIRST, 640 * MIB + 1000))
    assert replace(TOO_SMALL, trials=same).best.prediction is FIRST


def test_a_memory_level_is_an_answer_as_well():
    level = Prediction((), 600 * MIB, 30.0, memory_level=1)
    budget = replace(MET, trials=(PlanTrial(level, 610 * MIB, "memory_level=1"),))
    assert (budget.switches, budget.plans) == ({"memory_level": 1}, ())
    assert "memory_level=1; measured 610 MiB" in said(budget)
    assert "Back: lab.set(memory_level=0, engine=" in said(budget)
    assert Budget.from_dict(budget.to_dict()) == budget


def test_a_step_that_finds_all_its_memory_free_is_no_crash():
    nothing = replace(MET, trials=(PlanTrial(SECOND, 0),))
    assert "measured 0 B" in said(nothing)
    assert html.render(nothing)
    at_first = replace(nothing, without=replace(MET.without, step_memory_bytes=0))
    assert "No plans are needed: a step is too small to measure" in said(at_first)
    assert html.render(at_first)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no json", "cannot be read"),
        ("[]", "is not a budget"),
        ('{"schema": 9}', "layout 9"),
        ('{"schema": 1, "model": "bert"}', "layout 1"),
        ('{"schema": 2, "model": "bert"}', "cannot be read"),
    ],
)
def test_what_is_no_budget_is_not_loaded(content, said, tmp_path):
    file = tmp_path / "budget.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(LedgerError, match=said):
        Budget.load(file)


def test_unknown_fields_are_refused():
    record = json.loads(json.dumps(MET.to_dict()))
    with pytest.raises(LedgerError, match="colour"):
        Budget.from_dict({**record, "colour": "blue"})


@pytest.mark.parametrize(
    ("limit", "device", "said"),
    [
        (None, None, "needs a limit"),
        ("70%", "6 GiB", "not of both"),
        (0, None, "budget is 0"),
        ("400", None, "'400' has no unit"),
        ("-400", None, "'-400' has no unit"),
        (0.7, None, "without a unit"),
        (True, None, "budget is True"),
        ("0%", None, "Nothing would be left"),
        ("-100%", None, "Nothing would be left"),
        ("-0%", None, "no less than a step needs"),
        ("130%", None, "without any plan"),
        ("+30%", None, "without any plan"),
        ("-1 GiB", None, "budget is '-1 GiB'"),
        ("6 GX", None, "gx"),
        ("six", None, "cannot be read"),
        (None, "50%", "a percentage is of what a step needs"),
        (None, "6", "device budget '6' has no unit"),
        (None, -1, "device budget is -1"),
    ],
)
def test_what_makes_no_sense_is_explained(limit, device, said):
    with pytest.raises(OptionError, match=re.compile(re.escape(said), re.IGNORECASE)) as caught:
        read_request(limit, device)
    assert caught.value.fix


def test_a_request_is_a_limit():
    assert read_request("6 GiB", None).limit(1) == 6 * 2**30
    assert read_request("6GB", None).limit(1) == 6 * 10**9
    assert read_request(4096, None).limit(1) == 4096
    assert read_request(None, "6 GiB").limit(1, held_bytes=2**30) == 5 * 2**30
    for text_, asked, limit in (
        ("70%", "70 %", 700),
        (" 12.5 % ", "12.5 %", 125),
        ("-30%", "-30 %", 700),
        ("- 30 %", "-30 %", 700),
        ("\u221230%", "-30 %", 700),
        ("100%", "100 %", 1000),
    ):
        request = read_request(text_, None)
        assert (request.asked, request.limit(1000)) == (asked, limit)


def test_counts_are_written_as_options_take_them():
    assert counted(["A+:1", "B+:1", "C+:2"], [2, 0, 3], [2, 4, 4]) == ("A+:1:-1", "C+:2:3")
    assert counted(["A+:1,B+:1"], [1], [1]) == ("A+:1:-1", "B+:1:-1")
