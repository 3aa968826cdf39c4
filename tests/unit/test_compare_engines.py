"""Engines of a lab: what else could run the step, from the same start and in one table."""

from __future__ import annotations

import ctypes
import math
import re

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import LedgerError, OptionError, StepError
from ortlab.render import html, text
from ortlab.studies.engine_comparison import EngineComparison


class Layered(nn.Module):
    """A model of layers whose activations are worth more than its weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = [nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)]
        self.layers = nn.Sequential(*(nn.Sequential(*map(_fresh, layer)) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _fresh(module: nn.Module) -> nn.Module:
    return nn.Linear(module.in_features, module.out_features) if isinstance(module, nn.Linear) else nn.GELU()


@pytest.fixture(scope="module")
def trained():
    """Return a lab that has run a step, and what it stands at; `lab.compare_engines` leaves both as they are."""
    torch.manual_seed(0)
    model, x = Layered(), torch.randn(4096, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, name="layered")
    lab.step(step, n=2)
    yield lab, optimizer
    lab.unwrap()


def standing(lab, optimizer):
    state = [value for one in optimizer.state.values() for value in one.values()]
    tensors = [*lab.module.state_dict().values(), *state, torch.get_rng_state()]
    return [tensor.tolist() for tensor in tensors], lab._bench.configuration


@pytest.fixture(scope="module")
def candidates(trained):
    lab, optimizer = trained
    before = standing(lab, optimizer)
    found = lab.compare_engines(
        n=4, rounds=2, engines=["eager", "checkpoint"], also=[{"memory_level": 1}, {"memory_level": 1}]
    )
    assert standing(lab, optimizer) == before
    return found


def test_peers_run_the_same_steps_and_stand_in_one_table(trained, candidates):
    lab, _ = trained
    table = candidates.table()
    assert list(table.index) == ["ort", "ort, memory_level=1", "ort, memory_level=1", "eager", "checkpoint"]
    assert list(table["state"]) == ["measured", "measured", "skipped", "measured", "measured"]
    assert table["time ratio"].iloc[0] == 1.0
    assert table["verdict"].iloc[0] == "baseline"
    for candidate in candidates:
        if candidate.outcome is None:
            assert candidate.reason == "The same as point 2."
            continue
        assert [run.engine for run in candidate.point.runs] == [candidate.engine] * 2
        assert all(lab.runs.run(run.number) == run for run in candidate.point.runs)
        assert candidate.outcome.loss_difference < 1e-5
    assert candidates["checkpoint"].detail == "4 Sequential in layers"
    assert candidates["checkpoint"].point.runs[0].losses == candidates["eager"].point.runs[0].losses
    assert re.search(r"#\d+ checkpoint", text.render(candidates["checkpoint"].point.runs[0]))
    assert lab.sweeps[-1] is candidates.sweep


def test_memory_is_measured_for_each_peer(candidates):
    """What a checkpointed layer keeps is its input: a fifth of what it keeps otherwise (32 of 32 + 128 + 128)."""
    layers_keep = 4 * 4096 * (128 + 128) * 4
    eager, checkpoint = candidates["eager"], candidates["checkpoint"]
    assert eager.rise_bytes > layers_keep
    assert checkpoint.rise_bytes < eager.rise_bytes - layers_keep / 2
    assert min(run.step_memory_bytes for run in eager.point.runs) == eager.rise_bytes
    assert candidates.baseline.rise_ratio == 1.0
    assert checkpoint.rise_ratio == checkpoint.rise_bytes / candidates.baseline.rise_bytes


def test_the_page_and_the_figure_name_every_peer(candidates):
    page = text.render(candidates)
    assert "Engines of layered: 2 rounds of 4 steps each" in page
    for name in ("ONNX Runtime, memory_level=1", "PyTorch eager", "PyTorch, layers checkpointed"):
        assert name in page
    assert "PyTorch, layers checkpointed: 4 Sequential in layers." in page
    assert "The same as point 2." in page
    shown = html.render(candidates)
    assert shown.count("data:image/svg+xml") == 1
    legend = {words.get_text() for words in ortlab.plot(candidates).axes[0].get_legend().get_texts()}
    assert {"1  ONNX Runtime", "3  PyTorch eager", "4  PyTorch, layers checkpointed"} <= legend


def test_peers_survive_json(candidates, tmp_path):
    again = EngineComparison.load(candidates.save(tmp_path / "candidates.json"))
    assert again.to_dict() == candidates.to_dict()
    assert text.render(again) == text.render(candidates)
    (tmp_path / "broken.json").write_text('{"schema": 1, "sweep": {}}')
    with pytest.raises(LedgerError):
        EngineComparison.load(tmp_path / "broken.json")
    with pytest.raises(LedgerError, match="There is no candidate 'compile'"):
        candidates["compile"]


def test_a_peer_that_fails_is_recorded_and_the_others_go_on(lab, experiment):
    lab.step(experiment.step, n=3)
    before = standing(lab, experiment.optimizer)
    found = lab.compare_engines(rounds=1, engines=["checkpoint", "eager"], memory=False)
    assert standing(lab, experiment.optimizer) == before
    assert found["checkpoint"].point.state == "failed"
    assert found["checkpoint"].reason.startswith("Classifier has no repeated layers to checkpoint.")
    assert found["eager"].outcome is not None
    assert math.isnan(found["eager"].rise_bytes)
    page = text.render(found)
    assert re.search(r"PyTorch, layers checkpointed +failed +Classifier has no repeated layers", page)
    assert "PyTorch eager: no step memory: It was not asked for." in page
    ortlab.plot(found)


def test_an_interrupt_keeps_the_runs_and_leaves_the_lab(lab, experiment):
    calls = ctypes.c_int()  # in C, where no way back to the start looks

    def step():
        calls.value += 1
        if calls.value == 2 + 3:
            raise KeyboardInterrupt
        return experiment.step()

    lab.step(step, n=2, watch=[experiment.optimizer], memory=False)
    before = standing(lab, experiment.optimizer)
    with pytest.raises(KeyboardInterrupt, match="after 1 of"):
        lab.compare_engines(rounds=1, engines=["eager"], memory=False)
    assert standing(lab, experiment.optimizer) == before
    assert lab.sweeps[-1].runs_done == 1


def test_compiled_peers_have_their_budgets_in_the_table(trained):
    lab, _ = trained
    found = lab.compare_engines(n=3, rounds=1, engines=["compile"], budgets=[0], memory=False)
    assert list(found.table()["state"]) == ["measured"] * 3
    assert [candidate.name for candidate in found] == ["ort", "compile", "compile:0"]
    assert "torch.compile with activation memory budget 0" in text.render(found)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"budgets": [2]}, OptionError, "no activation memory budget"),
        ({"budgets": "0.5"}, OptionError, "budgets are a list"),
        ({"budgets": 0.5}, OptionError, "budgets are a list"),
        ({"engines": ["eagr"]}, OptionError, "Did you mean 'eager'"),
        ({"engines": "eager"}, OptionError, "engines are a list"),
        ({"also": [1]}, OptionError, "dict of values by option"),
        ({"also": {"memory_level": 1}}, OptionError, "configurations are a list"),
        ({"also": [{"memory_levle": 1}]}, OptionError, "memory_level"),
        ({"rounds": 0}, StepError, "rounds must be a whole number"),
        ({"n": 0}, StepError, "steps must be a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(trained, how, error, says):
    lab, optimizer = trained
    before, runs = standing(lab, optimizer), len(lab.runs)
    with pytest.raises(error, match=says):
        lab.compare_engines(**how)
    assert standing(lab, optimizer) == before
    assert len(lab.runs) == runs
