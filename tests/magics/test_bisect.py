"""%ort_bisect: metric and changes on a line, resuming, and how a bisection shows itself."""

from __future__ import annotations

import json

from ortlab.render import html, text
from ortlab.studies.bisection import Bisection


def test_changes_are_on_the_line(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    before = lab._bench.configuration
    bisection = stepped_shell.run(
        "%ort_bisect loss memory_level=1 intra_op_spinning=on -n 1 --tolerance 1e-4"
    )
    assert bisection.changes == {"memory_level": 1, "intra_op_spinning": True}
    assert (bisection.metric, bisection.tolerance, bisection.count, bisection.outcome) == (
        "loss",
        1e-4,
        1,
        "no change",
    )
    assert lab._bench.configuration == before
    assert lab.bisections == [bisection]


def test_a_function_is_a_metric_and_the_sentence_names_the_culprit(stepped_shell):
    stepped_shell.run("def spins(run):\n    return run.options.intra_op_spinning")
    bisection = stepped_shell.run(
        "%ort_bisect $spins memory_level=1 intra_op_spinning=on compute_optimizer=off -n 1"
    )
    assert [one.names for one in bisection.culprits] == [("intra_op_spinning",)]
    said = text.render(bisection)
    assert "intra_op_spinning=True causes the change of spins: by itself, spins is 1 instead of 0" in said
    assert "Without it, the other 2 changes: spins is 0 instead of 0" in said
    assert text.render(Bisection.from_dict(json.loads(json.dumps(bisection.to_dict())))) == said
    page = html.render(bisection)
    assert "the culprit" in page
    assert "<script" not in page


def test_without_changes_the_lab_is_held_against_the_defaults(stepped_shell):
    stepped_shell.run("%ort_set memory_level=1")
    try:
        bisection = stepped_shell.run("%ort_bisect")
    finally:
        stepped_shell.run("%ort_set memory_level=0")
    assert bisection.changes == {"memory_level": 1}
    said = text.render(bisection)
    assert "No change responsible: with the change, losses differ from the baseline's by" in said
