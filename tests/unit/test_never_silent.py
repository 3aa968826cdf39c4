"""A run that fell back, as a whole or in some of its steps, is nowhere counted as one of ONNX Runtime."""

from __future__ import annotations

import json
import re

import matplotlib.colors
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ortlab
from ortlab.checks import demo
from ortlab.cli import main
from ortlab.errors import BuildError, FallbackWarning
from ortlab.records.comparison import compare
from ortlab.records.runs import Ledger
from ortlab.render import html, plots, text
from ortlab.render.sweep_page import sweep_plot

pytestmark = pytest.mark.row("C2")

RED = matplotlib.colors.to_rgba(plots.FALLBACK)


class Sometimes(nn.Module):
    """A model with a branch that a graph cannot express at memory level 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, checkpointed: bool = False) -> torch.Tensor:
        hidden = self.linear(x)
        hidden = checkpoint(torch.tanh, hidden, use_reentrant=True) if checkpointed else torch.tanh(hidden)
        return hidden.square().sum()


def steps_of(model, falls_back):
    """Return a training step that takes the branch in some of ten steps."""
    x, done = torch.linspace(-1, 1, 6).view(2, 3), []

    def step():
        done.append(len(done) % 10 + 1)
        loss = model(x, checkpointed=done[-1] in falls_back)
        loss.backward()
        return loss

    return step


@pytest.fixture(scope="module")
def ran():
    """Return a lab and four runs of ten steps: ORT, fallen back in step 3, in all steps, and eager."""
    torch.manual_seed(3)
    lab = ortlab.wrap(Sometimes(), fallback=True)
    runs = [lab.step(steps_of(lab.module, where), n=10) for where in ((), (3,), range(1, 11))]
    lab.set(engine="eager")
    runs.append(lab.rerun())
    lab.set(engine="ort")
    yield lab, runs
    lab.unwrap()


def test_a_run_says_which_steps_fell_back(ran):
    _, (clean, partly, wholly, eager) = ran
    assert [run.executed_by for run in (clean, partly, wholly, eager)] == [
        "ort",
        "fallback",
        "fallback",
        "eager",
    ]
    assert [run.fell_back for run in (clean, partly, wholly, eager)] == [False, True, True, False]
    assert partly.fallback_steps == (3,)
    assert [step.executed_by for step in partly.steps] == ["ort"] * 2 + ["fallback"] + ["ort"] * 7
    assert wholly.fallback_steps == tuple(range(1, 11))
    assert clean.fallback_steps == eager.fallback_steps == ()
    assert partly.title == "#2 PyTorch (fallback in 1 of 10 steps) (fallback=True)"
    assert wholly.title == "#3 PyTorch (fallback) (fallback=True)"
    assert partly.losses == pytest.approx(clean.losses)
    for run in (partly, wholly):
        assert "checkpoints gradients" in run.fallback_reason
        assert "PYTORCH (fallback)" in text.render(run)
        assert "Executed by ONNX Runtime" not in text.render(run)
        assert 'ortlab-bad">' in html.render(run)
    assert "in 1 of 10 steps" in text.render(partly)


def test_it_says_so_after_it_was_saved(ran, tmp_path):
    lab, runs = ran
    loaded = Ledger.load(lab.runs.save(tmp_path / "runs.json"))
    assert [run.executed_by for run in loaded] == [run.executed_by for run in runs]
    assert loaded.run(2).fallback_steps == (3,)
    assert "fallback in 1 of 10 steps" in text.render(loaded)
    record = json.loads((tmp_path / "runs.json").read_text())[1]
    assert record["steps"][2]["executed_by"] == "fallback"


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("as_baseline", [False, True])
def test_no_verdict_is_given_on_it_nor_against_it(ran, number, as_baseline):
    _, runs = ran
    other, fallen = runs[0], runs[number - 1]
    comparison = compare([fallen, other] if as_baseline else [other, fallen])
    (contrast,) = comparison.contrasts
    assert contrast.fell_back
    assert contrast.verdict == "fell back"
    assert any(f"run {number} was executed by PyTorch, not ORT" in remark for remark in contrast.remarks)
    table = comparison.table()
    assert table["verdict"][1] == "fell back"
    assert "fallback" in table["run"][0 if as_baseline else 1]
    assert not any("faster" in line or "slower" in line for line in text.render(comparison).splitlines()[:6])
    assert re.search(r"ortlab-bad[^>]*>fell back", html.render(comparison))
    assert compare([runs[0], runs[3]]).contrasts[0].verdict != "fell back"


def test_ledger_and_figures_mark_it(ran):
    lab, _ = ran
    table = lab.runs.table()
    assert list(table["executed by"]) == ["ort", "fallback", "fallback", "eager"]
    assert list(table["fallback steps"]) == [0, 1, 10, 0]
    assert repr(lab.runs).startswith("Ledger(4 runs, 2 fell back to PyTorch, ")
    written = text.render(lab.runs)
    assert "#2 PYTORCH (fallback), in 1 of 10 steps: " in written
    assert "#3 PYTORCH (fallback): " in written
    assert html.render(lab.runs).count('ortlab-bad"><span>#') >= 2
    for axes in plots.overview(lab.runs).axes[1:]:
        red = [label.get_text().startswith(("#2", "#3")) for label in axes.get_yticklabels()]
        assert [matplotlib.colors.to_rgba(one.get_color()) == RED for one in axes.get_yticklabels()] == red
    (axes,) = plots.losses(lab.runs).axes
    assert [matplotlib.colors.to_rgba(one.get_color()) == RED for one in axes.lines] == [
        False,
        True,
        True,
        False,
    ]


def test_status_and_panel_name_who_executed_the_last_call(ran):
    from ortlab.notebook.widgets.panel import Panel

    lab, _ = ran
    panel = Panel(lab)
    x = torch.ones(2, 3)
    lab.module(x, checkpointed=True)
    assert (lab.status.state, lab.status.executed_by) == ("fallback", "fallback")
    assert ">PYTORCH (fallback)<" in panel.header.line.value
    lab.module(x)
    assert (lab.status.state, lab.status.executed_by) == ("ready", "ort")
    assert ">ORT<" in panel.header.line.value
    lab.module(x, checkpointed=True)
    lab.set(fallback=False)
    with pytest.raises(BuildError, match="checkpoints gradients"):
        lab.module(x, checkpointed=True)
    assert (lab.status.executed_by, lab.status.state == "fallback") == ("", False)
    assert "PYTORCH" not in panel.header.line.value
    lab.set(fallback=True)
    panel.close()


def test_a_plain_loop_hears_of_it_once(ran):
    lab, _ = ran
    lab.set(fallback_retry=True).set(fallback_retry=False)
    said = len([one for one in lab.messages if "not ONNX Runtime (fallback)" in one.text])
    lab.module(torch.ones(2, 3))

    def loop():
        for _ in range(3):
            lab.module(torch.ones(2, 3), checkpointed=True)

    with pytest.warns(FallbackWarning, match="PyTorch executes Sometimes, not ONNX Runtime") as warned:
        loop()
    assert len(warned) == 1
    assert len([one for one in lab.messages if "not ONNX Runtime (fallback)" in one.text]) == said + 1


def test_a_sweep_has_it_on_no_front_and_gives_no_verdict(wrap):
    torch.manual_seed(3)
    lab = wrap(Sometimes(), fallback=True)
    lab.step(steps_of(lab.module, (3,)), n=10)
    sweep = lab.sweep([{"engine": "eager"}, {"engine": "ort"}], rounds=1)
    found = {outcome.point.number: outcome for outcome in sweep.outcomes()}
    eager, fallen = found[1], found[2]
    assert fallen.fell_back
    assert fallen.verdict == "fell back"
    assert not fallen.on_front
    assert eager.on_front
    assert "was executed by PyTorch, not ORT, in 1 of 10 steps" in "; ".join(fallen.remarks)
    table = sweep.table()
    assert table.loc[2, "verdict"] == "fell back"
    assert not table.loc[2, "on the front"]
    labels = [one.get_text() for one in sweep_plot(sweep).axes[0].get_legend().get_texts()]
    assert "PYTORCH (fallback)" in labels
    assert "ONNX Runtime" not in labels
    assert 'ortlab-bad"><span>2' in html.render(sweep)


def test_the_command_line_ends_with_an_error_where_pytorch_stepped_in(monkeypatch, capsys):
    prepare = demo.prepare

    def with_checkpoints(setting):
        model, step = prepare(setting)
        head = model.cls.forward
        model.cls.forward = lambda hidden: checkpoint(head, hidden, use_reentrant=True)
        return model, step

    monkeypatch.setattr(demo, "prepare", with_checkpoints)
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_TORCH_MODEL")
    assert (
        main(["demo", "--steps", "2", "--layers", "1", "--hidden", "64", "--batch", "2", "--length", "8"])
        == 1
    )
    assert "ONNX Runtime did not execute the step" in capsys.readouterr().err
