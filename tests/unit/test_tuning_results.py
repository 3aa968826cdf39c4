"""Tuning results are read as ORT writes them, shown, and refused where they are none."""

from __future__ import annotations

import json

import onnxruntime
import pytest
from onnx import TensorProto, helper

from ortlab.errors import LedgerError
from ortlab.records.tuning_results import TunedOperator, read_tuning_results
from ortlab.render import html, text

# The layout of InferenceSession.get_tuning_results() in 1.19.2 (onnxruntime_pybind_state.cc).
WRITTEN = [
    {
        "ep": "CUDAExecutionProvider",
        "results": {
            "GemmTunableOp_float_TN": {"TN_128_512_64": 3, "TN_128_64_512": 0},
            "SoftmaxTunableOp_float": {"4_32": 1},
        },
        "validators": {"ORT_VERSION": "1.19.2", "DEVICE_MODEL": "NVIDIA A100"},
    }
]


def written(folder, content, mode="training"):
    (folder / f"tuning_results_{mode}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.row("H5")
def test_choices_are_read_and_shown(tmp_path):
    found = read_tuning_results(written(tmp_path, WRITTEN))
    assert found.operators[0] == TunedOperator(
        "CUDAExecutionProvider", "GemmTunableOp_float_TN", "TN_128_512_64", 3
    )
    assert list(found.table()["choice"]) == [3, 0, 1]
    for page in (text.render(found), html.render(found)):
        assert "TN_128_64_512" in page
        assert "DEVICE_MODEL NVIDIA A100" in " ".join(page.split())


def test_what_a_session_without_tuning_gives_is_an_empty_list(tmp_path):
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "one", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = read_tuning_results(written(tmp_path, session.get_tuning_results(), "inference"), "inference")
    assert found.operators == ()
    assert "Nothing was tuned." in text.render(found)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"ep": 1}', "holds no tuning results"),
        ('[{"ep": "CUDA", "results": {"Gemm": 3}, "validators": {}}]', "holds no tuning results"),
        ('[{"ep": "CUDA", "results": {"Gemm": {"a": "fast"}}, "validators": {}}]', "holds no tuning results"),
        ("3", "holds no tuning results"),
        ('[{"ep": "CUDA", "results": {"Gemm": {"a": 1e400}}, "validators": {}}]', "holds no tuning results"),
        ('[{"ep": null, "results": {"Gemm": {"a": 1}}, "validators": {}}]', "holds no tuning results"),
        ("[" * 100_000, "is not JSON"),
        ("half a fi", "is not JSON"),
    ],
)
def test_another_file_is_refused(tmp_path, content, what):
    (tmp_path / "tuning_results_training.json").write_text(content, encoding="utf-8")
    with pytest.raises(LedgerError, match=what) as caught:
        read_tuning_results(tmp_path)
    assert "tune again" in caught.value.fix


def test_a_folder_without_results_says_how_to_get_some(tmp_path):
    with pytest.raises(LedgerError, match="There are no tuning results") as caught:
        read_tuning_results(tmp_path)
    assert "tuning=True" in caught.value.fix
