"""ONNX files of every kind that users have: opened without their weights, or refused with what, why and next."""

from __future__ import annotations

import resource
import zipfile

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import ortlab
from ortlab.errors import BuildError
from ortlab.graphs.onnx_files import KEPT_BYTES, open_graph
from ortlab.graphs.viewer.document import document
from ortlab.render import html, text

GIB = 1 << 30


def model_of(weight: TensorProto, *more: TensorProto, name: str = "mul") -> onnx.ModelProto:
    node = helper.make_node("MatMul", ["x", weight.name], ["y"], name=name)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", weight.dims[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", weight.dims[1]])],
        [weight, *more],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A file that torch's exporter has written, with weights in it."""
    path = tmp_path_factory.mktemp("onnx") / "exported.onnx"
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    torch.onnx.export(model, (torch.randn(2, 64),), str(path), dynamo=False, opset_version=17)
    return path


def test_a_file_opens_without_its_weights_and_keeps_its_structure(exported):
    graph = ortlab.open_graph(exported)
    whole = onnx.load(str(exported))
    assert graph.operators == {"Gemm": 2, "Mul": 2} | graph.operators
    assert [node.SerializeToString() for node in graph.model.graph.node] == [
        node.SerializeToString() for node in whole.graph.node
    ]
    assert len(graph.serialized) < exported.stat().st_size / 4
    kept = {tensor.name: tensor for tensor in graph.model.graph.initializer}
    for tensor in whole.graph.initializer:
        assert list(kept[tensor.name].dims) == list(tensor.dims)
        small = len(tensor.raw_data) <= KEPT_BYTES
        assert kept[tensor.name].raw_data == (tensor.raw_data if small else b"")
    assert graph.left_out == 1
    assert (graph.stage, graph.mode, graph.part) == ("file", "inference", "exported.onnx")
    assert "exported.onnx" in text.render(graph)
    assert "Gemm" in html.render(graph)
    assert document(graph).nodes == graph.node_count


def test_what_was_read_without_weights_is_not_saved_as_if_it_had_them(exported, tmp_path):
    with pytest.raises(BuildError, match="without its weights") as raised:
        open_graph(exported).save(tmp_path / "copy.onnx")
    assert str(exported) in raised.value.fix
    assert not (tmp_path / "copy.onnx").exists()
    small = tmp_path / "small.onnx"
    onnx.save(model_of(numpy_helper.from_array(np.ones((2, 2), np.float32), "w")), str(small))
    saved = open_graph(small).save(tmp_path / "copy.onnx")
    assert saved.read_bytes() == small.read_bytes()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_told_so(exported, tmp_path, share):
    cut = tmp_path / "cut.onnx"
    whole = exported.read_bytes()
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(BuildError, match="is cut off") as raised:
        open_graph(cut)
    assert "bytes more" in raised.value.what
    assert raised.value.why
    assert raised.value.fix


def test_every_place_to_cut_a_small_file_is_refused(tmp_path):
    whole = model_of(numpy_helper.from_array(np.ones((2, 2), np.float32), "w")).SerializeToString()
    cut = tmp_path / "cut.onnx"
    for length in range(1, len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(BuildError) as raised:
            open_graph(cut)
        assert raised.value.fix


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(300), "is not an ONNX file"),
        (b"hello, this is a text\n" * 30, "is not an ONNX file"),
        (bytes(range(256)) * 8, "is not an ONNX file"),
        (b'{"irVersion": "8"}', "a JSON text"),
        (b"ir_version: 8\ngraph {\n}\n", "ONNX as text"),
        (b"\x80\x02}q\x00.", "a pickle"),
        (b"\x00\x00\x00\x00ORTM" + bytes(100), "ORT format"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "a Git LFS pointer"),
        (b"\x08\x07", "is not an ONNX file"),
    ],
)
def test_what_is_not_onnx_is_named(tmp_path, content, words):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(BuildError, match=words) as raised:
        open_graph(path)
    assert raised.value.fix


def test_a_checkpoint_of_torch_and_a_folder_and_nothing_are_named(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    assert zipfile.is_zipfile(tmp_path / "model.pt")
    with pytest.raises(BuildError, match="a zip archive"):
        open_graph(tmp_path / "model.pt")
    with pytest.raises(BuildError, match="is a folder"):
        open_graph(tmp_path)
    with pytest.raises(BuildError, match="There is no file"):
        open_graph(tmp_path / "none.onnx")


def test_a_file_of_more_than_two_gigabytes_opens_without_reading_them(tmp_path):
    """The file is sparse: it takes no room on the disk, and reading it through would still take its 2.5 GiB."""
    dims, length = [1 << 15, 20 << 10], (20 << 15 << 10) * 4  # a weight of float32
    head = model_of(TensorProto(name="w", dims=dims, data_type=TensorProto.FLOAT))
    tensor = head.graph.initializer.pop().SerializeToString()
    value = b"\x4a" + varint(length)  # field 9, raw_data
    body = head.graph.SerializeToString()
    weight = b"\x2a" + varint(len(tensor) + len(value) + length) + tensor + value
    head.ClearField("graph")
    before = head.SerializeToString() + b"\x3a" + varint(len(body) + len(weight) + length) + body + weight
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.write(before)
        file.truncate(len(before) + length)
    assert path.stat().st_size > 2 * GIB
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = open_graph(path)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) * 1024 < 100 << 20
    assert list(graph.model.graph.initializer[0].dims) == dims
    assert len(graph.serialized) < KEPT_BYTES
    assert "1 tensor was read without the values" in text.render(graph)


def varint(value: int) -> bytes:
    digits = []
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def test_weights_in_other_files_are_not_needed_and_not_looked_for_elsewhere(tmp_path):
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    path = tmp_path / "model.onnx"
    onnx.save(
        model_of(weight), str(path), save_as_external_data=True, location="model.data", size_threshold=0
    )
    there = open_graph(path)
    assert there.missing == ()
    assert there.left_out == 1
    (tmp_path / "model.data").unlink()
    gone = open_graph(path)
    assert gone.missing == ("model.data",)
    assert "model.data, which is not there" in text.render(gone)
    with pytest.raises(BuildError, match="without its weights"):
        gone.save(tmp_path / "copy.onnx")
    model = onnx.load(str(path), load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "../../../etc/hostname"
    path.write_bytes(model.SerializeToString())
    assert open_graph(path).missing == ("../../../etc/hostname",)


def test_a_weight_in_an_attribute_and_one_in_an_inner_graph_are_left_out(tmp_path):
    large = numpy_helper.from_array(np.arange(4096, dtype=np.float32), "large")
    constant = helper.make_node("Constant", [], ["c"], name="constant", value=large)
    branch = helper.make_graph([constant], "then", [], [helper.make_tensor_value_info("c", 1, [4096])])
    nodes = [
        helper.make_node("Constant", [], ["d"], name="outer", value=large),
        helper.make_node("If", ["x"], ["y"], name="if", then_branch=branch, else_branch=branch),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.BOOL, [])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", 1, [4096])])
    path = tmp_path / "inner.onnx"
    onnx.save(helper.make_model(graph), str(path))
    opened = open_graph(path)
    assert opened.left_out == 3
    assert path.stat().st_size > 3 * 4096 * 4 > 20 * len(opened.serialized)
    assert [node.name for node in opened.model.graph.node] == ["outer", "if"]
    # Numbers in a list of their own type instead of raw bytes.
    typed = helper.make_tensor("w", TensorProto.FLOAT, [64, 64], [1.0] * 4096)
    onnx.save(model_of(typed), str(path))
    assert open_graph(path).left_out == 1


def test_graphs_in_graphs_without_end_do_not_end_the_kernel(tmp_path):
    body = b"\x0a" + varint(2000) + bytes(2000)
    for _ in range(2000):  # graph in attribute in node in graph ...
        body = b"\x0a" + varint(len(body)) + body
        body = b"\x2a" + varint(len(body)) + body
        body = b"\x32" + varint(len(body)) + body
    path = tmp_path / "deep.onnx"
    path.write_bytes(b"\x08\x08\x3a" + varint(len(body)) + body)
    with pytest.raises(BuildError) as raised:
        open_graph(path)
    assert raised.value.fix
