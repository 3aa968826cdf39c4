"""%ort_parity: what it shows, that the lab is as before, and what is wrong with a line."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from ortlab.render import html, text


@pytest.mark.row("I8")
def test_it_compares_and_leaves_the_lab_as_it_was(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    before, weights = (
        lab._bench.configuration,
        {n: p.detach().clone() for n, p in lab.module.named_parameters()},
    )
    stepped_shell.run("count = 1")
    found = stepped_shell.run("%ort_parity -n $count --no-seeds")
    assert (found.steps, found.ok, found.first) == (1, True, None)
    assert any(pair.distance for pair in found.pairs)
    assert "What does another seed change?" in {
        one.question for one in found.checks if one.state == "not done"
    }
    assert "none is further apart" in text.render(found)
    page = html.render(found)
    assert "<table" in page
    assert "<script" not in page
    assert (lab._bench.configuration, len(lab.runs)) == (before, 1)
    assert all(weights[name].equal(p) for name, p in lab.module.named_parameters())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-n 0", "whole number"),
        ("-n many", "-n takes"),
        ("-n $missing", "There is no variable 'missing'"),
        ("--lab missing", "missing"),
        ("--steps 2", "--steps"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(stepped_shell, line, said):
    with pytest.raises(UsageError, match=said) as raised:
        stepped_shell.run(f"%ort_parity {line}")
    assert type(raised.value) is UsageError


def test_without_a_step_there_is_nothing_to_compare(net_shell):
    with pytest.raises(UsageError, match="no step to go back to"):
        net_shell.run("%ort_parity")
