"""Looking at tensors: no copy that counts, no build that is not needed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ortlab
from ortlab.parity.parity import Distance
from ortlab.records import activation_statistics as statistics


def test_a_distance_is_that_of_all_blocks(monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", 3)
    ours, theirs = torch.arange(8.0), torch.arange(8.0) + torch.tensor([0.0, 0, 0, 2, 0, 0, 0, 1])
    assert Distance.between(ours, theirs) == Distance(pytest.approx((5 / 140) ** 0.5), 2.0)
    assert Distance.between(torch.empty(0), torch.empty(0)) == Distance(0.0, 0.0)
    ours, theirs = torch.tensor([math.inf, 3.0]), torch.tensor([math.inf, 6.0])
    assert Distance.between(ours, theirs) == Distance(1.0, 3.0)


def test_the_graph_that_is_looked_at_is_the_one_that_trains_and_the_last_run_takes_it_as_it_is(monkeypatch):
    from ortlab.engine.execution import Execution

    stages, graphs = [], []
    for stage in ("export", "build_graph", "create_session"):
        original = getattr(Execution, stage)

        def noted(self, *args, original=original, stage=stage):
            result = original(self, *args)
            stages.append(stage)
            if stage == "build_graph":
                graphs.append(result.models.optimized_model.graph.SerializeToString(deterministic=True))
            return result

        monkeypatch.setattr(Execution, stage, noted)
    torch.manual_seed(3)
    model, x = (
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1)),
        torch.randn(5, 8),
    )

    def step():
        loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        return loss

    lab = ortlab.wrap(model, log_level="ERROR")
    lab.step(step, progress=False, memory=False)
    lab.parity(1, dropout=True, seeds=False, progress=False)
    lab.unwrap(forget=True)
    # The step, the run that is looked at, its repetition with an export of its own; the last run looks at nothing.
    assert stages == [*("export", "build_graph", "create_session") * 3, "create_session"]
    assert graphs[0] == graphs[1] == graphs[2]
