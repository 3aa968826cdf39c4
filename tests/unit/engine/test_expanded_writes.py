"""An augmented assignment to an expanded tensor, in a branch that only a trace takes, is exported with its meaning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import BuildError

pytestmark = pytest.mark.usefixtures("ortmodule")


class Masked(nn.Module):
    """Joins an expanded mask only while it is traced, as transformers 4.56 does beside torch 2.4."""

    def __init__(self, join):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.join = join

    def forward(self, x):
        y = self.linear(x)
        mask = torch.ones(4, 4, dtype=torch.bool).tril()[None].expand(x.shape[0], -1, -1)
        mask = self.join(mask) if torch.jit.is_tracing() else mask | mask[..., :1]
        return y[:, None].masked_fill(~mask, 0.0).sum(-1)


def joined(mask):
    mask |= mask[..., :1]
    return mask


def left_behind(mask):
    mask.logical_or_(
        mask[..., :1]
    )  # the result is dropped, so PyTorch's meaning would be that `mask` has changed
    return mask & mask


@pytest.fixture
def wrapped():
    labs = []

    def wrap(join):
        torch.manual_seed(3)
        labs.append(ortlab.wrap(Masked(join)))
        return labs[-1]

    yield wrap
    for lab in labs:
        lab.unwrap()


def test_the_name_stands_for_the_result(wrapped):
    lab = wrapped(joined)
    x = torch.randn(3, 4)
    expected = lab.module.linear(x)[:, None].expand(-1, 4, -1).sum(-1)  # the first column is all true
    actual = lab.module(x)
    actual.sum().backward()
    assert lab.status.executed_by == "ort"
    torch.testing.assert_close(actual, expected)


def test_what_a_write_left_behind_is_not_read(wrapped):
    with pytest.raises(BuildError, match="Reading an expanded tensor that was written to"):
        wrapped(left_behind).module(torch.randn(3, 4))


def test_pytorch_refuses_the_same_without_a_trace():
    with pytest.raises(RuntimeError, match="single memory location"):
        joined(torch.ones(1, 4, 4, dtype=torch.bool).expand(3, -1, -1))
