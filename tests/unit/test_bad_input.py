"""What makes no sense is refused with what, why and what to do next, and nothing is changed by it."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ortlab
from ortlab.errors import OptionError, StepError
from ortlab.options.options import Options, switches


@pytest.fixture
def refused(lab, experiment):
    """Return a context that expects a refusal, and finds everything as it was before: also what it does next."""
    first = lab.step(experiment.step, n=2)

    @contextmanager
    def expect(kind=OptionError, says=""):
        options, engine, state = lab.options, lab.engine, experiment.state()
        runs, environment, folder = list(lab.runs), dict(os.environ), Path.cwd()
        with pytest.raises(kind) as caught:
            yield
        error = caught.value
        assert says in str(error)
        assert error.what
        assert error.fix
        assert lab.options is options
        assert lab.engine == engine
        assert list(lab.runs) == runs
        assert dict(os.environ) == environment
        assert Path.cwd() == folder
        for before, after in zip(state, experiment.state(), strict=True):
            assert torch.equal(before, after)
        assert lab.rerun(progress=False).losses == first.losses

    return expect


# --- options that contradict each other, or come at the wrong time --------------------------------------------------


def test_an_option_set_during_a_step_is_refused(lab, experiment, refused):
    def step():
        experiment.step()
        lab.set(memory_level=1)

    with refused(StepError, "while a step is running"):
        lab.step(step, n=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_level": 1, "memory_plan": "Gelu+:1:-1"},
        {"memory_plan": ["Gelu+:1:-1", "Gelu+:2:-1"]},
        {"compute_optimizer": False, "label_sparse_optimizer": True},
        {"compute_optimizer": "off", "embedding_sparse_optimizer": "on"},
        {"fallback_retry": True},
        {"save_onnx": True, "save_onnx_prefix": "../up"},
        {"save_onnx_prefix": "a\\b"},
    ],
    ids=repr,
)
def test_contradictions_are_refused(lab, refused, changes):
    with refused():
        lab.set(**changes)


def test_a_contradiction_with_what_is_set_already_is_refused(lab, refused):
    lab.set(memory_plan="Gelu+:1:-1")
    with refused(says="contradict"):
        lab.set(memory_level=2)
    lab.set(memory_plan=(), compute_optimizer=False)
    with refused(says="compute_optimizer is off"):
        lab.set(label_sparse_optimizer=True)


# --- values ---------------------------------------------------------------------------------------------------------

HUGE = 10**30
WRONG = {
    bool: ["perhaps", "", "10", 2, -1, 1.0, None, [], "ja", "\uff2f\uff2e", "tru", HUGE, "9" * 5000],
    int: [
        "",
        "1.0",
        "0x11",
        "1e3",
        "½",
        "²",
        "seventeen",
        17.0,
        True,
        None,
        HUGE,
        -HUGE,
        str(HUGE),
        "9" * 5000,
    ],
    str: [3, None, True, b"bytes", ["a"], "nul\0byte", "half a \ud800 pair"],
    tuple: [3, None, True, [1], [None], [b"bytes"], {"a": 1}.values()],
}


def wrong_values():
    for switch in switches():
        values = [value for value in WRONG[switch.type] if not (value is True and switch.type is bool)]
        if switch.choices and switch.type is not int:
            values += ["LOUDER", "☃"]
        yield pytest.param(switch.name, values, id=switch.name)


@pytest.mark.parametrize(("name", "values"), list(wrong_values()))
def test_every_switch_refuses_values_of_the_wrong_kind_and_keeps_the_record(name, values):
    options = Options(opset=15)
    for value in values:
        if isinstance(value, str) and name == "memory_plan":
            continue
        with pytest.raises(OptionError) as refusal:
            options.replace(**{name: value})
        assert name in refusal.value.what, value
        assert refusal.value.why
        assert f"{name}=" in refusal.value.fix
        assert len(str(refusal.value)) < 1000
    assert options == Options(opset=15)


@pytest.mark.parametrize(
    "plan",
    [
        "Gelu",
        "Gelu+",
        "Gelu+:1",
        "Gelu+:3:-1",
        "Gelu+:1:-2",
        "Gelu+:1:" + "9" * 20,
        "Gelu+:\uff11:-1",
        "☃:1:-1",
        ":1:-1",
    ],
)
def test_a_plan_that_is_none_is_refused(lab, refused, plan):
    with refused(says="memory_plan"):
        lab.set(memory_plan=plan)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("compute_optimizer", " OFF\n", False),
        ("log_level", "\tdevInfo ", "DEVINFO"),
        ("opset", " +16 ", 16),
        ("cast_strategy", "none", "NONE"),
        ("skip_check", " device , Execution_Agent,, ", ("DEVICE", "EXECUTION_AGENT")),
        ("save_onnx_prefix", " naïve ☃ ", "naïve ☃"),
    ],
)
def test_blanks_and_case_do_not_matter(lab, name, text, value):
    assert getattr(lab.set(**{name: text}).options, name) == value


# --- the folder for graphs ------------------------------------------------------------------------------------------


def folders(tmp_path):
    file = tmp_path / "file"
    file.write_text("a regular file", encoding="utf-8")
    return {
        "absent": tmp_path / "absent",
        "absent parent": tmp_path / "absent" / "below",
        "a file": file,
        "below a file": file / "below",
        "not for files": "/proc",
        "name too long": "x" * 300,
        "unicode, absent": tmp_path / "Größe ☃",
    }


@pytest.mark.row("B10")
@pytest.mark.parametrize(
    "kind",
    [
        "absent",
        "absent parent",
        "a file",
        "below a file",
        "not for files",
        "name too long",
        "unicode, absent",
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_before_the_build(lab, refused, tmp_path, kind):
    with refused(says="Graphs cannot be saved in"):
        lab.set(save_onnx=True, save_onnx_path=folders(tmp_path)[kind])
    lab.set(save_onnx_path=folders(tmp_path)[kind])  # nothing is saved yet
    with refused(says="A file cannot be made there"):
        lab.set(save_onnx=True)


def test_a_folder_that_goes_away_later_is_named_at_the_build(lab, experiment, tmp_path):
    folder = tmp_path / "graphs"
    folder.mkdir()
    lab.set(save_onnx=True, save_onnx_path=folder)
    folder.rmdir()
    before = experiment.state()
    with pytest.raises(OptionError, match="Graphs cannot be saved in"):
        lab.step(experiment.step)
    assert all(torch.equal(one, other) for one, other in zip(before, experiment.state(), strict=True))
    folder.mkdir()
    lab.step(experiment.step)
    assert len(list(folder.iterdir())) == 5


# --- the environment ------------------------------------------------------------------------------------------------

NONSENSE = {
    bool: ["maybe", "2", "", "\uff11", "-"],
    int: ["much", "", "1.5", "9" * 400, "0x10"],
    tuple: ["NONSENSE", "☃|☃"],
}


def nonsense():
    for switch in switches():
        for text in NONSENSE.get(switch.type, ["LOUDER"] if switch.choices else []):
            if not switch.env or switch.name in {"fallback", "sdpa_fallback"}:
                continue  # theirs are texts: any names a policy, any is on
            yield pytest.param(switch.env, text, id=f"{switch.env}={text[:20]}")


@pytest.mark.parametrize(("name", "text"), list(nonsense()))
def test_a_variable_with_nonsense_is_refused_and_leaves_the_model_alone(experiment, monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    environment, kind, state = dict(os.environ), type(experiment.model), experiment.state()
    with pytest.raises(OptionError) as refusal:
        ortlab.wrap(experiment.model)
    assert name in refusal.value.what
    assert refusal.value.why
    assert name in refusal.value.fix
    assert len(str(refusal.value)) < 1000
    assert dict(os.environ) == environment
    assert type(experiment.model) is kind
    assert all(torch.equal(one, other) for one, other in zip(state, experiment.state(), strict=True))


def test_two_spellings_at_once_are_settled_by_the_newer_and_mentioned(experiment, monkeypatch, wrap):
    monkeypatch.setenv("ORTMODULE_ENABLE_SPARSE_OPTIMIZER", "1")
    monkeypatch.setenv("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER", "0")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", "Gelu+:1:-1")
    monkeypatch.setenv("ORTMODULE_ENABLE_MEMORY_ALLEVIATION", "nonsense that nobody reads")
    lab = wrap(experiment.model)
    assert lab.options.label_sparse_optimizer is False
    assert lab.options.embedding_sparse_optimizer is True
    assert lab.options.memory_plan == ("Gelu+:1:-1",)
    for older in ("ORTMODULE_ENABLE_SPARSE_OPTIMIZER", "ORTMODULE_ENABLE_MEMORY_ALLEVIATION"):
        assert any(f"{older} is ignored" in note for note in lab.notes)


def test_variables_that_contradict_each_other_are_named_and_the_model_is_left_alone(experiment, monkeypatch):
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", "Gelu+:1:-1")
    kind = type(experiment.model)
    with pytest.raises(OptionError) as refusal:
        ortlab.wrap(experiment.model)
    assert "ORTMODULE_MEMORY_OPT_LEVEL, ORTMODULE_MEMORY_OPT_CONFIG" in refusal.value.fix
    assert type(experiment.model) is kind


@pytest.mark.row("J7")
@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "\udcff",
        '{"Speed": 1}',
        '{"UseStaticShape": "perhaps"}',
        '{"UseStaticShape": null}',
        '{"OnnxOpsetVersion": 17.5}',
        '{"OnnxOpsetVersion": [17]}',
        '{"OnnxOpsetVersion": 1e400}',
        '{"SkipCheck": 3}',
        '{"SkipCheck": [3]}',
        '{"FallbackPolicy": {"a": {"b": 1}}}',
        '{"PropagateCastOps": {"Level": "high"}}',
        '{"PropagateCastOps": 1}',
        '{"DebugOptions": {"LogLevel": 3}}',
        '{"DebugOptions": {"SaveONNXPath": {"deep": 1}}}',
        "[" * 100_000,
    ],
    ids=lambda text: str(text)[:40],
)
def test_a_json_configuration_that_makes_no_sense_is_refused(experiment, monkeypatch, tmp_path, content):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content.encode(errors="surrogateescape"))
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(file))
    kind = type(experiment.model)
    with pytest.raises(OptionError) as refusal:
        ortlab.wrap(experiment.model)
    assert str(file) in refusal.value.what
    assert "ORTMODULE_JSON_CONFIG_PATH" in refusal.value.fix
    assert len(str(refusal.value)) < 1000
    assert type(experiment.model) is kind


def test_a_plan_file_of_another_kind_is_refused(experiment, monkeypatch, tmp_path, wrap):
    for content in ("", "{}", "[1]", '["Gelu"]', "[" * 100_000):
        file = tmp_path / "plans.json"
        file.write_text(content, encoding="utf-8")
        monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", str(file))
        with pytest.raises(OptionError) as refusal:
            ortlab.wrap(experiment.model)
        assert "ORTMODULE_MEMORY_OPT_CONFIG" in refusal.value.what
        assert refusal.value.why
    good = tmp_path / "good.json"
    good.write_text(json.dumps(["Gelu+:1:-1"]), encoding="utf-8")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", str(good))
    lab = wrap(experiment.model)
    assert lab.options.memory_plan == ("Gelu+:1:-1",)
