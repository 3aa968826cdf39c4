"""What is asked for, and the record of the answer: JSON in and out, tables, pages, figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ortlab.budgets.budget import Budget, Compared, Obstacle, PlanTrial, Prediction, Solver
from ortlab.budgets.request import counted, read_request
from ortlab.errors import LedgerError, OptionError
from ortlab.render import html, text
from ortlab.render.budget_plot import plot
from ortlab.render.plots import svg

MIB = 1 << 20
FIRST = Prediction(("Gelu+:1:3",), 690 * MIB, 12.5)
SECOND = Prediction(("Gelu+:1:-1", "Add+:1:1"), 660 * MIB, 18.0)
MET = Budget(
    model="bert",
    asked="700 MiB",
    limit_bytes=700 * MIB,
    kind="resident set of this process",
    without=Compared("without plans", 800 * MIB),
    prediction=FIRST,
    floor=Prediction(("Gelu+:1:-1",), 500 * MIB, 99.0),
    solver=Solver(12, 48, 120, 12.5, 13.0, 0.0, proven=True, seconds=0.21),
    trials=(PlanTrial(FIRST, 705 * MIB), PlanTrial(SECOND, 670 * MIB)),
    curve=(Prediction((), 800 * MIB, 0.0), FIRST, SECOND),
    compared=(Compared("ort", 800 * MIB, 410.0), Compared("eager", 900 * MIB, 380.0)),
)
TOO_SMALL = replace(
    MET,
    asked="100 MiB",
    limit_bytes=100 * MIB,
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
    assert outcome.split()[0].lower() in shown.lower()
    assert "<b>" not in page
    assert len(budget.table()) == 1 + max(1, len(budget.trials)) + len(budget.curve) + len(budget.compared)
    assert svg(plot(budget), "figure").startswith("<svg")


def test_every_number_says_whether_it_was_measured():
    shown = text.render(MET)
    assert "Met: 670 MiB at the peak (measured) of 700 MiB; 800 MiB without plans (measured)." in shown
    assert {"predicted peak", "measured peak"} <= {
        column.strip() for line in shown.splitlines() for column in line.split("  ")
    }
    assert 'lab.set(memory_plan=["Gelu+:1:-1", "Add+:1:1"])' in shown
    assert "What keeps the peak" not in shown
    assert "Gemm_Grad_3" in text.render(TOO_SMALL)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no json", "cannot be read"),
        ("[]", "is not a budget"),
        ('{"schema": 9}', "layout 9"),
        ('{"schema": 1, "model": "bert"}', "cannot be read"),
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
    ("limit", "saving", "said"),
    [
        (None, None, "neither"),
        ("6 GiB", 0.3, "both"),
        (0, None, "budget is 0"),
        ("-1 GiB", None, "budget is '-1 GiB'"),
        ("6 GX", None, "GX"),
        ("six", None, "cannot be read"),
        (None, 0, "saving is 0"),
        (None, 1.0, "saving is 1.0"),
        (None, -0.5, "saving is -0.5"),
        (None, float("nan"), "saving is nan"),
        (None, "half", "saving is 'half'"),
        (None, True, "saving is True"),
    ],
)
def test_what_makes_no_sense_is_explained(limit, saving, said):
    with pytest.raises(OptionError, match=said) as caught:
        read_request(limit, saving)
    assert caught.value.fix


def test_a_request_is_a_limit():
    assert read_request("6 GiB", None).limit(1) == 6 * 2**30
    assert read_request("6GB", None).limit(1) == 6 * 10**9
    assert read_request(4096, None).limit(1) == 4096
    request = read_request(None, 0.3)
    assert (request.asked, request.limit(1000)) == ("saving of 30 %", 700)


def test_counts_are_written_as_options_take_them():
    assert counted(["A+:1", "B+:1", "C+:2"], [2, 0, 3], [2, 4, 4]) == ("A+:1:-1", "C+:2:3")
