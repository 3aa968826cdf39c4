"""The lab of the tests that only look at one."""

from __future__ import annotations

import pytest
import torch

import ortlab


@pytest.fixture(scope="module")
def lab():
    """Wrap two layers with a Gelu each, after one backward."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32),
        torch.nn.GELU(),
        torch.nn.Linear(32, 32),
        torch.nn.GELU(),
        torch.nn.Linear(32, 2),
    )
    lab = ortlab.wrap(model)
    model(torch.randn(4, 8)).sum().backward()
    yield lab
    lab.unwrap()
