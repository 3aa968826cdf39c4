"""%ort_graph_diff shows what is different between two graphs."""

from __future__ import annotations

import pytest


@pytest.mark.row("B10")
def test_stages_and_switches_are_compared(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    stages = stepped_shell.run("%ort_graph_diff processed optimized")
    assert (stages.before.name, stages.after.name) == ("processed", "optimized")
    shown = stepped_shell.formats(stages)
    assert stages.sentences[0] in shown["text/plain"].replace("\n", " ")
    assert "Difference of graphs: processed" in shown["text/html"]
    assert stepped_shell.run("%ort_graph_diff opset=20 --stage exported").after.name == "opset=20"
    one = stepped_shell.run("%ort_graph_diff opset=20 --baseline opset=16 --stage exported")
    assert (one.before.name, one.after.name) == ("opset=16", "opset=20")
    stepped_shell.user_ns["old"] = {"opset": 16}
    assert stepped_shell.run("%ort_graph_diff opset=20 --baseline $old --stage exported") == one
    view = stepped_shell.run("%ort_graph_diff processed optimized --view")
    assert view.marks == stages.colours()[1]
    view.close()
    assert len(lab.runs) == 1


def test_the_changes_of_the_present_switches_are_drawn_in_the_cell(stepped_shell, captured):
    shell = stepped_shell
    same = shell.formats(shell.run("%ort_graph --changes"))
    assert "No difference" in same["text/plain"]
    assert "Set a switch" in same["text/plain"]
    shell.run(
        "lab.set(memory_plan=(lab.plan().rows[0].config,))"
    )  # as a budget leaves it: nothing has run since
    shown = shell.formats(shell.run("%ort_graph --changes"))
    assert "recompute" in shown["text/plain"]
    assert "<svg" in shown["text/html"] or "image/svg" in shown["text/html"]
    assert shell.run("lab.status.state") == "rebuild pending"


def test_magics_follow_each_other_whatever_was_set_between(stepped_shell):
    shell = stepped_shell
    asked = (
        "%ort_activations",
        "%ort_plan",
        "%ort_graph optimized",
        "%ort_graph_diff gradient execution",
        "%ort_profile -n 1",
    )
    for change in ("%ort_memory", "%ort_set engine=eager", "%ort_set engine=ort compute_optimizer=false"):
        shell.run(change)
        for line in asked:
            assert shell.run(line) is not None
