"""The demo in a tiny setting: real text, a real BERT, both engines."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from forked import python

from ortlab.checks import demo
from ortlab.records.runs import Ledger

REPOSITORY = Path(__file__).parents[2]
# Small, and still a step whose memory is activations rather than gradients: with fewer tokens no plan saves anything.
TINY = ["--steps", "3", "--layers", "1", "--hidden", "64", "--batch", "4", "--length", "128"]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.fixture(scope="module")
def tokenizer():
    return demo.train_tokenizer(demo.english_text())


@pytest.mark.slow
def test_from_the_command_line_to_the_saved_runs(tmp_path):
    target = tmp_path / "runs.json"
    result = subprocess.run(
        python("-m", "ortlab.cli", "demo", *TINY, "--save", target),
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    said = result.stdout
    # The answer first, in step memory; then what to make of the times, the table, and three lines to try.
    assert (
        said.index("% less memory")
        < said.index("Without plans")
        < said.index("\nComparison")
        < said.index("Next")
    )
    assert "resident set" not in said
    assert "peak" not in said
    assert said.count("%ort_") == len(demo.TO_TRY) + said.count("%%ort_step") == 4

    runs = Ledger.load(target)
    assert {run.executed_by for run in runs} == {"ort", "eager"}
    assert len(runs[0].steps) == 3
    # From the same start on the same batches, the engines differ by rounding only.
    assert len({run.start_digest for run in runs}) == 1
    assert len({run.data_digest for run in runs}) == 1
    for run in runs:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-5)
    assert any(run.step_memory_bytes for run in runs)
    assert json.loads(target.read_text(encoding="utf-8"))


def test_a_save_that_cannot_be_written_is_told_before_training(tmp_path):
    result = subprocess.run(
        python("-m", "ortlab.cli", "demo", *TINY, "--save", tmp_path / "no" / "folder.json"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1
    assert "folder.json cannot be written" in result.stderr
    assert result.stdout == ""


def test_the_tokenizer_loses_nothing_of_the_text(tokenizer):
    text = demo.english_text()[0]
    decoder = __import__("tokenizers").decoders.ByteLevel()
    tokens = tokenizer.encode(text).tokens
    assert decoder.decode(tokens) == text
    assert len(tokens) < len(text) / 3


def test_the_same_texts_give_the_same_tokenizer(tokenizer):
    assert demo.train_tokenizer(demo.english_text()).to_str() == tokenizer.to_str()


class TestMaskedText:
    tokens = torch.arange(2, 2002)
    data = demo.MaskedText(tokens, mask_id=1, batch=64, length=64)

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
        predicted = batch["labels"] != demo.NOT_PREDICTED
        shown, labels = batch["input_ids"][predicted], batch["labels"][predicted]
        # 4096 tokens: the shares are within four standard deviations of 15 % (and the first column), 80 % and 10 %.
        assert predicted[:, 1:].float().mean().item() == pytest.approx(0.15, abs=0.023)
        assert (shown == 1).float().mean().item() == pytest.approx(0.8, abs=0.07)
        assert (shown == labels).float().mean().item() == pytest.approx(0.1, abs=0.05)

    def test_shows_what_it_does_not_ask_for(self):
        batch = self.data.draw()
        kept = batch["labels"] == demo.NOT_PREDICTED
        # The text counts up by one, so neighbours that are both shown differ by one.
        both = kept[:, 1:] & kept[:, :-1]
        steps = batch["input_ids"][:, 1:] - batch["input_ids"][:, :-1]
        assert both.any()
        assert (steps[both] == 1).all()

    def test_every_sequence_has_a_label(self):
        short = demo.MaskedText(self.tokens, mask_id=1, batch=200, length=8)
        assert (short.draw()["labels"] != demo.NOT_PREDICTED).any(dim=1).all()


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("slower", "slower"),
        ("faster", "faster"),
        ("no difference shown", "the same time"),
        ("too unsteady to tell", "could not be told"),
    ],
)
def test_the_advice_follows_the_verdict_and_says_to_measure(verdict, words):
    class Plain:
        pass

    contrast, comparison = Plain(), Plain()
    contrast.verdict, comparison.contrasts = verdict, [contrast]
    said = demo.advice(comparison)
    assert words in said.partition(".")[0]
    assert "easure your own model" in said
