"""%ort_parity: what it shows, that the lab is as before, and what is wrong with a line."""

from __future__ import annotations

import pytest

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
