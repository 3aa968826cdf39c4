"""%ort_rerun, %ort_compare, %ort_plan and %ort_graph."""

from __future__ import annotations

import onnx
import pytest


def test_rerun_does_the_same_steps_with_other_options(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    run = stepped_shell.run("%ort_rerun memory_level=1")
    assert run is lab.runs[-1]
    assert (run.number, len(run.steps), run.options.memory_level) == (2, 4, 1)
    assert run.start_digest == lab.runs[0].start_digest
    assert run.data_digest == lab.runs[0].data_digest
    assert run.losses == pytest.approx(lab.runs[0].losses, rel=1e-6)
    assert "<h4>Run #2 ort (memory_level=1)</h4>" in stepped_shell.formats(run)["text/html"]


def test_rerun_takes_another_number_of_steps_and_engine(stepped_shell):
    run = stepped_shell.run("%ort_rerun engine=eager -n 2")
    assert (run.executed_by, len(run.steps)) == ("eager", 2)
    assert run.losses == pytest.approx(stepped_shell.user_ns["lab"].runs[0].losses[:2], rel=1e-5)


def test_what_stands_behind_a_rerun_is_for_that_rerun(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    before = lab._bench.configuration
    for line in ("%ort_rerun memory_level=1", "%ort_rerun engine=eager", "%ort_rerun engine=eager opset=16"):
        stepped_shell.run(line)
        assert lab._bench.configuration == before
    assert stepped_shell.run("%ort_rerun").executed_by == "ort"


def test_after_a_rerun_on_pytorch_plans_and_graphs_are_there(stepped_shell):
    stepped_shell.run("%ort_rerun engine=eager        # and on plain PyTorch")
    assert stepped_shell.run("%ort_plan").rows
    assert (
        stepped_shell.run("%ort_graph optimized    # the graph that ONNX Runtime made").stage == "optimized"
    )


def test_compare_holds_all_runs_against_the_first(stepped_shell):
    stepped_shell.run("%ort_rerun memory_level=1")
    stepped_shell.run("%ort_rerun engine=eager")
    comparison = stepped_shell.run("%ort_compare")
    assert comparison.baseline.number == 1
    assert [contrast.run.number for contrast in comparison.contrasts] == [2, 3]
    assert [contrast.remarks for contrast in comparison.contrasts] == [(), ()]
    forms = stepped_shell.formats(comparison)
    for title in ("#1 (ort)", "#2 memory_level=1", "#3 eager"):
        assert title in forms["text/plain"]
        assert title in forms["text/html"]


def test_compare_takes_runs_and_a_baseline(stepped_shell):
    stepped_shell.run("%ort_rerun memory_level=1")
    stepped_shell.run("%ort_rerun engine=eager")
    stepped_shell.run("last = 3")
    comparison = stepped_shell.run("%ort_compare 1 $last --baseline $last")
    assert comparison.baseline.number == 3
    assert [contrast.run.number for contrast in comparison.contrasts] == [1]


def test_plan_lists_what_could_be_recomputed(stepped_shell):
    plan = stepped_shell.run("%ort_plan")
    assert [row.config for row in plan.rows] == ["Gelu+:1:-1", "Gemm+:1:-1"]
    # One output of 16 numbers of 4 bytes for each of 5 rows.
    assert [row.saving_bytes for row in plan.rows] == [320.0, 320.0]
    assert plan.enabled == ()
    forms = stepped_shell.formats(plan)
    for row in plan.rows:
        assert row.config in forms["text/plain"]
        assert row.config in forms["text/html"]


def test_a_plan_that_is_set_is_enabled_after_the_rerun(stepped_shell):
    stepped_shell.run("%ort_set memory_plan=Gelu+:1:-1")
    stepped_shell.run("%ort_rerun")
    assert stepped_shell.run("%ort_plan").enabled == ("Gelu+:1:-1",)


def test_graph_shows_the_operators_and_saves(stepped_shell, tmp_path, capsys):
    target = tmp_path / "my graphs.onnx"
    graph = stepped_shell.run(f'%ort_graph exported --save "{target}"')
    assert graph.stage == "exported"
    assert graph.operators["Gemm"] == 2
    saved = onnx.load(target)
    assert [node.op_type for node in saved.graph.node].count("Gemm") == 2
    assert f"Saved to {target}" in capsys.readouterr().out
    forms = stepped_shell.formats(graph)
    assert "Gemm" in forms["text/plain"]
    assert "Gemm" in forms["text/html"]


def test_a_graph_is_viewed_or_embedded(stepped_shell):
    view = stepped_shell.run("%ort_graph optimized --view")
    assert view.stage == "optimized"
    assert stepped_shell.run("%ort_graph optimized --view") is view
    name = view.names[0]
    view = stepped_shell.run(f"%ort_graph optimized --view --around {name}")
    assert "nodes are drawn" in view.reduced
    view.close()
    forms = stepped_shell.formats(stepped_shell.run("%ort_graph --embed"))
    assert "srcdoc=" in forms["text/html"]
    assert "data:image/svg+xml" in forms["text/html"]
    assert "Gemm" in forms["text/plain"]


def test_the_path_of_a_graph_can_be_a_variable(stepped_shell, tmp_path):
    stepped_shell.user_ns["target"] = tmp_path / "execution.onnx"
    graph = stepped_shell.run("%ort_graph --save $target")
    assert graph.stage == "execution"
    assert (tmp_path / "execution.onnx").stat().st_size > 0


def test_compare_takes_options_and_runs_them_in_turns(stepped_shell):
    runs = len(stepped_shell.user_ns["lab"].runs) if "lab" in stepped_shell.user_ns else None
    found = stepped_shell.run("%ort_compare engine=eager memory_level=1 -n 3 --rounds 3")
    assert [contrast.name for contrast in found.contrasts] == ["eager", "memory_level=1"]
    assert found.in_turns
    assert [len(run.steps) for run in found.runs] == [3, 3, 3]
    assert runs is None or len(stepped_shell.user_ns["lab"].runs) == runs + 9
