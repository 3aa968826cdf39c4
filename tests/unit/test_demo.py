"""The demo in a tiny setting: real text, a real BERT, both engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ortlab import demo, masked_language
from ortlab.errors import StepError
from ortlab.runs import Ledger

REPOSITORY = Path(__file__).parents[2]
TINY = ["--steps", "3", "--layers", "1", "--hidden", "64", "--batch", "2", "--length", "32"]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.fixture(scope="module")
def tokenizer():
    return masked_language.train_tokenizer(masked_language.english_text())


@pytest.mark.slow
def test_from_the_command_line_to_the_saved_runs(tmp_path):
    target = tmp_path / "runs.json"
    result = subprocess.run(
        [sys.executable, "-m", "ortlab.cli", "demo", *TINY, "--save", str(target)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    for heading in ("Options", "Memory plan", "Comparison", "Peak memory"):
        assert f"\n{heading}" in result.stdout

    ort, eager, recomputed = Ledger.load(target)
    assert [run.executed_by for run in (ort, eager, recomputed)] == ["ort", "eager", "ort"]
    assert all(len(run.steps) == 3 for run in (ort, eager, recomputed))
    # From the same start on the same batches, the engines differ by rounding only.
    assert len({run.start_digest for run in (ort, eager, recomputed)}) == 1
    assert len({run.data_digest for run in (ort, eager, recomputed)}) == 1
    assert eager.losses == pytest.approx(ort.losses, rel=1e-5)
    assert recomputed.losses == pytest.approx(ort.losses, rel=1e-6)
    assert recomputed.options.memory_plan
    assert ort.options.memory_plan == ()
    assert json.loads(target.read_text(encoding="utf-8"))


def test_a_save_that_cannot_be_written_is_told_before_training(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "ortlab.cli", "demo", *TINY, "--save", str(tmp_path / "no" / "folder.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1
    assert "folder.json cannot be written" in result.stderr
    assert result.stdout == ""


def test_the_tokenizer_loses_nothing_of_the_text(tokenizer):
    text = masked_language.english_text()[0]
    decoder = __import__("tokenizers").decoders.ByteLevel()
    tokens = tokenizer.encode(text).tokens
    assert decoder.decode(tokens) == text
    assert len(tokens) < len(text) / 3


def test_the_same_texts_give_the_same_tokenizer(tokenizer):
    assert masked_language.train_tokenizer(masked_language.english_text()).to_str() == tokenizer.to_str()


class TestMaskedText:
    tokens = torch.arange(2, 2002)
    data = masked_language.MaskedText(tokens, mask_id=1, batch=64, length=64)

    def test_follows_the_random_state(self):
        torch.manual_seed(5)
        first = self.data.draw()
        second = self.data.draw()
        torch.manual_seed(5)
        again = self.data.draw()
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first["input_ids"], second["input_ids"])

    def test_hides_as_berts_paper_does(self):
        torch.manual_seed(5)
        batch = self.data.draw()
        predicted = batch["labels"] != masked_language.NOT_PREDICTED
        shown, labels = batch["input_ids"][predicted], batch["labels"][predicted]
        # 4096 tokens: the shares are within four standard deviations of 15 % (and the first column), 80 % and 10 %.
        assert predicted[:, 1:].float().mean().item() == pytest.approx(0.15, abs=0.023)
        assert (shown == 1).float().mean().item() == pytest.approx(0.8, abs=0.07)
        assert (shown == labels).float().mean().item() == pytest.approx(0.1, abs=0.05)

    def test_shows_what_it_does_not_ask_for(self):
        batch = self.data.draw()
        kept = batch["labels"] == masked_language.NOT_PREDICTED
        # The text counts up by one, so neighbours that are both shown differ by one.
        both = kept[:, 1:] & kept[:, :-1]
        steps = batch["input_ids"][:, 1:] - batch["input_ids"][:, :-1]
        assert both.any()
        assert (steps[both] == 1).all()

    def test_every_sequence_has_a_label(self):
        short = masked_language.MaskedText(self.tokens, mask_id=1, batch=200, length=8)
        assert (short.draw()["labels"] != masked_language.NOT_PREDICTED).any(dim=1).all()


def test_the_largest_savings_come_first_and_leave_compromises_out():
    from ortlab.memory.reading import read_plan

    savings = {
        "Gelu+:1:-1": ("8*(batch)", 2),
        "Cast+:2:-1": ("64*(batch)", 2),
        "Add+:1:-1": ("16*(batch)", 2),
        "Dropout+:1:-1": ("2*(batch)", 2),
    }
    plan = read_plan(savings, {"batch": 4}, "")
    assert demo.largest_savings(plan) == ("Add+:1:-1", "Gelu+:1:-1")


def test_a_failing_peak_process_says_why():
    from ortlab import demo_peak

    with pytest.raises(StepError, match="There is no engine 'no such engine'"):
        demo_peak.measure(masked_language.Setting(layers=1, hidden=64, batch=2, length=32), "no such engine")
