"""`%ort_compare_engines`: the lab beside its candidates, asked for in one line."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError


def test_peers_are_shown_with_their_memory(stepped_shell):
    stepped_shell.user_ns["more"] = [{"memory_level": 1}]
    found = stepped_shell.run(
        "%ort_compare_engines -n 3 --rounds 1 --engines eager,checkpoint:0+2 --also $more "
        "--also opset=16 memory_level=2"
    )
    assert list(found.table().index) == [
        "ort",
        "ort, memory_level=1",
        "ort, opset=16, memory_level=2",
        "eager",
        "checkpoint:0+2",
    ]
    assert set(found.table()["state"]) == {"measured"}
    assert (found.table()["step memory [bytes]"] >= 0).all()
    forms = stepped_shell.formats(found)
    for form in ("text/plain", "text/html"):
        assert "PyTorch, 0, 2 checkpointed" in forms[form]
        assert "Linear 0, Linear 2" in forms[form]
    assert forms["text/html"].count("data:image/svg+xml") == 1
    assert "<script" not in forms["text/html"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%ort_compare_engines --budgets 1,2", "no activation memory budget"),
        ("%ort_compare_engines --engines eagr", "Did you mean 'eager'"),
        ("%ort_compare_engines --also memory_levle=1", "Did you mean 'memory_level'"),
        ("%ort_compare_engines --also memory_level", "is not option=value"),
        ("%ort_compare_engines --also $missing", "There is no variable 'missing'"),
        ("%ort_compare_engines -n two", "-n takes a whole number"),
        ("%ort_compare_engines --rounds 0", "whole number from 1 on"),
        ("%ort_compare_engines extra", "unrecognized arguments: extra"),
    ],
)
def test_a_bad_line_is_a_usage_error_and_changes_nothing(eager_shell, unchanged, line, said):
    with unchanged(eager_shell), pytest.raises(UsageError) as caught:
        eager_shell.run(line)
    assert type(caught.value) is UsageError
    assert said in str(caught.value)
    assert eager_shell.user_ns["lab"].sweeps == []
