"""The engine builds what is missing, keeps what it can reuse, and lets go of the rest."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ortlab
from ortlab.engine.build_environment import build_environment
from ortlab.engine.ort import KEPT_EXPORTS


class Scaled(nn.Module):
    """A module whose graph depends on a number that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale


@pytest.fixture
def scaled():
    torch.manual_seed(0)
    return Scaled()


def test_a_build_sees_its_own_variables_only(monkeypatch):
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "2")
    monkeypatch.setenv("UNRELATED", "1")
    with build_environment({"ORTMODULE_LOG_LEVEL": "ERROR"}):
        assert [name for name in os.environ if name.startswith("ORTMODULE_")] == ["ORTMODULE_LOG_LEVEL"]
        assert os.environ["UNRELATED"] == "1"
        with build_environment({}):
            assert "ORTMODULE_LOG_LEVEL" not in os.environ
        assert os.environ["ORTMODULE_LOG_LEVEL"] == "ERROR"
    assert os.environ["ORTMODULE_MEMORY_OPT_LEVEL"] == "2"
    assert "ORTMODULE_LOG_LEVEL" not in os.environ


def test_the_variables_come_back_after_a_failure(monkeypatch):
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "2")
    with pytest.raises(KeyError), build_environment({}):
        os.environ["ORTMODULE_MEMORY_OPT_LEVEL"]
    assert os.environ["ORTMODULE_MEMORY_OPT_LEVEL"] == "2"


def test_only_so_many_executions_are_kept(scaled):
    lab = ortlab.wrap(scaled)
    x = torch.randn(3, 4)
    for scale in range(KEPT_EXPORTS + 4):
        torch.testing.assert_close(scaled(x, float(scale)), scaled.linear(x) * scale)
    engine = lab._ort
    assert len(engine._kept) == KEPT_EXPORTS + 1
    assert sum(built.execution._manager._execution_agent is not None for built in engine._kept) == 1
    lab.unwrap()


def test_training_and_evaluation_alternate_without_rebuilding(scaled):
    lab = ortlab.wrap(scaled)
    built = []
    lab._ort._on_built = built.append
    x = torch.randn(3, 4)
    for _ in range(3):
        scaled.train()
        scaled(x).sum().backward()
        scaled.eval()
        with torch.no_grad():
            scaled(x)
    assert [one.stage for one in built] == ["export", "export"]
    lab.unwrap()


def test_an_unwrapped_lab_can_be_collected(scaled):
    lab = ortlab.wrap(scaled)
    scaled(torch.randn(3, 4)).sum().backward()
    lab.unwrap()
    gone = weakref.ref(lab)
    del lab
    gc.collect()
    assert gone() is None


def test_several_forwards_before_one_backward(scaled):
    x, y = torch.randn(3, 4), torch.randn(5, 4)
    (scaled(x).pow(2).sum() + scaled(y).pow(2).sum()).backward()
    expected = scaled.linear.weight.grad.clone()
    scaled.zero_grad()
    lab = ortlab.wrap(scaled)
    (scaled(x).pow(2).sum() + scaled(y).pow(2).sum()).backward()
    torch.testing.assert_close(scaled.linear.weight.grad, expected)
    lab.unwrap()


def test_gradients_accumulate_and_reach_the_input(scaled):
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        scaled(x).pow(2).sum().backward()
    expected = (x.grad.clone(), scaled.linear.weight.grad.clone())
    x.grad = None
    scaled.zero_grad()
    lab = ortlab.wrap(scaled)
    for _ in range(2):
        scaled(x).pow(2).sum().backward()
    torch.testing.assert_close((x.grad, scaled.linear.weight.grad), expected)
    lab.unwrap()


def test_inside_distributed_data_parallel(scaled, tmp_path):
    lab = ortlab.wrap(scaled)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(scaled)
        run = lab.step(lambda: parallel(torch.ones(3, 4)).sum().backward(), n=2)
        assert run.executed_by == "ort"
        torch.testing.assert_close(scaled.linear.bias.grad, torch.full((2,), 6.0))
    finally:
        dist.destroy_process_group()
        lab.unwrap()
