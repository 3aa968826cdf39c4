"""The panel beside its widget: text and HTML that a saved notebook keeps, in a real IPython shell."""

from __future__ import annotations

import pytest
import torch
from IPython.utils.capture import capture_output

import ortlab
from ortlab.notebook.widgets.panel import Panel
from ortlab.records.runs import Run

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def lab():
    torch.manual_seed(3)
    lab = ortlab.wrap(torch.nn.Linear(4, 2), name="<b>model</b>", engine="eager")
    yield lab
    lab.unwrap()


def step(lab):
    lab.step(lambda: lab.module(torch.ones(3, 4)).sum().backward(), 2)


def shown(shell, panel) -> list[dict]:
    with capture_output() as captured:
        shell.display_formatter.format(panel)
    return [output.data for output in captured.outputs]


def test_the_widget_and_its_saved_form_are_two_outputs(shell, lab):
    panel = Panel(lab)
    widget, saved = shown(shell, panel)
    assert sorted(widget) == [VIEW, "text/html"]
    assert widget["text/html"] == ""
    assert widget[VIEW]["model_id"] == panel.model_id
    assert sorted(saved) == ["text/html", "text/plain"]
    assert f'class="ortlab-saved ortlab-{panel.model_id}"' in saved["text/html"]
    assert "<b>model</b>" not in saved["text/html"]
    for form in saved.values():
        assert "The panel as it was on " in form
        assert "No run yet" in form
    panel.close()


def test_the_saved_form_is_written_anew_in_a_kernel_only(shell, lab, monkeypatch):
    panel = Panel(lab)
    shown(shell, panel)
    with capture_output() as captured:
        step(lab)
    assert captured.outputs == []  # a terminal would print it all once more
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    with capture_output() as captured:
        step(lab)
    saved = captured.outputs[-1]
    assert "#2 eager" in saved.data["text/plain"]
    assert "#2 eager" in saved.data["text/html"]
    panel.close()


def test_a_panel_that_was_never_shown_writes_nothing(shell, lab, monkeypatch):
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    panel = Panel(lab)
    with capture_output() as captured:
        step(lab)
    assert captured.outputs == []
    panel.close()


def test_a_long_ledger_stays_small_in_a_saved_notebook(shell, lab):
    step(lab)
    for number in range(2, 1001):
        lab.runs.add(Run.from_dict({**lab.runs[0].to_dict(), "number": number}))
    panel = Panel(lab)
    outputs = shown(shell, panel)
    assert sum(len(str(output)) for output in outputs) < 100_000
    panel.close()
