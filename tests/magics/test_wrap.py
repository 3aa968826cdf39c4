"""%ort_wrap and %ort_unwrap: the lab is returned, the panel is shown, and wrong models are refused."""

from __future__ import annotations

import gc
import weakref

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult

from ortlab.lab.following import note_shown, was_shown
from ortlab.lab.lab import Lab


@pytest.fixture
def torch_shell(shell):
    shell.run("import torch\nfrom torch import nn\nnumber = 3")
    shell.run("net, nest = nn.Sequential(nn.Linear(3, 2)), nn.Linear(3, 2)")
    yield shell
    for held in list(shell.user_ns.values()):
        if isinstance(held, Lab):
            held.unwrap()


def test_wrap_returns_the_lab(torch_shell):
    torch_shell.run("lab = %ort_wrap net --no-panel --engine eager memory_level=1")
    lab = torch_shell.user_ns["lab"]
    assert lab.module is torch_shell.user_ns["net"]
    assert (lab.name, lab.engine, lab.options.memory_level) == ("net", "eager", 1)


def test_the_last_line_of_a_cell_shows_the_lab(torch_shell, captured):
    lab = torch_shell.run("%ort_wrap net --no-panel")
    assert isinstance(lab, Lab)
    torch_shell.user_ns["lab"] = lab
    assert "not built" in torch_shell.formats(lab)["text/plain"]


def test_wrap_shows_the_panel_once(torch_shell, captured, monkeypatch):
    monkeypatch.setattr(torch_shell, "kernel", object(), raising=False)
    torch_shell.run("lab = %ort_wrap net")
    widget, saved = (output.data for output in captured.outputs)
    assert sorted(widget) == ["application/vnd.jupyter.widget-view+json", "text/html"]
    assert "<h4>net: Sequential</h4>" in saved["text/html"]
    assert "ONNX Runtime: not built yet" in saved["text/plain"]


def test_a_later_cell_shows_the_panel_again_where_no_history_is_kept(torch_shell, captured, monkeypatch):
    monkeypatch.setattr(torch_shell, "kernel", object(), raising=False)
    torch_shell.run("lab = %ort_wrap net\nlab")  # `run` keeps no history: all cells have one count
    assert len(captured.outputs) == 2  # the panel and its saved form; the second `lab` is one line
    torch_shell.run("lab")
    assert len(captured.outputs) == 4
    assert "<h4>net: Sequential</h4>" in captured.outputs[-1].data["text/html"]


def test_a_lab_that_was_shown_is_not_kept_alive_by_the_result_of_a_cell(torch_shell):
    torch_shell.run("lab = %ort_wrap net --no-panel")
    lab = torch_shell.user_ns.pop("lab")
    torch_shell.last_execution_result = ExecutionResult(None)
    torch_shell.last_execution_result.result = lab
    note_shown(lab)
    assert was_shown(lab)
    lab.unwrap(forget=True)
    gone = weakref.ref(lab)
    torch_shell.last_execution_result = None
    assert not was_shown(lab)
    del lab
    gc.collect()
    assert gone() is None


def test_no_panel_shows_nothing(torch_shell, captured):
    torch_shell.run("lab = %ort_wrap net --no-panel")
    assert captured.outputs == []
    assert captured.stdout == ""


def test_an_attribute_can_be_wrapped(torch_shell):
    torch_shell.run("class Trainer: pass\ntrainer = Trainer(); trainer.model = net")
    torch_shell.run("lab = %ort_wrap trainer.model --no-panel")
    lab = torch_shell.user_ns["lab"]
    assert lab.module is torch_shell.user_ns["net"]
    assert lab.name == "trainer.model"


def test_unwrap_returns_the_model_and_keeps_the_runs(stepped_shell):
    model = stepped_shell.run("%ort_unwrap")
    assert model is stepped_shell.user_ns["net"]
    assert type(model).__name__ == "Sequential"
    assert model(stepped_shell.user_ns["inputs"]).shape == (5, 4)
    lab = stepped_shell.user_ns["lab"]
    assert lab.status.state == "unwrapped"
    assert len(lab.runs) == 1


def test_a_panel_that_fails_leaves_the_model_unwrapped(torch_shell, monkeypatch):
    def fail(lab):
        message = "no front end"
        raise RuntimeError(message)

    monkeypatch.setattr(torch_shell, "kernel", object(), raising=False)
    monkeypatch.setattr("ortlab.notebook.widgets.panel.panel", fail)
    with pytest.raises(RuntimeError, match="no front end"):
        torch_shell.run("lab = %ort_wrap net")
    monkeypatch.undo()
    torch_shell.run("lab = %ort_wrap net --no-panel")


def test_the_lab_wrapped_last_is_meant_unless_one_is_named(torch_shell):
    torch_shell.run("first = %ort_wrap net --no-panel\nimport ortlab\nsecond = ortlab.wrap(nest)")
    torch_shell.run("%ort_set memory_level=2")
    torch_shell.run("%ort_set memory_level=1 --lab first")
    levels = [torch_shell.user_ns[name].options.memory_level for name in ("first", "second")]
    assert levels == [1, 2]


def test_parts_are_named_with_spaces_commas_or_a_variable(torch_shell):
    torch_shell.run(
        "net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2))"
    )
    torch_shell.run("chosen, head = ['0', '1.*'], net[2]")
    for line, paths in (
        ("--only 0 2", "0, 2"),
        ("--only 0,1.0,1.1", "0 and 2 more"),
        ("--only $chosen", "0 and 2 more"),
        ("--only $head", "2"),
        ("--only 0 --only 1 memory_level=1", "0, 1"),
    ):
        lab = torch_shell.run(f"lab = %ort_wrap net --no-panel {line}\nlab")
        assert repr(lab).startswith(f"Lab(net: Sequential, only {paths}, engine='ort', not built, ")
        assert lab.options.memory_level == line.count("memory_level")
        torch_shell.run("%ort_unwrap")


def test_plan_and_graph_of_a_part(torch_shell):
    torch_shell.run(
        "net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2))"
    )
    torch_shell.run("lab = %ort_wrap net --no-panel --only 0 1")
    torch_shell.run("net(torch.ones(2, 3)).sum().backward()")
    assert torch_shell.run("%ort_graph processed --part 1").part == "1"
    assert torch_shell.run("%ort_plan --part 1").missing == ()
    with pytest.raises(UsageError, match="Each wrapped part has a graph of its own"):
        torch_shell.run("%ort_graph")
