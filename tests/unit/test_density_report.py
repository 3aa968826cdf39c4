"""What the density of inputs means in words, where label sparsity reaches, and what toggling it does."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import small_transformers
import torch
from torch import nn

import ortlab
from ortlab.errors import StepError
from ortlab.records.density import EMBED, LABEL, Density, DensityReport, DensityRow
from ortlab.render import html, text

GLUE = [50, 81, 35, 11, 29, 36, 66, 19, 40, 22, 21, 42, 17, 37, 40, 41,
        26, 58, 38, 54, 41, 73, 48, 57, 50, 51, 49, 85, 48, 36, 79, 62]  # fmt: skip
MLM = [564, 593, 581, 595, 627]


def masked(batch=4, length=16, *, labelled=4, padded=0):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 60, (batch, length), generator=generator)
    if padded:
        ids[:, -padded:] = 0
    labels = torch.where(torch.arange(length) % labelled == 0, ids, -100)
    return {"input_ids": ids, "labels": labels}


def flat(report):
    return " ".join(text.render(report).split())


def bert(*, seen=True, loss_only=True):
    torch.manual_seed(0)
    model = small_transformers.bert(layers=1, width=16, words=60)
    return ortlab.with_loss(model, ortlab.TokenLoss(), loss_only=loss_only) if seen else model


@pytest.mark.row("E1", "E2", "E3")
def test_the_page_has_the_columns_and_lines_of_the_reference():
    rows = [DensityRow(60, EMBED, "input_ids", 1, sum(GLUE), 4096, tuple(GLUE))]
    rows += [
        DensityRow(711 + 2 * place, LABEL, "labels", -100, valid, 4096) for place, valid in enumerate(MLM)
    ]
    shown = flat(DensityReport(Density(tuple(rows)), "run 1"))
    heads = "STEP INPUT TYPE INPUT NAME PAD IDX DENSITY VALID TOKENS TOTAL TOKENS VALID TOKENS/BATCH"
    assert heads in shown
    assert f"60 EMBED input_ids 1 35.21 % 1442 4096 {GLUE}" in shown
    for step, share, valid in zip(
        (711, 713, 715, 717, 719), (13.77, 14.48, 14.18, 14.53, 15.31), MLM, strict=True
    ):
        assert f"{step} LABEL labels -100 {share} % {valid} 4096 N/A" in shown


@pytest.mark.row("E4")
def test_dynamic_batching_is_advised_with_its_gain():
    rows = (DensityRow(1, EMBED, "input_ids", 1, sum(GLUE), 4096, tuple(GLUE)),)
    report = DensityReport(Density(rows), "run 1", tokens="no CUDA", labels="absent")
    assert report.padded_to_longest("input_ids") == 85 / 128
    shown = flat(report)
    assert "64.8 % of the tokens are padding" in shown
    assert "would leave 66.4 % of the tokens" in shown
    assert "acts on CUDA only" in shown


@pytest.mark.row("E4", "D7")
def test_advice_says_whether_label_sparsity_reaches_the_labels():
    batch = masked()
    for model, options, words in (
        (bert(seen=False), {}, "cannot see this loss"),
        (bert(), {}, "it cuts about 75.0 % of the loss FLOPs"),
        (bert(), {"label_sparse_optimizer": False}, "will cut about 75.0 % of the loss FLOPs"),
        (bert(), {"engine": "eager"}, "needs engine=ort"),
    ):
        lab = ortlab.wrap(model, **options)
        report = lab.density(batch)
        lab.unwrap()
        assert words in flat(report)
        assert words in html.render(report)
        assert report.source == "1 batch"
        assert report.rows[1].valid == 16
    lab = ortlab.wrap(bert())
    assert "label sparsity has nothing to do" in flat(lab.density(masked(labelled=1)))
    lab.unwrap()


@pytest.mark.row("D7", "T4")
def test_toggling_label_sparsity_is_measured(wrap):
    model, batch = bert(), masked()
    lab = wrap(model, print_input_density=True)

    def step():
        seen.append(lab.density().rows)
        loss = model(**batch)["loss"]
        loss.backward()
        return loss

    seen = []
    with pytest.raises(StepError, match="No run has counted"):
        lab.density()
    lab.step(step, n=3)
    assert [len(rows) for rows in seen] == [0, 2, 4]  # live: what the steps before have counted
    configuration = lab._bench.configuration
    report = lab.density(measure=1)
    assert lab._bench.configuration == configuration
    (effect,) = report.effects
    assert effect.switch == "label_sparse_optimizer"
    assert not effect.failure
    assert (effect.rounds, effect.steps) == (1, 3)
    # Three quarters of the decoder's products, forward and backward.
    assert effect.flops_without - effect.flops_with == 3 * 2 * 48 * 16 * 60
    assert effect.time_ratio > 0
    assert effect.loss_difference is not None
    assert effect.loss_difference < 1e-5
    again = DensityReport.from_dict(json.loads(json.dumps(report.to_dict())))
    # As text: the interval of so few steps is nan, which equals nothing.
    assert json.dumps(again.to_dict()) == json.dumps(report.to_dict())
    assert "On against off, measured" in flat(report)
    assert ortlab.plot(report).axes


def test_labels_that_are_absent_and_a_pad_index_that_is_absent_are_named(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 1))
    lab = wrap(model)
    report = lab.density(torch.randint(10, (2, 3)))
    shown = flat(report)
    assert not report.density
    assert (report.labels, report.tokens) == ("absent", "absent")
    assert "No padding was counted" in shown
    assert "No labels were counted" in shown
    assert not ortlab.plot(report).axes[0].lines


def test_labels_that_are_all_ignored_are_named(wrap):
    model, batch = bert(), masked()
    batch["labels"][:] = -100
    lab = wrap(model)
    report = lab.density(masked(), batch)
    (row,) = report.all_ignored
    assert row.step == 2
    assert "Every label of labels was ignored in 1 of the steps (step 2 first)" in flat(report)


def test_a_batch_that_does_not_fit_is_named(wrap):
    lab = wrap(nn.Embedding(5, 3, padding_idx=0))
    with pytest.raises(StepError, match="Batch 2 cannot be given to Embedding"):
        lab.density(torch.ones(2, 3, dtype=torch.long), {"colour": 1})


@pytest.mark.parametrize("shift", [False, True])
def test_token_loss_is_the_loss_of_transformers(shift, wrap):
    torch.manual_seed(0)
    if shift:
        model = small_transformers.gpt2(layers=1, width=16, words=60, drop=0.1, use_cache=True).eval()
    else:
        model = bert(seen=False).eval()
    batch = masked()
    expected = model(**batch).loss
    ortlab.with_loss(model, ortlab.TokenLoss(shift=shift), loss_only=True)
    torch.testing.assert_close(model(**batch).loss, expected)
    assert model(**batch).logits is not None  # in evaluation all is there
    model.train()
    again = pickle.loads(pickle.dumps(model))  # noqa: S301 - it was written a moment ago
    for one in (model, copy.deepcopy(model), again):
        assert set(one(**batch)) == {"loss"}
    wrap(model)
    model.eval()
    torch.testing.assert_close(model(**batch).loss, expected)


def test_token_loss_refuses_what_does_not_fit():
    loss = ortlab.TokenLoss()
    logits, labels = torch.randn(2, 3, 5), torch.ones(2, 3, dtype=torch.long)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    for outputs in (logits, (logits, 1), {"logits": logits}):
        torch.testing.assert_close(loss(outputs, labels), expected)
    with pytest.raises(StepError, match="do not fit labels"):
        loss(logits, labels[0])
    with pytest.raises(StepError, match="no logits in a dict"):
        loss({"scores": logits}, labels)
