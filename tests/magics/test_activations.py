"""%ort_activations shows what is kept for backward."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError


def test_the_activations_of_a_stepped_model(stepped_shell):
    activations = stepped_shell.run("%ort_activations")
    assert activations.total_bytes == stepped_shell.user_ns["lab"].activations().total_bytes > 0
    assert "what is kept for backward" in stepped_shell.formats(activations)["text/html"]
    doubled = stepped_shell.run("%ort_activations --at batch=10 --by operator")
    assert doubled.symbols["input_dim0"] == 10
    assert "By layer" not in stepped_shell.formats(doubled)["text/plain"]
    assert stepped_shell.run("%ort_activations --plans").plans_known


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%ort_activations --by colour", "colour"),
        ("%ort_activations --at batch", "no size"),
        ("%ort_activations --at batch=0", "batch cannot be 0"),
        ("%ort_activations --part encoder", "no wrapped part"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(stepped_shell, line, words):
    with pytest.raises(UsageError, match=words):
        stepped_shell.run(line)


def test_before_a_step_it_says_what_to_do(net_shell):
    with pytest.raises(UsageError, match="Run a step first"):
        net_shell.run("%ort_activations")
