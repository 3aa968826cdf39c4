"""What plans cost: predicted for the last step, measured where asked for, and shown for that step only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortlab
from ortlab.memory.recompute import PlanCost, best_costs
from ortlab.render import text


class _Wide(nn.Module):
    """Two wide GELUs, each result of several MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.mean()


@pytest.fixture(scope="module")
def wide():
    torch.manual_seed(3)
    model = _Wide()
    x = torch.randn(16384, 64)

    def step():
        loss = model(x)
        loss.backward()
        model.zero_grad()
        return loss

    lab = ortlab.wrap(model)
    lab.step(step, progress=False)
    yield lab
    lab.unwrap(forget=True)


@pytest.mark.row("F7", "F8")
def test_plans_are_priced_and_the_lab_is_as_it_was(wide):
    runs, configuration = len(wide.runs), wide._bench.configuration
    plan = wide.plan(costs=True, progress=False)
    assert (len(wide.runs), wide._bench.configuration) == (runs, configuration)
    gelu = next(row for row in plan.rows if row.config == "Gelu+:1:-1")
    assert gelu.peak_saving_bytes > 16384 * 64 * 4  # two or three results of 4 MiB
    assert gelu.cost_ms > 0
    assert gelu.measured_cost_ms is None
    page = text.render(plan)
    assert "off the peak" in page
    assert "predicted from a profiled step" in page


@pytest.mark.parametrize(
    ("on", "config"),
    [
        ({"memory_plan": ("Gelu+:1:-1",)}, "Gelu+:1:-1"),
        ({"recompute": "all but matmuls"}, "recompute=all but matmuls"),
    ],
)
def test_what_is_on_is_said_beside_its_costs(wide, on, config):
    wide.set(**on)
    plan = wide.plan(costs=True, progress=False)
    wide.set(memory_plan=(), recompute=())
    rows = [*plan.rows, *plan.recomputed]
    assert [one.config for one in rows if one.enabled] == [config]
    assert all(row.cost_ms is not None for row in rows)


def test_the_lab_shows_the_costs_for_this_step_only(wide):
    priced = wide.plan(costs=True, progress=False)
    assert wide.plan() == priced
    wide.step(wide._bench.experiment.step, progress=False)
    assert all(row.cost_ms == known.cost_ms for row, known in zip(wide.plan().rows, priced.rows, strict=True))
    x = torch.randn(64, 64)
    wide.step(lambda: wide.module(x).backward(), progress=False)
    assert all(row.cost_ms is None for row in wide.plan().rows)


def test_plans_are_measured_where_asked_for(wide):
    x = torch.randn(16384, 64)

    def step():
        loss = wide.module(x)
        loss.backward()
        wide.module.zero_grad()
        return loss

    wide.step(step, progress=False)
    before = [tensor.clone() for tensor in wide.module.state_dict().values()]
    plan = wide.plan(costs=True, measure=1, rounds=1, progress=False)
    measured = [row for row in plan.rows if row.measured_saving_bytes is not None]
    assert len(measured) == 1
    assert measured[0].measured_saving_bytes == pytest.approx(measured[0].peak_saving_bytes, abs=2 * 2**20)
    assert measured[0].measured_cost_ms is not None
    assert len(wide.sweeps) == 1  # the runs behind the figure
    assert all(
        torch.equal(one, other) for one, other in zip(before, wide.module.state_dict().values(), strict=True)
    )


def test_plans_are_priced_while_another_engine_runs_the_model(wide):
    configuration = wide._bench.configuration
    try:
        wide.set(engine="eager")
        plan = wide.plan(costs=True)
        assert wide.engine == "eager"
        assert any(row.cost_ms for row in plan.rows)
    finally:
        wide._bench.configure(configuration)


def test_the_order_of_nodes_is_no_merit_of_a_plan():
    costs = {
        "a": PlanCost(10.0, 0.001),
        "b": PlanCost(110.0, 10.0),
        "c": PlanCost(60.0, 1.0),
        "d": PlanCost(-5.0, 0.1),
    }
    assert list(best_costs(costs, 2, beyond=10.0)) == ["c", "b"]
    assert list(best_costs(costs, 2)) == ["a", "c"]


def test_prices_are_of_a_step_that_recomputes_nothing(wide):
    """A lab with `recompute` on has it on afterwards, and what plans are held against recomputes nothing."""
    wide.set(recompute="all but matmuls")
    try:
        wide.rerun()
        plan = wide.plan(costs=True, measure=1, rounds=1, progress=False)
        assert wide.options.recompute == ("all but matmuls",)
        assert any(row.measured_cost_ms is not None for row in plan.rows)
        points = wide.sweeps[-1].points
        assert len(points) == 2
        assert not points[0].configuration.recomputing
        assert {point.configuration.options.recompute for point in points} == {()}
    finally:
        wide.set(recompute=()).rerun()


class _Sound(nn.Module):
    """A wave whose number of frames no input has as a size; `folded` has it go through a shape that is computed."""

    def __init__(self, *, folded: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            4, 16, 5, stride=3, groups=2
        )  # PyTorch's kernel, whose sizes ORT does not infer
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.folded = folded

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        frames = self.conv(wave).transpose(1, 2)
        if self.folded:
            frames = frames[wave.mean((1, 2)) < 1e9]  # all of them, which no shape tells
        return self.narrow(nn.functional.gelu(self.wide(frames))).square().mean()


@pytest.mark.parametrize("folded", [False, True])
def test_what_no_input_gives_the_size_of_is_worked_out(wrap, folded):
    torch.manual_seed(3)
    model = _Sound(folded=folded)
    lab = wrap(model)
    wave = torch.randn(2, 4, 300)
    lab.step(lambda: model(wave).backward(), n=2, progress=False)
    wide = 2 * 99 * 64 * 4  # 99 frames of 64 floats in each of 2 samples

    def behind(plan):
        """The plan for the GELU between the two linear layers."""
        return next(row for row in plan.rows if row.cluster == "Gelu+")

    plan = lab.plan()
    assert behind(plan).unresolved
    if folded:
        assert behind(plan).saving_bytes is None
        assert plan.rows[-1].saving_bytes is None
        said = " ".join(text.render(plan).split())
        assert "lab.plan(costs=True) reads them from a step" in said
        plan = lab.plan(costs=True, progress=False)
        assert behind(lab.plan()).saving_bytes == wide
    assert behind(plan).saving_bytes == wide
    assert [row.saving_bytes for row in plan.rows] == sorted(
        (row.saving_bytes for row in plan.rows), reverse=True
    )
    said = " ".join(text.render(plan).split())
    assert "unresolved" not in said
    assert "worked out from the shapes of what is no longer kept" in said
    assert behind(plan.at(batch=4)).saving_bytes is None  # that is of another batch
    assert type(plan).from_dict(plan.to_dict()) == plan
