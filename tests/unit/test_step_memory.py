"""The step memory of a run: what it agrees with, what it leaves as it was, and why it is missing."""

from __future__ import annotations

import copy
import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ortlab
from ortlab.render import text

MIB = 1 << 20


class Training:
    """A model whose buffers are large enough to be mapped, and a step that prints and counts."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        layers = [nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.GELU()]
        self.model = nn.Sequential(*layers, nn.Linear(256, 256))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(2048, 256)
        self.calls = 0

    def step(self) -> torch.Tensor:
        self.calls += 1
        print("a step")
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> list[torch.Tensor]:
        moments = [one for state in self.optimizer.state.values() for one in state.values()]
        return [*self.model.parameters(), *moments, torch.get_rng_state()]


@pytest.fixture
def training():
    training = Training()
    training.lab = ortlab.wrap(training.model)
    yield training
    training.lab.unwrap()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("engine", ["ort", "eager"])
def test_it_is_what_measure_memory_tells(training, engine):
    training.lab.set(engine=engine)
    # The lower of two readings, as comparisons take it: another thread of these tests can add to one.
    told = min(training.lab.step(training.step, n=3).step_memory_bytes for _ in range(2))
    measured = min(training.lab.memory().rise_bytes for _ in range(2))
    assert told == pytest.approx(measured, rel=0.02)
    assert told > 8 * MIB  # four activations of 2 MiB are kept for backward at the least


@pytest.mark.parametrize("step_before", [4, 8])  # of the run's own measurement, and of lab.memory()'s
def test_code_that_the_kernel_reads_again_is_no_memory_of_a_step(training, step_before):
    def step() -> torch.Tensor:
        loss = training.step()
        if training.calls == step_before:
            page_code_out()
        return loss

    usual = min(training.lab.step(training.step, n=3).step_memory_bytes for _ in range(2))
    training.calls = 0
    told = training.lab.step(step, n=3).step_memory_bytes
    # What is read again is 8 to 18 MiB; what another thread of these tests adds to a reading is less than two.
    assert (told - usual) / MIB == pytest.approx(0, abs=2)
    assert (training.lab.memory().rise_bytes - usual) / MIB == pytest.approx(0, abs=2)


def page_code_out() -> None:
    """Give the pages of all shared libraries back to the kernel, which reads them from disk when they are needed."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := re.match(r"(\w+)-(\w+) r\S+ \S+ \S+ \d+ +/.*\.so", line):
            start, end = int(found[1], 16), int(found[2], 16)
            madvise(start, end - start, 21)  # MADV_PAGEOUT


def test_everything_is_where_the_run_ended_and_the_next_run_is_the_same(training, capsys):
    other = copy.deepcopy(training.model), training.optimizer.state_dict()
    without = training.lab.step(training.step, n=3, memory=False)
    ended = [one.detach().clone() for one in training.state()]
    assert capsys.readouterr().out.count("a step") == 3
    again = training.lab.rerun()
    assert again.step_memory_bytes
    assert same(training.state(), ended)
    assert again.losses == without.losses
    assert training.calls > 3 + 3
    assert capsys.readouterr().out.count("a step") == 3  # what the extra steps print is not shown
    assert other[0]


def test_nothing_is_built_again_after_it(training):
    lab = training.lab
    first = lab.step(training.step, n=2)
    assert first.initialization.stage == "export"
    said = len(lab.messages)
    activations = lab.activations().total_bytes  # an analysis of the graph that runs follows at once
    runs = [lab.rerun(), lab.rerun()]
    assert [run.initialization for run in runs] == [None, None]
    measured = lab.memory()
    assert lab.rerun().initialization is None
    assert lab.activations().total_bytes == activations
    assert measured.named_activations_bytes == activations
    assert len(lab.messages) == said
    assert lab.status.state == "ready"


def test_a_session_for_measuring_does_not_outlive_a_switch(training):
    lab = training.lab
    lab.step(training.step, n=2)
    lab.set(memory_level=1).rerun()
    kept = [lab._bench.ort._sessions.last(), *lab._bench.ort._sessions.earlier(training=True)]
    assert sorted((one.options.memory_level, one.options.cpu_memory_arena) for one in kept) == [
        (1, False),
        (1, True),
    ]


def test_recomputing_needs_less(training):
    lab = training.lab
    before = lab.step(training.step, n=2)
    after = lab.set(memory_level=1).rerun()
    assert after.step_memory_bytes < 0.9 * before.step_memory_bytes
    contrast = lab.compare().contrasts[0]
    assert contrast.memory == "less memory"
    assert (before.step_memory_bytes, after.step_memory_bytes) == (
        lab.compare().step_memory_bytes,
        contrast.step_memory_bytes,
    )


def test_a_step_that_fails_after_the_run_takes_nothing_from_it(training):
    def step() -> torch.Tensor:
        if training.calls == 3:
            raise StopIteration
        return training.step()

    run = training.lab.step(step, n=3)
    assert len(run.steps) == 3
    assert run.step_memory_bytes is None
    assert run.no_step_memory == "A step after the last one raised StopIteration."
    assert "A step after the last one raised StopIteration." in text.render(run)
    assert training.lab.runs[-1] is run


def test_a_step_that_draws_from_an_iterator_is_left_alone(training):
    batches = iter(torch.randn(4, 2048, 256))

    def step() -> torch.Tensor:
        training.x = next(batches)
        return training.step()

    run = training.lab.step(step, n=2)
    assert "draws from a" in run.no_step_memory
    assert training.calls == 2
    assert training.lab.rerun(memory=True).no_step_memory == "A step after the last one raised StopIteration."


def test_an_interrupt_keeps_the_run_and_where_it_ended(training):
    def step() -> torch.Tensor:
        if training.calls == 3 and not hasattr(training, "ended"):
            # No list of the test's own: those that a step names have their content back after a measurement.
            training.ended = tuple(one.detach().clone() for one in training.state())
            raise KeyboardInterrupt
        return training.step()

    with pytest.raises(KeyboardInterrupt):
        training.lab.step(step, n=3)
    assert len(training.lab.runs) == 1
    assert training.lab.runs[-1].no_step_memory == "You interrupted its measurement."
    assert same(training.state(), training.ended)
    assert training.lab.rerun(n=2).step_memory_bytes  # the lab goes on


def test_it_can_be_switched_off(training):
    run = training.lab.step(training.step, n=2, memory=False)
    assert (training.calls, run.step_memory_bytes, run.no_step_memory) == (2, None, "It was not asked for.")
    assert training.lab.rerun(memory=False).step_memory_bytes is None


def test_a_recorded_training_takes_none_and_says_so(training):
    run = training.lab.record(lambda: [training.step() for _ in range(3)])
    assert (training.calls, run.step_memory_bytes) == (3, None)
    assert "lab.memory(fn)" in run.no_step_memory


def test_where_memory_cannot_be_told_the_run_says_why(training, monkeypatch, tmp_path):
    monkeypatch.setattr("ortlab.runs.process_memory._CLEAR", tmp_path / "no folder" / "clear_refs")
    run = training.lab.step(training.step, n=2)
    assert run.step_memory_bytes is None
    assert run.no_step_memory.startswith("The kernel's mark of the peak cannot be reset")


def test_a_sweep_measures_each_point_in_two_rounds(training):
    training.lab.step(training.step, n=3, memory=False)
    sweep = training.lab.sweep({"memory_level": [0, 1]}, rounds=3, progress=False)
    taken = [[run.step_memory_bytes for run in point.runs] for point in sweep.points]
    assert all(len(sizes) == 3 and sizes[2] == min(sizes[:2]) for sizes in taken)
    assert [point.step_memory_bytes for point in sweep.points] == [min(sizes) for sizes in taken]
    assert 3 + 2 * 3 * 3 + 2 * 2 * 2 <= training.calls <= 3 + 2 * 3 * 3 + 2 * 2 * 4


# --- comparing in turns --------------------------------------------------------------------------------------------


def test_candidates_run_in_turns_and_the_lab_is_as_before(training):
    lab = training.lab
    lab.step(training.step, n=3)
    state, options = [one.detach().clone() for one in training.state()], lab._bench.configuration
    found = lab.compare(engine="eager", memory_level=[1], rounds=3, progress=False)
    assert [contrast.name for contrast in found.contrasts] == ["eager", "memory_level=1"]
    assert found.in_turns
    assert [len(contrast.runs) for contrast in found.contrasts] == [3, 3]
    assert found.contrasts[1].memory == "less memory"
    assert "memory_level=1 needs" in found.summary
    assert "than the baseline" in found.summary
    assert (len(lab.runs), len(lab.sweeps)) == (1 + 9, 1)
    assert same(training.state(), state)
    assert lab._bench.configuration == options
    assert lab.rerun().sweep == 0
    page = text.render(found)
    assert page.splitlines()[2].startswith("eager needs")


def test_runs_are_repeated_in_turns_even_where_nothing_differs(training):
    lab = training.lab
    lab.step(training.step, n=3)
    lab.rerun()
    found = lab.compare(rerun=True, rounds=3, progress=False)
    assert found.in_turns
    assert [contrast.name for contrast in found.contrasts] == ["the same again"]
    assert found.contrasts[0].memory == ""


def test_several_changes_make_one_candidate(training):
    lab = training.lab
    lab.step(training.step, n=2)
    found = lab.compare(
        {"memory_level": 1, "opset": 16}, baseline={"engine": "eager"}, rounds=1, progress=False
    )
    assert [contrast.name for contrast in found.contrasts] == ["ort, memory_level=1, opset=16"]
    assert found.baseline.engine == "eager"


def test_a_candidate_that_fails_is_named_and_the_others_stand(training, monkeypatch):
    lab = training.lab
    training.lab.step(training.step, n=2)
    original = type(lab._bench).run

    def run(self, experiment, **how):
        if self.engine.name == "eager":
            message = "no eager here"
            raise RuntimeError(message)
        return original(self, experiment, **how)

    monkeypatch.setattr(type(lab._bench), "run", run)
    found = lab.compare(engine="eager", memory_level=1, rounds=1, progress=False)
    assert [contrast.name for contrast in found.contrasts] == ["memory_level=1"]
    assert found.failed == (("engine=eager", "RuntimeError: no eager here"),)
    assert "engine=eager: not run. RuntimeError: no eager here" in text.render(found)
    with pytest.raises(ortlab.errors.LedgerError, match="could not be run"):
        lab.compare(engine="eager", rounds=1, progress=False)


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"memory_levle": 1}, ortlab.errors.OptionError, "memory_level"),
        ({"memory_level": 9}, ortlab.errors.OptionError, "memory_level"),
        ({"baseline": {"engine": "eager"}}, ortlab.errors.OptionError, "needs candidates"),
        ({"rounds": 3}, ortlab.errors.OptionError, "nothing is"),
        ({"memory_level": 1, "rounds": 0}, ortlab.errors.StepError, "rounds"),
        ({"rerun": True}, ortlab.errors.LedgerError, "only one run"),
        ({}, ortlab.errors.LedgerError, "only one run"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(training, how, error, said):
    training.lab.step(training.step, n=1, memory=False)
    with pytest.raises(error, match=said):
        training.lab.compare(**how)
    assert training.calls == 1
    with pytest.raises(ortlab.errors.OptionError, match="in one call"):
        training.lab.compare(1, memory_level=1)
