"""%ort_budget: sizes, shares and variables on a line."""

from __future__ import annotations

import pytest

ASKED = {
    "9 GiB": "9 GiB",
    "9GiB": "9GiB",
    "$limit": "9 GiB",
    "$number": "9,000,000,000 B",
    "70%": "70 %",
    "-30%": "-30 %",
    "- 30 %": "-30 %",
    "$part": "-50 %",
    "--device 9GiB": "9GiB for the whole device",
    "--device 9 GiB --no-apply": "9 GiB for the whole device",
    "--no-apply -30%": "-30 %",
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


@pytest.fixture
def budget_shell(stepped_shell):
    stepped_shell.run("limit, part, number = '9 GiB', '-50%', 9_000_000_000")
    return stepped_shell
