"""%ort_blame: metric and changes on a line, resuming, and how a blame shows itself."""

from __future__ import annotations

import json

import pytest
from IPython.core.error import UsageError

from ortlab.blame.blame import Blame
from ortlab.render import html, text


def test_changes_are_on_the_line(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    before = lab.configuration
    blame = stepped_shell.run("%ort_blame loss memory_level=1 intra_op_spinning=on -n 1 --tolerance 1e-4")
    assert blame.changes == {"memory_level": 1, "intra_op_spinning": True}
    assert (blame.metric, blame.tolerance, blame.count, blame.outcome) == ("loss", 1e-4, 1, "no change")
    assert lab.configuration == before
    assert lab.blames == [blame]


def test_a_function_is_a_metric_and_the_sentence_names_the_culprit(stepped_shell):
    stepped_shell.run("def spins(run):\n    return run.options.intra_op_spinning")
    blame = stepped_shell.run(
        "%ort_blame $spins memory_level=1 intra_op_spinning=on compute_optimizer=off -n 1"
    )
    assert [one.names for one in blame.culprits] == [("intra_op_spinning",)]
    said = text.render(blame)
    assert "intra_op_spinning=True causes the change of spins: by itself, spins is 1 instead of 0" in said
    assert "Without it, the other 2 changes: spins is 0 instead of 0" in said
    assert text.render(Blame.from_dict(json.loads(json.dumps(blame.to_dict())))) == said
    page = html.render(blame)
    assert "the culprit" in page
    assert "<script" not in page


def test_without_changes_the_lab_is_held_against_the_defaults(stepped_shell):
    stepped_shell.run("%ort_set memory_level=1")
    try:
        blame = stepped_shell.run("%ort_blame")
    finally:
        stepped_shell.run("%ort_set memory_level=0")
    assert blame.changes == {"memory_level": 1}
    said = text.render(blame)
    assert "No change to blame: with the change, losses differ from the baseline's by" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Nothing differs from the baseline"),
        ("speed memory_level=1", "There is no metric 'speed'"),
        ("loss memory_levle=1", "Did you mean 'memory_level'"),
        ("loss memory_level=1 --tolerance much", "--tolerance takes a number"),
        ("loss memory_level=1 --rounds 1", "whole number from 2 on"),
        ("$missing memory_level=1", "There is no variable 'missing'"),
        ("--resume", "There is no blame to resume"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(stepped_shell, line, said):
    with pytest.raises(UsageError, match=said) as raised:
        stepped_shell.run(f"%ort_blame {line}")
    assert type(raised.value) is UsageError
