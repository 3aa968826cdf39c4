"""%ort_activations shows what is kept for backward."""

from __future__ import annotations


def test_the_activations_of_a_stepped_model(stepped_shell):
    activations = stepped_shell.run("%ort_activations")
    assert activations.total_bytes == stepped_shell.user_ns["lab"].activations().total_bytes > 0
    assert "what is kept for backward" in stepped_shell.formats(activations)["text/html"]
    doubled = stepped_shell.run("%ort_activations --at batch=10 --by operator")
    assert doubled.symbols["input_dim0"] == 10
    assert "By layer" not in stepped_shell.formats(doubled)["text/plain"]
    assert stepped_shell.run("%ort_activations --plans").plans_known
