"""Rows that a mask chooses may be none, one or many in each step, as those of an expert."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ortlab

pytestmark = pytest.mark.usefixtures("ortmodule")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x.view(-1, 2, 8))[0].flatten(1)


EXPERTS = {
    "linear": lambda: nn.Linear(16, 16),
    "network": lambda: nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 16)
    ),
    "layer normalisation": lambda: nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Softmax(-1)
    ),
    "group normalisation": lambda: nn.Sequential(nn.Linear(16, 16), nn.GroupNorm(2, 16)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()
    ),
    "recurrent": Recurrent,
}


def added(out, x, chosen, expert):
    places = chosen.nonzero()[:, 0]
    return out.index_add(0, places, expert(x[places]))


def assigned(out, x, chosen, expert):
    out = out.clone()
    out[chosen] = expert(x[chosen])
    return out


def copied(out, x, chosen, expert):
    (places,) = torch.where(chosen)
    return out.index_copy(0, places, expert(x[places]))


class Experts(nn.Module):
    def __init__(self, expert, give):
        super().__init__()
        self.experts, self.give = nn.ModuleList(expert() for _ in range(3)), give

    def forward(self, x):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = self.give(out, x, x[:, 0].long() == number, expert)
        return out


@pytest.mark.parametrize("give", [added, assigned, copied])
@pytest.mark.parametrize("kind", EXPERTS)
def test_an_expert_gets_no_row_one_or_many(kind, give):
    torch.manual_seed(0)
    model = Experts(EXPERTS[kind], give)
    plain = copy.deepcopy(model)
    lab = ortlab.wrap(model)
    # How many rows go to each; the first batch decides what is exported.
    for counts in ((3, 1, 0), (0, 2, 3), (1, 0, 4), (2, 2, 1)):
        x = torch.randn(sum(counts), 16)
        x[:, 0] = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)) + 0.5
        for one in (model, plain):
            one.zero_grad()
            one(x).square().sum().backward()
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    assert lab.status.executed_by == "ort"
