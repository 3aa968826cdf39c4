"""%ort_triton_kernels lists and draws what Triton runs, and says without Triton what is missing."""

from __future__ import annotations

import pytest
import triton_files
from IPython.core.error import UsageError


@pytest.fixture
def folder(stepped_shell, tmp_path, monkeypatch):
    """A folder elsewhere, with what ORT's generator writes for a sub-graph of the shell's lab."""
    lab = stepped_shell.user_ns["lab"]
    graph = lab.graph("gradient").model
    monkeypatch.chdir(tmp_path)
    known = triton_files.generator().get_supported_ops()
    name = next(node.name for node in graph.graph.node if node.op_type in known)
    triton_files.write(triton_files.cut(graph, [name]), lab.activations().symbols, monkeypatch)
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    return tmp_path / "triton_debug"


@pytest.mark.row("H7")
def test_the_list_and_one_of_it(stepped_shell, folder):
    stepped_shell.user_ns["folder"] = folder
    kernels = stepped_shell.run("%ort_triton_kernels --from $folder")
    assert len(kernels) == 1
    shown = stepped_shell.formats(kernels)
    assert "Sub-graphs that Triton runs" in shown["text/plain"]
    assert str(kernels.kernel(1).key) in shown["text/html"]
    view = stepped_shell.run("%ort_triton_kernels 1 --from $folder")
    assert view.stage == "original"
    view.close()
    with pytest.raises(UsageError, match="no sub-graph 2"):
        stepped_shell.run("%ort_triton_kernels 2 --from $folder")
    with pytest.raises(UsageError, match="N takes a whole number"):
        stepped_shell.run("%ort_triton_kernels one --from $folder")
