"""Files and folders that options name are looked at when the option is set."""

from __future__ import annotations

import copy
import importlib.util
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import OptionError
from ortlab.options.option_files import (
    OPERATORS,
    TritonConfig,
    read_triton_config,
    triton_configuration,
    with_files,
)
from ortlab.options.options import Options

# The sample of the ORTModule Training Guidelines, as JSON.
SAMPLE = {
    "ops": {
        "Add": {"versions": [13, 14]},
        "Sub": {"versions": [13, 14]},
        "Identity": {"versions": [13], "is_no_op": True},
        "ReduceSum": {"versions": [13], "conditions": {"axes": "[-1]"}},
        "Softmax": {"versions": [13]},
        "SoftmaxGrad_13": {"domain": "com.microsoft", "versions": [1]},
    },
    "initializer": "scalar",
    "min_nodes": 2,
}
GOOD = {
    "sample": SAMPLE,
    "empty": {},
    "no operators": {"ops": {}},
    "hints": {"symbolic_shape_hint": {"*": 64, "input_ids_dim[01]": 1024}, "min_nodes": 0},
    "conditions": {
        "ops": {
            "Softmax": {"versions": [13], "conditions": {"axis": "-1"}, "ignore_min_nodes": True},
            "ReduceMax": {"versions": [13], "conditions": {"axes": "single"}},
            "ReduceMin": {"versions": [13], "conditions": {"axes": "constant"}},
        },
        "initializer": "all",
    },
}
BAD = {
    "a list": ([], "no JSON object"),
    "unknown key": ({"op": {}}, "Did you mean 'ops'"),
    "operators as a list": ({"ops": ["Add"]}, "`ops` is not an object"),
    "unknown operator": ({"ops": {"Softmaxx": {"versions": [13]}}}, "Did you mean 'Softmax'"),
    "entry as a list": ({"ops": {"Add": [13]}}, "'Add': its entry is not an object"),
    "unknown key of an operator": ({"ops": {"Add": {"version": [13]}}}, "Did you mean 'versions'"),
    "versions missing": ({"ops": {"Add": {}}}, "`versions` is missing"),
    "version alone": ({"ops": {"Add": {"versions": 13}}}, r"`versions` is 13"),
    "versions as text": ({"ops": {"Add": {"versions": ["13"]}}}, r"`versions` is \['13'\]"),
    "no versions": ({"ops": {"Add": {"versions": []}}}, "`versions` is"),
    "domain": ({"ops": {"Gelu": {"versions": [1], "domain": 1}}}, "`domain` is 1"),
    "no-op": ({"ops": {"Add": {"versions": [13], "is_no_op": 1}}}, "`is_no_op` is 1"),
    "axes not in quotes": (
        {"ops": {"ReduceSum": {"versions": [13], "conditions": {"axes": [-1]}}}},
        "in quotes",
    ),
    "axis in words": (
        {"ops": {"Softmax": {"versions": [13], "conditions": {"axis": "last"}}}},
        "`conditions`",
    ),
    "other condition": ({"ops": {"Softmax": {"versions": [13], "conditions": {"dim": "1"}}}}, "`conditions`"),
    "initializer": ({"initializer": "scalars"}, "none, scalar, all"),
    "initializer as a list": ({"initializer": []}, "none, scalar, all"),
    "min_nodes as text": ({"min_nodes": "2"}, "`min_nodes` is '2'"),
    "min_nodes as truth": ({"min_nodes": True}, "`min_nodes` is True"),
    "min_nodes below 0": ({"min_nodes": -1}, "`min_nodes` is -1"),
    "hint as text": ({"symbolic_shape_hint": {"x": "64"}}, "symbolic_shape_hint"),
    "hint no pattern": ({"symbolic_shape_hint": {"(": 64}}, "which is none"),
}


def written(folder, content):
    file = folder / "triton_config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(file)


@pytest.mark.row("H2")
@pytest.mark.parametrize("content", GOOD.values(), ids=GOOD)
def test_what_ort_accepts_is_read_and_kept(content, tmp_path):
    path = written(tmp_path, content)
    options = with_files(Options(triton=True, triton_config_file=path), ["triton_config_file"])
    Path(path).unlink()
    assert options.triton_config_file == path
    assert triton_configuration(options) == content
    # Every change makes a new record; none of them needs the file again.
    assert triton_configuration(with_files(options.replace(opset=16), ["opset"])) == content
    for same in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):  # noqa: S301 - our own
        assert same == options
        assert triton_configuration(same) == content


@pytest.mark.row("H2")
@pytest.mark.parametrize(("content", "reason"), BAD.values(), ids=BAD)
def test_what_ort_cannot_use_is_refused_with_the_reason(content, reason, tmp_path):
    path = written(tmp_path, content)
    with pytest.raises(OptionError, match=reason) as caught:
        read_triton_config(path)
    assert path in caught.value.what
    assert caught.value.fix


def test_text_that_is_not_json_is_refused_and_pythons_true_is_explained(tmp_path):
    with pytest.raises(OptionError, match=r"not JSON: Expecting value.*small letters"):
        read_triton_config(written(tmp_path, '{"ops": {"Identity": {"versions": [13], "is_no_op": True}}}'))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="not text in UTF-8"):
        read_triton_config(str(tmp_path / "binary"))


@pytest.mark.row("H2")
def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path):
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(OptionError, match="cannot be used"):
        Options().replace(triton_config_file=str(file)) and read_triton_config(str(file))
    (tmp_path / "tuning_results_training.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(OptionError, match="is not JSON"):
        with_files(Options(tuning_results_path=str(tmp_path)), ["tuning_results_path"])


def test_a_file_that_is_absent_or_a_folder_is_refused(tmp_path):
    with pytest.raises(OptionError, match="No such file"):
        read_triton_config(str(tmp_path / "absent.json"))
    with pytest.raises(OptionError, match="cannot be read"):
        read_triton_config(str(tmp_path))


def test_another_content_in_the_same_file_is_another_value(tmp_path):
    path = written(tmp_path, SAMPLE)
    before = with_files(Options(triton=True, triton_config_file=path), ["triton_config_file"])
    written(tmp_path, {**SAMPLE, "min_nodes": 3})
    after = with_files(before.replace(triton_config_file=path), ["triton_config_file"])
    assert before.changed(after) == ("triton_config_file",)
    assert before.stage_of_change(after) is not None
    assert TritonConfig(path, "{}") != TritonConfig(path, "[]")
    assert Options.from_dict(json.loads(json.dumps(after.to_dict()))) == after


def test_the_operators_are_those_of_the_installed_release():
    folder = Path(importlib.util.find_spec("onnxruntime").origin).parent / "training" / "ort_triton"
    spec = importlib.util.spec_from_file_location("op_config", folder / "_op_config.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # its package imports triton, this file does not
    assert module.get_supported_ops().keys() <= OPERATORS
    text = "".join((folder / name).read_text(encoding="utf-8") for name in ("_codegen.py", "_decompose.py"))
    beyond = OPERATORS - module.get_supported_ops().keys()
    assert all(f'"{name}": "{{indent}}' in text or f"def {name}(" in text for name in beyond)


@pytest.fixture
def lab():
    model = nn.Linear(2, 2)
    lab = ortlab.wrap(model, options=Options())
    yield lab
    lab.unwrap()


def test_a_lab_refuses_a_bad_file_before_anything_else_and_stays_as_it_was(lab, tmp_path):
    with pytest.raises(OptionError, match="No such file"):
        lab.set(triton=True, triton_config_file=str(tmp_path / "absent.json"))
    with pytest.raises(OptionError, match="No such file"):
        ortlab.wrap(nn.Linear(2, 2), options=Options(triton_config_file=str(tmp_path / "absent.json")))
    assert lab.options == Options()
    lab.module(torch.ones(1, 2)).sum().backward()


@pytest.mark.row("H5")
def test_a_folder_of_tuning_results_is_looked_at_beforehand(tmp_path):
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    changed = ["tuning_results_path"]
    with pytest.raises(OptionError, match="is no folder"):
        with_files(Options(tuning=True, tuning_results_path=file / "results"), changed)
    with pytest.raises(OptionError, match="tuning=True"):
        with_files(Options(tuning_results_path=tmp_path), changed)
    results = tmp_path / "tuning_results_training.json"
    results.write_text("[", encoding="utf-8")
    with pytest.raises(OptionError, match="not JSON"):
        with_files(Options(tuning_results_path=tmp_path), changed)
    results.write_text("[]", encoding="utf-8")
    for options in (
        Options(tuning_results_path=tmp_path),
        Options(tuning=True, tuning_results_path=tmp_path / "new" / "folder"),
    ):
        assert with_files(options, changed) == options
    assert not (tmp_path / "new").exists()
