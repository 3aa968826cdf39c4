"""A lab over a model of which only parts run on ONNX Runtime: it says so everywhere, and is a lab in all else."""

from __future__ import annotations

import copy
import pickle
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ortlab
from ortlab.errors import BuildError, OptionError, StepError
from ortlab.lab.following import observe
from ortlab.records.comparison import remarks
from ortlab.records.runs import Run
from ortlab.render import text
from ortlab.runs.wrapping import is_wrapped


class Tower(nn.Module):
    """Three blocks, of which the last is skipped when the caller says so."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.0))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.third = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh())
        self.out = nn.Linear(8, 3)
        self.path = ("first", "second", "third")

    def forward(self, x, labels):
        hidden = self.into(x)
        for name in self.path:
            hidden = getattr(self, name)(hidden)
        return nn.functional.cross_entropy(self.out(hidden), labels)


class Trial:
    """A tower, its optimizer and its step."""

    def __init__(self, **options):
        torch.manual_seed(5)
        self.model = Tower()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batch = (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
        self.lab = ortlab.wrap(self.model, **options)

    def step(self):
        loss = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@pytest.fixture
def trial():
    made = []

    def make(only=("first", "third"), **options):
        made.append(Trial(only=list(only), **options))
        return made[-1]

    yield make
    for one in made:
        one.lab.unwrap()


def parts_of(coverage):
    return {part.path: (part.calls, part.on_ort) for part in coverage.parts}


def test_a_run_says_which_parts_onnx_runtime_executed(trial):
    one = trial()
    lab = one.lab
    assert lab.status.state == "not built"
    assert text.render(lab.status).startswith(
        "ONNX Runtime: first, third (2 parts, 67.4 % of the parameters): not"
    )
    assert lab.rebuild().is_first
    with pytest.raises(BuildError, match="There is no graph for the present options yet"):
        lab.plan()

    run = lab.step(one.step, n=3)
    assert run.executed_by == "ort parts"
    assert run.title == "#1 ort in first, third"
    assert parts_of(run.coverage) == {"first": (3, 3), "third": (3, 3)}
    assert parts_of(lab.status.coverage) == {"first": (1, 1), "third": (1, 1)}
    assert (run.coverage.covered, run.coverage.parameters) == (288, 427)
    assert {key.partition(":")[0] for key in run.graph_digests} == {"first", "third"}
    assert run.initialization.stage == "export"
    assert Run.from_dict(run.to_dict()) == run
    assert lab.status.state == "ready"
    shown = text.render(run)
    assert (
        "Executed by ONNX Runtime: first, third (2 of 2 parts, 67.4 % of the parameters); by PyTorch: the"
        in shown
    )
    assert lab.runs.table()["executed by"].tolist() == ["ort parts"]


def test_reruns_sweeps_and_switches_act_on_all_parts(trial):
    one = trial()
    lab = one.lab
    run = lab.step(one.step, n=3)
    lab.set(engine="eager")
    assert not is_wrapped(one.model.first), "PyTorch runs the parts through ortlab"
    eager = lab.rerun()
    assert eager.executed_by == "eager"
    assert not eager.coverage
    assert eager.losses == pytest.approx(run.losses, rel=1e-6)

    lab.set(engine="ort", memory_level=1)
    assert lab.rebuild().stage == "session"
    assert (lab.rebuild().last_ms, lab.rebuild().run) == (run.initialization.session_ms, 1)
    recomputed = lab.rerun()
    assert recomputed.title == "#3 ort in first, third (memory_level=1)"
    assert recomputed.initialization.stage == "session"
    assert recomputed.losses == pytest.approx(run.losses, rel=1e-6)
    assert [contrast.remarks for contrast in lab.compare().contrasts] == [(), ()]
    sweep = lab.sweep({"memory_level": [0, 1]}, n=2)
    assert [point.runs[0].executed_by for point in sweep.points] == ["ort parts"] * 2


def test_plans_are_put_together_and_graphs_are_each_parts_own(trial):
    one = trial()
    lab = one.lab
    lab.step(one.step)
    together = lab.plan()
    both = ("first", "third")
    assert {row.config: row.parts for row in together.rows} == {"Gelu+:1:-1": both, "Gemm+:1:-1": both}
    alone = {row.config: row for path in ("first", "third") for row in lab.plan(path).rows}
    assert alone.keys() == {row.config for row in together.rows}
    for row in together.rows:
        separate = [lab.plan(path).rows for path in row.parts]
        found = [other for rows in separate for other in rows if other.config == row.config]
        assert row.frequency == sum(other.frequency for other in found)
        assert row.saving_bytes == sum(other.saving_bytes for other in found)
    assert "parts" in together.table().columns
    assert "the wrapped parts" not in text.render(lab.plan("first"))

    graph = lab.graph("processed", part="first")
    assert graph.part == "first"
    assert "Tanh" not in graph.operators
    assert "Tanh" in lab.graph("processed", part="third").operators
    assert text.render(graph).startswith("Graph of first: processed")
    with pytest.raises(OptionError, match="Each wrapped part has a graph of its own"):
        lab.graph()
    with pytest.raises(OptionError, match="There is no wrapped part 'second'"):
        lab.plan("second")


def test_unwrapping_gives_every_part_back(trial):
    one = trial()
    lab = one.lab
    one.model(*one.batch)
    keys = list(one.model.state_dict())
    assert lab.unwrap() is one.model
    assert not any(is_wrapped(part) for part in one.model.modules())
    assert list(one.model.state_dict()) == keys
    assert not lab.status.coverage
    assert one.model(*one.batch).grad_fn is not None


def test_copies_and_pickles_are_plain_models(trial, monkeypatch):
    # pytest's importlib mode keeps this module where pickle does not find it.
    monkeypatch.setitem(sys.modules, Tower.__module__, types.ModuleType(Tower.__module__))
    monkeypatch.setattr(sys.modules[Tower.__module__], "Tower", Tower, raising=False)
    one = trial()
    loss = one.model(*one.batch)
    for copied in (copy.deepcopy(one.model), pickle.loads(pickle.dumps(one.model))):  # noqa: S301 - ours
        assert not any(is_wrapped(part) for part in copied.modules())
        assert copied(*one.batch).item() == pytest.approx(loss.item(), rel=1e-6)
    assert is_wrapped(one.model.first)
    assert one.lab.status.executed_by == "ort parts"


def test_a_part_that_is_not_called_is_named(trial):
    one = trial()
    one.model.path = ("first", "second")
    run = one.lab.step(one.step, n=2)
    assert run.executed_by == "ort parts"
    assert run.title == "#1 ort in first"
    assert run.coverage.uncalled == ("third",)
    assert run.coverage.covered == 144
    assert one.lab.status.state == "ready", "what is never called is not pending"
    assert "first (1 of 2 parts, 33.7 % of the parameters)" in text.render(one.lab.status)
    assert "third was not called, so nothing ran there." in text.render(run)
    assert one.lab.plan().missing == ("third",)
    assert "Without a graph, since not called yet: third." in text.render(one.lab.plan())
    with pytest.raises((BuildError, StepError)):
        one.lab.plan("third")
    again = one.lab.rerun()
    assert "did not call the wrapped part third" in " ".join(remarks(run, again))


def test_a_step_that_calls_no_part_is_refused_and_nothing_is_changed(trial):
    one = trial()
    one.model.path = ("second",)
    before = [tensor.clone() for tensor in one.model.state_dict().values()]
    with pytest.raises(StepError, match="called the model, but none of its wrapped parts"):
        one.lab.step(one.step)
    assert all(map(torch.equal, before, one.model.state_dict().values()))
    assert not one.lab.runs
    one.model(*one.batch)
    assert one.lab.status.executed_by == "eager"
    assert one.lab.status.state != "ready"


class Checkpointed(nn.Module):
    """What a graph cannot express at this memory level."""

    def forward(self, x):
        return checkpoint(torch.tanh, x, use_reentrant=True)


def test_an_error_in_a_part_names_the_part(trial):
    one = trial()
    one.model.third.append(Checkpointed())
    with pytest.raises(BuildError) as caught:
        one.lab.step(one.step)
    assert caught.value.what.startswith("In the part 'third': ")
    assert str(caught.value).startswith("In the part 'third': ")
    assert not one.lab.runs


@pytest.mark.filterwarnings("ignore:PyTorch executes Sequential")
def test_a_part_that_fell_back_is_never_counted_as_ort(trial):
    one = trial(fallback=True)
    one.model.third.append(Checkpointed())
    run = one.lab.step(one.step, n=2)
    assert run.executed_by == "fallback"
    assert run.fallback_reason.startswith("third: ")
    assert run.coverage.executed == ("first",)
    assert parts_of(run.coverage) == {"first": (2, 2), "third": (2, 0)}
    assert one.lab.status.state == "fallback"
    assert "PYTORCH (fallback), 2 of 2 calls" in text.render(run)
    assert any("was executed by PyTorch" in words for words in remarks(run, one.lab.rerun()))


def test_a_part_in_eval_mode_lets_gradients_through_and_keeps_dropout_out(trial):
    one = trial(only=["first"])
    reference = copy.deepcopy(one.model)
    for model in (one.model, reference):
        model.first[3].p = 0.9
        model.first.eval()
        model(*one.batch).backward()
    assert one.lab.status.executed_by == "ort parts"
    for (name, own), other in zip(one.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7, msg=name)
    with torch.no_grad():
        assert one.model.eval()(*one.batch).item() == pytest.approx(
            reference.eval()(*one.batch).item(), rel=1e-5
        )


@pytest.mark.parametrize("options", [{}, {"memory_level": 1}], ids=["default", "recomputing"])
def test_a_part_in_a_checkpoint_of_pytorchs_is_built_and_run_again_in_the_backward(trial, options):
    one = trial(only=["first"], **options)
    reference = copy.deepcopy(one.model)
    losses = []
    for model in (one.model, reference):
        hidden = checkpoint(model.first, model.into(one.batch[0]), use_reentrant=False)
        losses.append(model.out(hidden).square().mean())
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert one.lab.status.coverage.executed == ("first",)
    compared = 0
    for own, other in zip(one.model.parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7)
            compared += 1
    assert compared == 8


def test_a_part_that_is_called_with_unlike_inputs_keeps_both_sessions(trial):
    one = trial(only=["second"])
    built = []
    observe(one.lab, lambda event: built.append(event) if "session" in event else None)
    for _ in range(2):
        raw = one.model.second(
            torch.ones(2, 8)
        )  # requires no gradient; its backward comes after the other call
        hidden = one.model.second(one.model.into(torch.ones(3, 4)))
        (raw.sum() + hidden.sum()).backward()
    assert len(built) == 2
    assert one.model.into.weight.grad is not None
    said = [message.text for message in one.lab.messages if "Built anew" in message.text]
    assert len(said) == 1
    assert said[0].startswith("second: Built anew from the export on: `input[0]` changed")


def test_compiled_parts_are_pytorchs_own(trial):
    one = trial(engine="eager")
    assert not is_wrapped(one.model.first)
    assert not one.lab.status.coverage
    one.lab.set(engine="ort")
    assert is_wrapped(one.model.first)


def test_the_graphs_of_parts_are_saved_under_their_paths(trial, tmp_path):
    one = trial(only=["second", "third"], save_onnx=True, save_onnx_path=str(tmp_path))
    one.lab.step(one.step)
    names = {file.name for file in tmp_path.glob("*.onnx")}
    assert any(name.startswith("Sequential_second") for name in names)
    assert any(name.startswith("Sequential_third") for name in names)
