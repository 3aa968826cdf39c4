"""%ort_find_batch_size: names, sizes and limits on a line."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

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


REFUSED = {
    "make_batch": "needs a limit",
    "make_batch --limit 6 GX": "'gx'",
    "make_batch --limit 0B": "above zero",
    "make_batch --limit 70%": "a search changes the batch",
    "make_batch --limit 1GiB --device 1GiB": "one limit",
    "make_batch --device 1MiB": "below what is in use",
    "nothing --limit 6GiB": "There is no variable 'nothing'",
    "some --limit 6GiB": "not a list",
    "make_batch --limit 6GiB --train nothing": "nothing",
    "make_batch --limit 6GiB --sizes 1,x": "--sizes takes a whole number",
    "make_batch --limit 6GiB --sizes 0": "not 0",
    "make_batch --limit 64GiB --sizes 2": "without a loss",
    "make_batch --limit 64GiB --plans Gelu+:1:-1": "act in ONNX Runtime",
    "make_batch --limit 64GiB --plans $plans": "act in ONNX Runtime",
    "make_batch --limit 64GiB --plans $some": "1 is no set of plans",
    "make_batch --resume": "no search to resume",
}


def test_what_makes_no_sense_is_a_usage_error(batch_size_shell):
    lab = batch_size_shell.user_ns["lab"]
    before = lab._bench.configuration
    for line, said in REFUSED.items():
        with pytest.raises(UsageError) as caught:
            batch_size_shell.run(f"%ort_find_batch_size {line}")
        assert type(caught.value) is UsageError
        assert said in str(caught.value), line
        assert lab._bench.configuration == before
        assert lab.batch_size_searches == []
