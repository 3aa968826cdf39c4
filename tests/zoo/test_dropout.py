"""Dropout: how much is dropped, and that losses and gradients are distributed as in PyTorch."""

from __future__ import annotations

import copy

import pytest
import small_transformers
import torch
from scipy import stats
from torch import nn

import ortlab

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SIGNIFICANT = 1e-4
"""The draws are seeded, so this is no chance of failing: it is how unlike two distributions may be."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.dropout, self.b = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1)

    def forward(self, x):
        return self.b(self.dropout(torch.tanh(self.a(x)))).pow(2).mean()


def bert(attention):
    more = {"intermediate_size": 16, "attention_probs_dropout_prob": 0.5, "attn_implementation": attention}
    return small_transformers.bert(layers=1, width=16, words=20, **more)


@pytest.fixture
def wrapped():
    """Return a function that wraps a copy of a model."""
    labs = []

    def wrap(model):
        labs.append(ortlab.wrap(copy.deepcopy(model).train()))
        return labs[-1].module

    torch.manual_seed(0)
    yield wrap
    for lab in labs:
        assert lab.status.executed_by == "ort"
        lab.unwrap()


def draws(loss_of, weight, count):
    """Return loss and three figures of a weight's gradient, for each of so many seeds: shape (4, count)."""
    rows = []
    for seed in range(count):
        torch.manual_seed(100 + seed)
        weight.grad = None
        loss = loss_of()
        loss.backward()
        flat = weight.grad.flatten()
        rows.append([loss.item(), flat[0].item(), flat[-1].item(), flat.norm().item()])
    return torch.tensor(rows).T


def assert_alike(expected, actual):
    for name, ours, theirs in zip(("loss", "first", "last", "norm"), actual, expected, strict=True):
        assert ours.std() > 0, f"nothing was dropped: {name}"
        assert stats.ks_2samp(ours, theirs).pvalue > SIGNIFICANT, name
        assert stats.ttest_ind(ours, theirs, equal_var=False).pvalue > SIGNIFICANT, f"mean of {name}"
        assert stats.levene(ours, theirs).pvalue > SIGNIFICANT, f"variance of {name}"


def test_losses_and_gradients_over_many_seeds_agree_with_pytorch(wrapped):
    reference = Net().train()
    model = wrapped(reference)
    x = torch.randn(6, 8)
    expected = draws(lambda: reference(x), reference.a.weight, 400)
    assert_alike(expected, draws(lambda: model(x), model.a.weight, 400))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_over_many_seeds_agrees_with_pytorch(attention, wrapped):
    reference = bert(attention).train()
    model = wrapped(reference)
    ids = torch.randint(1, 20, (2, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    name = "bert.encoder.layer.0.attention.self.value.weight"
    expected, actual = (
        draws(lambda one=one: one(**batch).loss, one.get_parameter(name), 120) for one in (reference, model)
    )
    assert_alike(expected, actual)


def test_the_share_that_is_dropped_and_the_scale_of_the_rest(wrapped):
    layer = wrapped(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout(0.3)))
    with torch.no_grad():
        layer[0].weight.fill_(1.0)
    count = 100_000
    outputs = layer(torch.ones(count, 1))
    kept = (outputs != 0).double().mean().item()
    assert kept == pytest.approx(0.7, abs=5 * (0.3 * 0.7 / count) ** 0.5)
    torch.testing.assert_close(outputs[outputs != 0], torch.full((int((outputs != 0).sum()),), 1 / 0.7))
    outputs.sum().backward()
    torch.testing.assert_close(layer[0].weight.grad, outputs.sum().reshape(1, 1), rtol=1e-4, atol=0)


def test_a_seed_repeats_its_masks_and_another_does_not(wrapped):
    model = wrapped(Net())
    x = torch.randn(6, 8)
    losses = []
    for seed in (7, 8, 7):
        torch.manual_seed(seed)
        losses.append([model(x).item() for _ in range(3)])
    assert losses[0] == losses[2]
    assert len(set(losses[0] + losses[1])) == 6
