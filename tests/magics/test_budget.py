"""%ort_budget: sizes, shares and variables on a line."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

ASKED = {
    "9 GiB": "9 GiB",
    "9GiB": "9GiB",
    "$limit": "9 GiB",
    "9000000000": "9,000,000,000 B",
    "--saving 30%": "saving of 30 %",
    "--saving 0.25": "saving of 25 %",
    "--saving $part": "saving of 50 %",
}


def test_a_line_is_a_budget(budget_shell):
    for line, asked in ASKED.items():
        budget = budget_shell.run(f"%ort_budget {line} --no-verify --no-curve")
        assert budget.asked == asked
        assert budget.trials == ()
        assert budget_shell.user_ns["lab"].budgets[-1] is budget


def test_a_budget_shows_itself(budget_shell):
    budget = budget_shell.run("%ort_budget 9 GiB --no-verify")
    shown = budget_shell.formats(budget)
    assert "No plans are needed" in shown["text/plain"]
    assert "No plans are needed" in shown["text/html"]


REFUSED = {
    "": "either a limit or a saving, not neither",
    "6 GX": "GX",
    "0": "budget is 0",
    "-5GiB": "Its form is",
    "1 GiB --saving 0.3": "not both",
    "--saving half": "'half' is no share",
    "--saving 200%": "below 1",
    "$nothing": "There is no variable 'nothing'",
    "1 GiB --lab nothing": "nothing",
}


def test_what_makes_no_sense_is_a_usage_error(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    before = lab.configuration
    for line, said in REFUSED.items():
        with pytest.raises(UsageError) as caught:
            stepped_shell.run(f"%ort_budget {line}")
        assert type(caught.value) is UsageError
        assert said in str(caught.value)
        assert lab.configuration == before
        assert lab.budgets == []


@pytest.fixture
def budget_shell(stepped_shell):
    stepped_shell.run("limit, part = '9 GiB', 0.5")
    return stepped_shell
