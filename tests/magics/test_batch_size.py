"""%ort_find_batch_size: names, sizes and limits on a line."""

from __future__ import annotations

import pytest

SETUP = """
import torch, ortlab
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
lab = ortlab.wrap(model, engine="eager")
def make_batch(size):
    return torch.ones(size, 4)
def train(batch):
    loss = model(batch).mean()
    loss.backward()
    model.zero_grad()
limit, some, plans = "64 GiB", [1, 2], ("Gelu+:1:-1",)
"""


@pytest.fixture
def batch_size_shell(shell):
    """A shell with a lab and what a search needs."""
    shell.run(SETUP)
    yield shell
    shell.run("lab.unwrap()")


def test_a_line_is_a_hunt(batch_size_shell):
    search = batch_size_shell.run(
        "%ort_find_batch_size make_batch --limit 64 GiB --train train --sizes 1,2 -n 1"
    )
    assert (search.asked_bytes, search.sizes, search.steps) == (64 << 30, (1, 2), 1)
    assert batch_size_shell.user_ns["lab"].batch_size_searches == [search]
    shown = batch_size_shell.formats(search)
    assert "no plan is needed" in shown["text/plain"]
    assert "data:image/svg+xml" in shown["text/html"]
    search = batch_size_shell.run(
        "%ort_find_batch_size make_batch --limit $limit --train train --sizes $some -n 1"
    )
    assert (search.asked_bytes, search.sizes) == (64 << 30, (1, 2))
