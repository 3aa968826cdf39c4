"""PyTorch's times beside a profile: each module has its own part of the forward and of the backward."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortlab.analyses.profiling import ModuleClock
from ortlab.errors import OptionError
from ortlab.render import html, text

FORWARD, BACKWARD = 0.02, 0.03
"""Seconds that the slow layer sleeps in each pass: it can take longer, and never less."""


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        time.sleep(FORWARD)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        time.sleep(BACKWARD)
        return gradient * 2 + 0 * x


class SlowLayer(nn.Module):
    def forward(self, x):
        return Slow.apply(x)


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), SlowLayer()) for _ in range(2)])
        self.head = nn.Linear(4, 2)
        self.how = how

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.how == "reentrant") if self.how else layer(x)
        return {"loss": self.head(x).sum()}


def times_of(model, batch):
    with ModuleClock(model).running() as times:
        model(batch)["loss"].backward()
    return times


def test_a_module_has_its_own_part_of_both_passes():
    times = times_of(Model(), torch.ones(3, 4))
    slow = {path for path, ms in times.items() if ms >= 1000 * (FORWARD + BACKWARD)}
    assert slow == {"layers.0.1", "layers.1.1"}
    assert set(times) >= {"", "head", "layers.0", "layers.0.0", "layers.1.0"}
    assert sum(ms for path, ms in times.items() if path not in slow) < 1000 * FORWARD


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_what_is_recomputed_is_the_time_of_its_module(how):
    Model(how)(torch.ones(3, 4, requires_grad=True))  # the first one imports
    times = times_of(Model(how), torch.ones(3, 4, requires_grad=True))
    slow = {path for path, ms in times.items() if ms >= 1000 * (2 * FORWARD + BACKWARD)}
    assert slow == {"layers.0.1", "layers.1.1"}


def test_modules_and_hooks_are_as_before_however_a_step_ends():
    model, every_module = Model(), torch.nn.modules.module
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        times_of(model, torch.ones(3, 5))
    assert not every_module._global_forward_pre_hooks
    assert not every_module._global_forward_hooks
    assert not every_module._global_forward_hooks_always_called
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_profile_holds_each_module_against_pytorch(lab, experiment):
    lab.step(experiment.step)
    weights = {name: value.clone() for name, value in experiment.model.state_dict().items()}
    lab.set(engine="ort", memory_level=0)
    trace = lab.profile(n=1, baseline="eager", progress=False)
    assert len(lab.runs) == 1
    assert lab.engine == "ort"
    assert all(torch.equal(value, weights[name]) for name, value in experiment.model.state_dict().items())
    table = trace.by_module().set_index("module")
    assert dict(table["class"])["hidden"] == "Linear"
    assert table.loc["hidden", "nodes"] > 0
    assert table["time [ms]"].sum() == pytest.approx(trace.forward_ms + trace.backward_ms)
    assert table["eager [ms]"].sum() == pytest.approx(sum(trace.eager.values()))
    assert all(table.loc[name, "eager [ms]"] > 0 for name in ("hidden", "norm", "head", ""))
    lost = list(table["time [ms]"] - table["eager [ms]"])
    assert lost == sorted(lost, reverse=True)
    for page in (text.render(trace), html.render(trace)):
        assert "Beside PyTorch, module by module" in page
        assert "BatchNorm1d" in page


def test_layers_stand_together_and_without_a_baseline_there_is_no_column(lab, experiment):
    lab.step(experiment.step)
    trace = lab.profile(n=1, progress=False)
    assert "Beside PyTorch" not in text.render(trace)
    assert list(trace.by_module().columns) == ["module", "class", "nodes", "time [ms]"]


def test_layers_are_added_up():
    import ortlab

    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)), nn.Linear(4, 1))
    lab = ortlab.wrap(model)
    try:
        lab.step(lambda: model(torch.ones(2, 4)).sum().backward(), n=1, progress=False)
        table = lab.profile(n=1, baseline="eager", progress=False).by_module().set_index("module")
    finally:
        lab.unwrap()
    assert {"*.0", "*.1", "3"} <= set(table.index)  # what stands alone keeps its path
    assert "*" not in table.index[table["class"] == "Linear"]
    assert table.loc["*.1", "class"] == "GELU"


def test_another_baseline_is_refused(lab, experiment):
    lab.step(experiment.step)
    with pytest.raises(OptionError, match="cannot be held against 'compile'"):
        lab.profile(baseline="compile")
