"""`%ort_compare_engines`: the lab beside its candidates, asked for in one line."""

from __future__ import annotations


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
