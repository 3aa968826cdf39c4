"""%ort_hunt: names, sizes and limits on a line."""

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
def hunting_shell(shell):
    """A shell with a lab and what a hunt needs."""
    shell.run(SETUP)
    yield shell
    shell.run("lab.unwrap()")


def test_a_line_is_a_hunt(hunting_shell):
    hunt = hunting_shell.run("%ort_hunt make_batch --limit 64 GiB --train train --sizes 1,2 -n 1")
    assert (hunt.limit_bytes, hunt.sizes, hunt.steps) == (64 << 30, (1, 2), 1)
    assert hunting_shell.user_ns["lab"].hunts == [hunt]
    shown = hunting_shell.formats(hunt)
    assert "no plan is needed" in shown["text/plain"]
    assert "<svg" in shown["text/html"]
    hunt = hunting_shell.run("%ort_hunt make_batch --limit $limit --train train --sizes $some -n 1")
    assert (hunt.limit_bytes, hunt.sizes) == (64 << 30, (1, 2))


REFUSED = {
    "make_batch": "needs a limit",
    "make_batch --limit 6 GX": "'gx'",
    "make_batch --limit 0": "above zero",
    "make_batch --limit 1MiB": "below what is in use",
    "nothing --limit 6GiB": "There is no variable 'nothing'",
    "some --limit 6GiB": "not a list",
    "make_batch --limit 6GiB --train nothing": "nothing",
    "make_batch --limit 6GiB --sizes 1,x": "--sizes takes a whole number",
    "make_batch --limit 6GiB --sizes 0": "not 0",
    "make_batch --limit 64GiB --sizes 2": "without a loss",
    "make_batch --limit 64GiB --plans Gelu+:1:-1": "act in ONNX Runtime",
    "make_batch --limit 64GiB --plans $plans": "act in ONNX Runtime",
    "make_batch --limit 64GiB --plans $some": "1 is no set of plans",
    "make_batch --resume": "no hunt to resume",
}


def test_what_makes_no_sense_is_a_usage_error(hunting_shell):
    lab = hunting_shell.user_ns["lab"]
    before = lab.configuration
    for line, said in REFUSED.items():
        with pytest.raises(UsageError) as caught:
            hunting_shell.run(f"%ort_hunt {line}")
        assert type(caught.value) is UsageError
        assert said in str(caught.value), line
        assert lab.configuration == before
        assert lab.hunts == []
