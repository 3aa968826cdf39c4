"""Facts about a tensor are right, in our records and in the files of ORTModule's own subscriber."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import python
from torch import nn

import ortlab
from ortlab.records import activation_statistics as statistics
from ortlab.records.activation_statistics import TensorStatistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("block", [7, 2**24])
def test_they_are_those_of_torch(dtype, block, monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", block)
    torch.manual_seed(2)
    tensor = (torch.randn(5, 40) * 9).to(dtype)
    tensor[0, :3] = 0
    facts = TensorStatistics.of(tensor)
    exact = tensor.double()
    assert (facts.shape, facts.dtype, facts.size) == ((5, 40), str(dtype), 200)
    assert (facts.minimum, facts.maximum) == (exact.min(), exact.max())
    assert facts.mean == pytest.approx(float(exact.mean()), rel=1e-12)
    assert facts.std == pytest.approx(float(exact.std()), rel=1e-12)
    assert (facts.negative, facts.positive) == (int((exact < 0).sum()), int((exact > 0).sum()))
    assert facts.zero == int((exact == 0).sum()) >= 3
    assert facts.sample == tuple(exact.reshape(-1)[:128].tolist())


def test_values_far_from_zero_lose_no_digits(monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", 3)
    tensor = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64) + 1e9
    assert TensorStatistics.of(tensor).std == pytest.approx((5 / 3) ** 0.5, rel=1e-6)


def test_nan_and_infinity_are_counted():
    facts = TensorStatistics.of(torch.tensor([1.0, float("nan"), float("inf"), float("-inf")]))
    assert (facts.nan, facts.inf, facts.positive, facts.negative) == (1, 2, 2, 1)
    assert facts.mean != facts.mean  # nan


def test_nan_in_one_block_is_that_of_the_whole(monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", 2)
    facts = TensorStatistics.of(torch.tensor([1.0, -2.0, float("nan"), 0.0, 5.0]))
    assert facts.minimum != facts.minimum
    assert facts.maximum != facts.maximum
    assert (facts.nan, facts.positive, facts.negative, facts.zero) == (1, 2, 1, 1)


def test_what_is_looked_at_stays_as_it_is():
    tensor = torch.arange(-3.0, 4.0, dtype=torch.float64).reshape(1, 7).t()
    facts, transposed = TensorStatistics.of(tensor), torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(tensor[:, 0], torch.arange(-3.0, 4.0, dtype=torch.float64))
    assert (facts.minimum, facts.maximum, facts.mean) == (-3.0, 3.0, 0.0)
    assert TensorStatistics.of(transposed).sample == (0.0, 3.0, 1.0, 4.0, 2.0, 5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_block_of_another_device_is_looked_at_as_one_of_the_cpu(dtype):
    torch.manual_seed(2)
    block = (torch.randn(1001) * 9).to(dtype)
    here = statistics._on_cpu(2000)(block)
    there = statistics._elsewhere(block)  # torch's operators, which every device has
    assert here[:4] == there[:4]
    assert here[4:] == pytest.approx(there[4:], rel=1e-12)


@pytest.mark.parametrize("size", [0, 1])
def test_too_few_elements_have_no_deviation(size):
    facts = TensorStatistics.of(torch.ones(size))
    assert facts.std != facts.std  # nan
    assert facts.size == size


def written_std(folder):
    texts = [path.read_text() for path in Path(folder).rglob("*_forward") if path.is_file()]
    assert texts
    return {text.lstrip(">").split()[0]: float(re.search(r"std: (\S+)", text)[1]) for text in texts}


@pytest.mark.row("T12")
def test_the_files_of_the_subscriber_hold_the_right_deviation(tmp_path):
    torch.manual_seed(2)
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(16, 4)
    with torch.no_grad():
        expected = {"Linear": float(module[0](x).std()), "Tanh": float(module(x).std())}
    lab = ortlab.wrap(module, engine="eager")
    from ortlab.engine import load

    load()
    from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber

    options = dict(vars(torch._tensor_str.PRINT_OPTS))
    GlobalSubscriberManager.subscribe(module, [StatisticsSubscriber(str(tmp_path / "out"))])
    module(x)
    lab.unwrap()
    found = written_std(tmp_path / "out")
    assert vars(torch._tensor_str.PRINT_OPTS) == options
    for kind, std in expected.items():
        (value,) = [value for name, value in found.items() if name.startswith(kind)]
        assert value == pytest.approx(std, rel=1e-5)


RAW = """
import sys
from fault_cases import unrepaired
unrepaired()
import torch
from torch import nn
from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber
torch.manual_seed(2)
module = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
GlobalSubscriberManager.subscribe(module, [StatisticsSubscriber(sys.argv[1])])
module(torch.randn(16, 4))
"""


@pytest.mark.row("T12")
def test_as_released_the_deviation_of_a_tanh_is_beyond_one(tmp_path):
    subprocess.run(
        python("-W", "ignore", "-c", RAW, tmp_path / "out"),
        check=True,
        cwd=Path(__file__).with_name("engine"),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    (value,) = [value for name, value in written_std(tmp_path / "out").items() if name.startswith("Tanh")]
    assert value > 1  # which no values between -1 and 1 have
