"""Any analysis may follow any other, in any state of the lab, and leaves the lab bit for bit as it was."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_transformers import gpt2

import ortlab
from ortlab.errors import BuildError, OptionError
from ortlab.options.configuration import Configuration
from ortlab.options.options import Options
from ortlab.render import text
from ortlab.runs.experiment import Snapshot
from ortlab.studies.bisection import NO_CHANGE, NOT_COMPARABLE

PLAN = "FastGelu+Reshape+:1:-1"


def ids_of(size: int) -> torch.Tensor:
    return torch.randint(0, 60, (size, 8), generator=torch.Generator().manual_seed(size))


class Study:
    """A small GPT-2 without dropout, and a lab in which one step has run."""

    def __init__(self, dropout: float = 0.0, **wrap) -> None:
        torch.manual_seed(5)
        self.model = gpt2(width=16, words=60, drop=dropout, n_positions=32, use_cache=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = ids_of(2)
        self.lab = ortlab.wrap(self.model, **wrap)

    def step(self) -> torch.Tensor:
        if self.batch is None:
            raise RuntimeError("no batch")
        loss = self.model(input_ids=self.batch, labels=self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> dict[str, object]:
        """What an analysis may not change."""
        lab = self.lab
        return {
            "bits": Snapshot(self.model, [self.optimizer]).digest,
            "gradients": [p.grad for p in self.model.parameters() if p.grad is not None],
            "mode": self.model.training,
            "options": lab.options,
            "engine": lab.engine,
            "step": (lab._bench.experiment.step, lab._bench.experiment.start.digest),
        }


ANALYSES = {
    "activations": lambda lab: lab.activations(),
    "plan": lambda lab: lab.plan(),
    "plan costs": lambda lab: lab.plan(costs=True, progress=False),
    "memory": lambda lab: lab.memory(n=1),
    "graph": lambda lab: lab.graph(),
    "optimized": lambda lab: lab.graph("optimized"),
    "graphs": lambda lab: lab.graphs(),
    "changes": lambda lab: lab.graph_diff(),
    "profile": lambda lab: lab.profile(1, progress=False),
    "flops": lambda lab: lab.flops(progress=False),
    "density": lambda lab: lab.density({"input_ids": ids_of(2), "labels": ids_of(2)}),
    "candidates": lambda lab: lab.compare_engines(
        n=2, rounds=1, engines=["eager"], memory=False, progress=False
    ),
    "search": lambda lab: lab.find_batch_size(
        lambda size: {"input_ids": ids_of(size), "labels": ids_of(size)},
        limit="20 GiB",
        sizes=[1],
        plans=[PLAN] if lab.engine == "ort" else None,
        n=1,
        progress=False,
    ),
    "bisection": lambda lab: lab.bisect("loss", changes={"aten_backward": False}, n=1, progress=False),
    "parity": lambda lab: lab.parity(n=1, seeds=False, progress=False),
    "sweep": lambda lab: lab.sweep({"compute_optimizer": [False]}, n=1, rounds=1, progress=False),
}

RUNS = ["memory", "plan costs", "candidates", "search", "bisection", "parity", "sweep"]
"""Analyses that run several steps."""

LOOKS = [name for name in ANALYSES if name not in RUNS]

# These take runs on other engines or of ONNX Runtime with its arena, and write them into the ledger.
ADDS_RUNS = {"candidates", "search", "sweep"}


def facts(name: str, record: object) -> object:
    """What a record must say each time, whatever was asked in between."""
    read = {
        "activations": lambda: (record.total_bytes, [row.value for row in record.rows]),
        "plan": lambda: [(row.config, row.saving_bytes, row.enabled) for row in record.rows],
        "plan costs": lambda: [(row.config, row.saving_bytes) for row in record.rows],
        "graph": lambda: record.operators,
        "optimized": lambda: record.operators,
        "graphs": lambda: [graph.node_count for graph in record],
        "changes": lambda: record.sentences,
        "flops": lambda: record.total,
        "profile": lambda: (len(record.nodes), record.plans),
    }
    return read[name]() if name in read else type(record).__name__


def walk(names: list[str]) -> list[str]:
    """Return a walk in which each name is followed by each other and by itself once: an Eulerian circuit."""
    left = {name: list(reversed(names)) for name in names}
    stack, circuit = [names[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            circuit.append(stack.pop())
    assert len(circuit) == len(names) ** 2 + 1
    assert set(itertools.pairwise(circuit)) == set(itertools.product(names, names))
    return circuit[::-1]


def engine_eager(lab):
    lab.set(engine="eager")


def level_just_set(lab):
    lab.set(memory_level=1)


def plan_ticked(lab):
    lab.set(memory_plan=(PLAN,))


def refused(lab):
    """Refuse a change, which leaves the lab as it is after a step."""
    with pytest.raises(OptionError):
        lab.set(memory_level=1, memory_plan=(PLAN,))


def evaluated(lab):
    """Evaluate the model after a switch: what runs is an inference graph."""
    lab.set(compute_optimizer=False)
    lab.module.eval()
    with torch.no_grad():
        lab.module(input_ids=ids_of(2))


# A ticked plan is the state in the tests above.
STATES = {
    "engine eager": engine_eager,
    "a level just set": level_just_set,
    "after a step and a refused set": refused,
    "in evaluation": evaluated,
}


def asked(study: Study, name: str, known: dict[str, object]) -> None:
    """Ask for an analysis; it works, says the same as before, and the lab is as it was."""
    lab = study.lab
    before, runs = study.state(), list(lab.runs)
    record = ANALYSES[name](lab)
    after = study.state()
    assert after == before, name
    assert list(lab.runs)[: len(runs)] == runs, name
    if name not in ADDS_RUNS:
        assert len(lab.runs) == len(runs), name
    said = facts(name, record)
    assert known.setdefault(name, said) == said, name


@pytest.fixture(scope="module")
def study():
    study = Study()
    study.lab.step(study.step, n=2)
    yield study
    study.lab.unwrap()


@pytest.fixture(autouse=True)
def as_wrapped(study):
    """Put the lab that these tests share back to its first switches and weights."""
    yield
    study.model.train()
    study.lab._bench.configure(Configuration("ort", Options()))
    study.lab.rerun(memory=False)


def test_every_look_follows_every_other(study):
    """All ordered pairs of those that take a step at most, and each after itself, with a plan ticked."""
    plan_ticked(study.lab)
    known: dict[str, object] = {}
    for name in walk(LOOKS):
        asked(study, name, known)


@pytest.mark.parametrize("first", RUNS)
def test_every_analysis_follows_one_that_runs_steps(study, first):
    """It comes after itself, before and after looks, and before and after two others that run, with a plan ticked."""
    plan_ticked(study.lab)
    known: dict[str, object] = {}
    turned = RUNS[RUNS.index(first) :] + RUNS[: RUNS.index(first)]
    others = [turned[1], turned[3]]
    for name in ("activations", first, first, "graph", "changes", "profile", *others, first, *LOOKS):
        asked(study, name, known)


@pytest.mark.parametrize("state", STATES)
def test_every_analysis_works_from_every_state(study, state):
    STATES[state](study.lab)
    known: dict[str, object] = {}
    names = list(ANALYSES)
    for name in names:
        asked(study, name, known)


def test_what_is_shown_is_of_the_present_switches_and_says_that_it_was_built(study):
    lab = study.lab
    kept, status = lab.activations(), lab.status
    assert not kept.note
    plan_ticked(lab)
    pending = lab.status
    found, plan, graph = lab.activations(), lab.plan(), lab.graph()
    assert lab.status == pending != status
    assert found.applied == plan.enabled == (PLAN,)
    assert found.total_bytes < kept.total_bytes
    for record in (found, plan, graph):
        assert record.note.startswith("Built for this page")
        assert record.note in " ".join(text.render(record).split())
    lab.rerun(memory=False)
    assert lab.activations() == found
    assert lab.graph().operators == graph.operators
    assert not lab.activations().note


def test_a_fault_in_the_build_leaves_the_lab_as_it_was(study):
    """A step that cannot run once more is the user's: its error goes on, and nothing is lost."""
    lab, batch = study.lab, study.batch
    plan_ticked(lab)
    before = study.state()
    study.batch = None
    try:
        with pytest.raises(RuntimeError, match="no batch"):
            lab.activations()
    finally:
        study.batch = batch
    assert study.state() == before
    assert lab.activations().applied == (PLAN,)


def test_without_any_step_it_says_so():
    study = Study()
    for name in ("activations", "plan", "graph", "optimized", "graphs"):
        with pytest.raises(BuildError, match="Run a step first"):
            ANALYSES[name](study.lab)
    study.lab.unwrap()


def test_a_lab_that_only_pytorch_has_run_shows_the_graphs_of_its_parts():
    study = Study(only="transformer.h.*.mlp", engine="eager")
    lab = study.lab
    lab.step(study.step, memory=False)
    before = study.state()
    found = lab.activations()
    assert {row.part for row in found.rows} == {"transformer.h.0.mlp", "transformer.h.1.mlp"}
    assert not found.missing
    assert lab.graph("optimized", "transformer.h.1.mlp").part == "transformer.h.1.mlp"
    assert study.state() == before
    lab.rerun(memory=False)
    assert lab.runs[-1].executed_by == "eager"
    lab.unwrap()


def test_the_changes_of_the_present_switches(study):
    lab = study.lab
    same = lab.graph_diff()
    assert same.is_empty
    assert "Set a switch, then ask again" in text.render(same)
    plan_ticked(lab)
    found = lab.graph_diff()
    assert found.before.name == "run 1: no recompute plans"
    assert any("recompute" in one for one in found.sentences)
    assert found.recomputed == lab.graph_diff({"memory_plan": ()}, {}).recomputed
    # Where all runs were as the lab is set, the changes are those against the defaults.
    other = Study(memory_plan=(PLAN,))
    other.lab.step(other.step, memory=False)
    assert other.lab.graph_diff().before.name == "the defaults: no recompute plans"
    assert len(other.lab.graph_diff().recomputed) == len(found.recomputed)
    other.lab.unwrap()


def test_a_level_has_the_losses_of_no_level_with_dropout_too():
    study = Study(dropout=0.2)
    study.lab.step(study.step, n=2, memory=False)
    assert study.lab.set(memory_level=1).bisect("loss", progress=False).outcome == NO_CHANGE
    study.lab.unwrap()


def test_other_masks_are_not_blamed_on_a_switch(monkeypatch):
    """Where ONNX Runtime draws the masks, a level draws others; that changes the losses, and nothing is wrong."""
    monkeypatch.setattr("ortlab.engine.sessions.with_quick_dropouts", lambda _: None)
    study = Study(dropout=0.2)
    lab = study.lab
    lab.step(study.step, n=2, memory=False)
    before = study.state()
    found = lab.set(memory_level=1).bisect("loss", progress=False)
    assert found.outcome == NOT_COMPARABLE
    assert not found.culprits
    assert found.drawn > 0
    said = " ".join(text.render(found).split())
    assert "Not comparable" in said
    assert "lab.parity()" in said
    lab.set(memory_level=0)
    assert study.state() == before
    lab.unwrap()
