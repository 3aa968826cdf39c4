"""What a change of switches would redo, before it is made, and what that took when it was measured."""

from __future__ import annotations

import pytest

import ortlab
from ortlab.errors import OptionError
from ortlab.options.options import Options, switches
from ortlab.records.status import Rebuild, last_measured
from ortlab.render import text
from ortlab.render.lab_pages import lab_page, pending_note, switch_words


@pytest.fixture
def lab(experiment):
    """A lab of its own, not one that the variables of this machine's user have changed."""
    lab = ortlab.wrap(experiment.model, options=Options())
    yield lab
    lab.unwrap(forget=True)


def test_before_the_first_step_everything_is_made_anyway(lab):
    assert lab.rebuild() == Rebuild("export", is_first=True)
    assert pending_note(lab.rebuild()) is None
    assert switch_words(lab.rebuild("memory_level"), lab.rebuild()) == ""


def test_what_is_announced_is_what_the_next_run_redoes(lab, experiment):
    lab.step(experiment.step, 2)
    for changes in ({"intra_op_spinning": True}, {"cast_level": 0}, {"opset": 16}):
        announced = lab.rebuild(**changes)
        assert lab.rebuild().stage == ""  # asking changes nothing
        lab.set(**changes)
        assert lab.rebuild().stage == announced.stage
        assert lab.rebuild().changed == tuple(changes)
        run = lab.rerun()
        assert run.initialization is not None
        assert run.initialization.stage == announced.stage
        assert lab.rebuild() == Rebuild("")


def test_times_are_those_of_the_newest_run_that_went_through_the_stage(lab, experiment):
    assert last_measured(lab.runs, "session") == (None, None)
    first = lab.step(experiment.step, 2)
    assert lab.rebuild(intra_op_spinning=True).run == 1
    assert lab.rebuild(intra_op_spinning=True).last_ms == first.initialization.session_ms
    assert lab.rebuild(opset=16).last_ms == first.initialization.total_ms
    second = lab.set(intra_op_spinning=True).rerun()
    assert last_measured(lab.runs, "session") == (second.initialization.total_ms, 2)
    assert last_measured(lab.runs, "export") == (first.initialization.total_ms, 1)
    graph_ms, run = last_measured(lab.runs, "graph")
    assert run == 1
    assert first.initialization.session_ms < graph_ms < first.initialization.total_ms
    assert last_measured(lab.runs, "step") == (None, None)


def test_what_is_pending_is_said_with_its_reason_and_time(lab, experiment):
    lab.step(experiment.step, 2)
    lab.set(memory_level=1)
    words = pending_note(lab.rebuild()).text
    assert words.startswith("Changed since the last build: memory_level. Such a rebuild took ")
    assert words.endswith(" in run 1.")
    page = text.render(lab_page(lab))
    assert words in page
    assert page.count("the session") == 1  # what is rebuilt is said once
    pending = lab.rebuild()
    assert switch_words(lab.rebuild("intra_op_spinning"), pending) == ""  # it is rebuilt anyway
    assert switch_words(lab.rebuild(memory_level=0), pending) == "no rebuild if changed back"
    assert switch_words(lab.rebuild("opset"), pending).startswith("rebuilds the export, ")


@pytest.mark.parametrize(
    "ask",
    [
        lambda lab: lab.sweep(memory_level=[0, 1], n=2, baseline={"memory_level": 1}),
        lambda lab: lab.rerun(memory_level=1),
    ],
)
def test_what_a_call_put_aside_is_no_change_of_the_user(lab, experiment, ask):
    lab.step(experiment.step, 2)
    ask(lab)
    assert lab.status.state == "ready"
    assert lab.rebuild().stage == lab.status.pending_stage == "session"
    assert lab.rebuild().changed == ()
    words = pending_note(lab.rebuild()).text
    assert words.startswith(
        "Other switches ran in between: the next step makes the session again; that took "
    )
    assert "ONNX Runtime: ready." in text.render(lab_page(lab))
    assert switch_words(lab.rebuild("memory_level"), lab.rebuild()) == "no rebuild"
    lab.graph()  # another call, which needs what was put aside
    assert lab.status.state == "ready"
    assert lab.set(opset=16).status.state == "rebuild pending"
    assert lab.set(opset=Options().opset).status.state == "rebuild pending"
    lab.rerun()
    assert (lab.status.state, lab.status.pending_stage) == ("ready", "")
    assert pending_note(lab.rebuild()) is None


def test_what_was_built_before_another_engine_ran_is_built(lab, experiment):
    lab.step(experiment.step, 2)
    lab.rerun(engine="eager")
    assert lab.status.state == "ready"
    lab.set(opset=16)
    assert lab.status.state == "rebuild pending"
    assert "not built yet" not in text.render(lab_page(lab))


def test_every_switch_has_an_answer(lab, experiment):
    lab.step(experiment.step)
    for one in switches():
        cost = lab.rebuild(one.name)
        assert cost.stage in {"export", "graph", "session", "step", ""}
        assert "rebuild" in switch_words(cost, lab.rebuild())
    assert lab.options == Options()
    with pytest.raises(OptionError):
        lab.rebuild("memory_levle")


def test_a_switch_that_contradicts_another_one_has_an_answer_too(lab, experiment):
    lab.set(memory_level=1)
    lab.step(experiment.step)
    assert lab.rebuild("memory_plan").stage == "session"


def test_without_a_measured_time_none_is_given():
    words = pending_note(Rebuild("graph", ("cast_level",))).text
    assert words == "Changed since the last build: cast_level."


def test_variables_that_gave_first_values_are_known(experiment, monkeypatch):
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    lab = ortlab.wrap(experiment.model, memory_level=0)
    assert dict(lab.from_environment) == {"log_level": "ORTMODULE_LOG_LEVEL"}
    lab.unwrap()
    lab = ortlab.wrap(experiment.model, options=Options())
    assert dict(lab.from_environment) == {}
    lab.unwrap()
