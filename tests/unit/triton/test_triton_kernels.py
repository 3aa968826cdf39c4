"""What ORT's Triton fusion writes is listed, opened and shown, and refused where it is not there."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import onnx
import pytest
from onnx import helper

from ortlab.errors import BuildError, OptionError
from ortlab.graphs.triton_kernels import fused_nodes, read_triton_kernels
from ortlab.render import html, text


@pytest.mark.row("H7")
def test_every_sub_graph_is_listed_with_its_code(fused):
    kernels = read_triton_kernels()
    assert [one.key for one in kernels] == sorted(fused)
    operators = {one.key: list(one.graph("original").operators) for one in kernels}
    assert [sorted(operators[key]) for key in fused] == [
        ["Dropout", "Softmax"],
        ["Add", "com.microsoft.Gelu"],
        ["Add", "Dropout"],
    ]
    for one in kernels:
        (source,) = one.sources
        assert one.source == source.read_text(encoding="utf-8")
        functions = [node for node in ast.parse(one.source).body if isinstance(node, ast.FunctionDef)]
        decorated = [node.name for node in functions if node.decorator_list]
        assert list(one.functions) == decorated
        assert decorated
    assert list(kernels.table()["kernels"]) == [list(one.functions) for one in kernels]


def test_a_sub_graph_is_opened_as_it_was_cut_and_as_it_was_taken_apart(fused):
    attention = next(one for one in read_triton_kernels() if one.key == fused[0])
    original, processed = (attention.graph(form) for form in ("original", "processed"))
    assert original.operators == {"Dropout": 1, "Softmax": 1}
    assert "Softmax" not in processed.operators
    assert processed.operators["Exp"] == processed.operators["ReduceMax"] == 1
    assert processed.inputs[0].shape == (2, 2, 8, 8)  # the batch, the heads and the tokens of the code
    assert any(isinstance(size, str) for size in original.inputs[0].shape)


def test_pages_hold_the_code_and_escape_it(fused):
    kernels = read_triton_kernels()
    for page in (text.render(kernels), html.render(kernels)):
        assert all(str(key) in page for key in fused)
        assert "none of this lab's graph" in page or "none of this lab&#x27;s graph" in page
    one = kernels.kernel(1)
    written = text.render(one)
    assert all(f"    {line}".rstrip() in written for line in one.source.splitlines())
    assert "&lt;" not in written
    shown = html.render(one)
    assert '<span class="nd">@triton</span>' in shown
    assert f'<span class="nf">{one.functions[0]}</span>' in shown


def test_code_of_other_sizes_is_newer_and_taken(fused):
    before = next(one for one in read_triton_kernels() if one.key == fused[1])
    (source,) = before.sources
    newer = Path("triton_debug") / f"func_0123abcd_{before.key}.py"
    newer.write_text(before.source + "# newer\n", encoding="utf-8")
    os.utime(newer, ns=(1, source.stat().st_mtime_ns + 1))
    after = next(one for one in read_triton_kernels() if one.key == before.key)
    assert after.sources == (source, newer)
    assert after.source.endswith("# newer\n")
    assert "the newest of 2" in text.render(after)


def test_nodes_of_the_graph_come_first_and_are_named(fused):
    nodes = [
        helper.make_node(
            "TritonOp", [], ["y"], name=name, domain="com.microsoft", onnx_key=key, onnx_string=b""
        )
        for name, key in (("a", fused[2]), ("b", fused[0]), ("c", fused[2]))
    ]
    model = helper.make_model(helper.make_graph(nodes, "execution", [], []))
    found = fused_nodes(onnx.load_model_from_string(model.SerializeToString()))
    assert found == {fused[2]: ("a", "c"), fused[0]: ("b",)}
    kernels = read_triton_kernels().of_graphs(found)
    assert [one.key for one in kernels] == [fused[2], fused[0], fused[1]]
    assert [one.nodes for one in kernels] == [("a", "c"), ("b",), ()]
    assert [one.number for one in kernels] == [1, 2, 3]
    assert "Run by a, c." in text.render(kernels.kernel(1))


def test_a_lab_lists_what_is_in_the_folder(fused, bert):
    kernels = bert.triton_kernels()
    assert sorted(one.key for one in kernels) == sorted(fused)
    assert not any(one.nodes for one in kernels)  # its graph runs on the CPU, without a TritonOp


def test_without_triton_the_lab_says_what_is_missing(bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BuildError, match="There are no Triton kernels") as caught:
        bert.triton_kernels()
    assert "Nothing has written a folder triton_debug here. triton needs an NVIDIA GPU" in caught.value.why
    assert "triton_debug=True" in caught.value.fix
    assert not list(tmp_path.iterdir())


def test_one_damaged_file_does_not_hide_the_others(fused):
    first = read_triton_kernels().kernel(1)
    whole = first.graphs["original"].read_bytes()
    first.graphs["original"].write_bytes(whole[: len(whole) // 2])
    first.sources[0].write_bytes(b"\xff")
    kernels = read_triton_kernels()
    shown = text.render(kernels)
    assert "not known: triton_debug" in shown
    assert "not readable" in shown
    assert "Gelu" in shown or "Softmax" in shown
    assert kernels.kernel(1).operators is None
    with pytest.raises(BuildError, match="cut off"):
        kernels.kernel(1).graph("original")


def test_files_that_are_missing_or_foreign_are_said(fused):
    folder = Path("triton_debug")
    with pytest.raises(OptionError, match="no sub-graph 4 in triton_debug"):
        read_triton_kernels().kernel(4)
    with pytest.raises(OptionError, match="no form 'half'"):
        read_triton_kernels().kernel(1).graph("half")
    (folder / "notes.py").write_text("", encoding="utf-8")
    assert len(read_triton_kernels()) == len(fused)
    first = read_triton_kernels().kernel(1)
    first.graphs["processed"].unlink()
    first.sources[0].unlink()
    left = read_triton_kernels().kernel(1)
    assert list(left.forms) == ["original"]
    with pytest.raises(BuildError, match="processed form of sub-graph"):
        left.graph("processed")
    assert "No code was generated for it." in text.render(left)
    (folder / "notes.py").rename(folder.parent / "notes.py")
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(BuildError, match="holds no Triton kernels"):
        read_triton_kernels()
    folder.rmdir()
    with pytest.raises(BuildError, match="cannot be opened"):
        read_triton_kernels()
