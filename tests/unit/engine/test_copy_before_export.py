"""`deepcopy_before_export` makes a copy of the model for its trial run, or none; what is trained is the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ortlab.options.options import Options


class Counting(nn.Module):
    """Counts how often it is copied; has statistics that a forward in training mode changes."""

    copies = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def __deepcopy__(self, memo):
        Counting.copies += 1
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().mean()


@pytest.mark.parametrize("copied", [True, False])
def test_a_copy_is_made_where_the_option_says_so_and_numbers_are_pytorchs_either_way(copied, wrap):
    torch.manual_seed(2)
    model, x = Counting(), torch.randn(8, 4)
    eager = copy.deepcopy(model)
    expected = eager(x)
    expected.backward()
    wrap(model, options=Options(deepcopy_before_export=copied))
    Counting.copies = 0
    loss = model(x)
    loss.backward()
    assert bool(Counting.copies) == copied
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.linear.weight.grad, eager.linear.weight.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
