"""A snapshot brings back every bit, whatever the optimizer."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from ortlab.runs.experiment import DataDigest, Snapshot, is_stateful


def make(optimizer_class, **settings):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    return model, optimizer_class(model.parameters(), **settings)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 4) + random.random() + np.random.rand()  # noqa: NPY002 - the generators under test
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
        (torch.optim.Adamax, {"lr": 0.1}),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_training_repeats_itself_bit_for_bit(optimizer_class, settings, steps_before):
    model, optimizer = make(optimizer_class, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, steps_before)
    snapshot = Snapshot(model, [optimizer, schedule])
    gradient = model[0].weight.grad
    first = train(model, optimizer, 4)
    schedule.step()
    snapshot.put_back()
    assert schedule.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (model[0].weight.grad is None) == (gradient is None)
    assert Snapshot(model, [optimizer, schedule]).digest == snapshot.digest
    assert train(model, optimizer, 4) == first


def test_objects_keep_their_identity():
    model, optimizer = make(torch.optim.AdamW)
    weight = model[0].weight
    snapshot = Snapshot(model, [optimizer])
    train(model, optimizer, 2)
    model.eval()
    snapshot.put_back()
    assert model[0].weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.data.view(-1)[3].add_(1e-6),
        lambda model: model[1].running_mean.add_(1.0),
        lambda _: torch.rand(1),
    ],
    ids=["a weight", "a buffer", "the random state"],
)
def test_the_digest_tells_one_start_from_another(change):
    model, optimizer = make(torch.optim.AdamW)
    before = Snapshot(model, [optimizer]).digest
    change(model)
    assert Snapshot(model, [optimizer]).digest != before


def test_the_seed_for_ort_follows_from_the_random_state():
    model, _ = make(torch.optim.SGD)
    torch.manual_seed(0)
    first = Snapshot(model).ort_seed
    torch.rand(1)
    second = Snapshot(model).ort_seed
    torch.manual_seed(0)
    assert Snapshot(model).ort_seed == first != second
    assert min(first, second) >= 2


def test_the_data_digest_sees_values_shapes_and_order():
    def digest(*values):
        one = DataDigest()
        one.update(*values)
        return one.hexdigest()

    a, b = torch.arange(6), torch.arange(6).flip(0)
    digests = [digest(a), digest(b), digest(a.view(2, 3)), digest(a, b), digest(b, a), digest({"x": a}, 1)]
    assert len(set(digests)) == len(digests)
    assert digest({"x": [a, None]}) == digest({"x": [a.clone(), None]})
    assert digest(torch.ones(3, dtype=torch.bfloat16)) != digest(torch.ones(3, dtype=torch.float16))


def test_what_can_be_kept():
    model, optimizer = make(torch.optim.SGD)
    assert is_stateful(optimizer)
    assert is_stateful(model)
    assert not is_stateful(torch.optim.SGD)
    assert not is_stateful({"state_dict": 1})
