"""Leave a model as it was: its buffers, what its forward changes in Python, and every generator of random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ortlab.engine.inspection.changes import Changes
from ortlab.engine.inspection.places import Places
from ortlab.engine.random_state import RandomState
from ortlab.engine.tracing.buffers import Buffers


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Put back, when the block ends in any way, what looking at a model may change in it.

    Weights are not put back: a trace refuses to write to them, and whoever runs the model in PyTorch has to use
    `weights_kept`.
    """
    random, buffers, changes = RandomState.read(), Buffers(model), Changes(model, Places(model))
    try:
        yield
    finally:
        changes.put_back()
        buffers.restore()
        random.put_back()


@contextmanager
def weights_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put the values of the weights back, for a forward in PyTorch that may write to them."""
    before = [(one, one.detach().clone()) for one in model.parameters() if not one.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, value in before:
                if not torch.equal(torch.nan_to_num(one), torch.nan_to_num(value)):
                    one.copy_(value)
