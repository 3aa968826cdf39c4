"""The search for a batch size: real steps under real ceilings, and a lab that is as it was before."""

from __future__ import annotations

import gc
import json
import resource
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import LedgerError, OptionError, OrtlabError, StepError
from ortlab.render import html, text
from ortlab.render.batch_size_page import best_sentence, closing_sentence
from ortlab.runs.process_memory import resident_bytes
from ortlab.studies.batch_size import (
    FAILED,
    FITS,
    PREDICTED,
    RAN_OUT,
    TOO_LARGE,
    BatchSizeSearch,
    following,
    plans_name,
)
from ortlab.studies.batch_size_trials import read_plan_sets

MIB = 1 << 20
GELU = ("Gelu+:1:-1",)
WIDE, LAYERS = 2048, 4


class Deep(nn.Module):
    """Activations of 64 KiB for each sample, and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(part for _ in range(LAYERS) for part in (nn.Linear(16, WIDE), nn.GELU(), nn.Linear(WIDE, 16)))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Setting:
    """A model in the middle of a training, with everything that a search may not lose."""

    def __init__(self, engine: str = "ort", model: type[nn.Module] = Deep) -> None:
        torch.manual_seed(3)
        self.model = model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.lab = ortlab.wrap(self.model, engine=engine)
        self.train(self.make_batch(4))
        self.model(self.make_batch(4)).backward()  # gradients that the user has not applied yet
        gc.collect()

    def make_batch(self, size: int) -> torch.Tensor:
        return torch.randn(size, 16)

    def train(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> tuple[list[torch.Tensor], list[object]]:
        """All that must be as before: tensors, and the rest."""
        held = [value for one in self.optimizer.state.values() for value in one.values()]
        grads = [parameter.grad for parameter in self.model.parameters()]
        tensors = [*self.model.state_dict().values(), *held, *grads, torch.get_rng_state()]
        lab = self.lab
        rest = [
            lab._bench.configuration,
            lab.status.state,
            len(lab.runs),
            resource.getrlimit(resource.RLIMIT_DATA),
        ]
        return [tensor.detach().clone() for tensor in tensors], rest

    def search(self, device: int | None, **more) -> BatchSizeSearch:
        more = {"train": self.train, "n": 2, "progress": False, **more}
        return self.lab.find_batch_size(self.make_batch, device=device, **more)


def assert_same(before, after) -> None:
    assert len(before[0]) == len(after[0])
    assert all(torch.equal(one, other) for one, other in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]


def used() -> int:
    gc.collect()
    return resident_bytes("VmRSS")


@pytest.fixture(scope="module")
def found():
    """A search whose limit lies between what 1024 samples take with and without recomputing GELU."""
    setting = Setting()
    before = setting.state()
    free = setting.search(used() + 1024 * MIB, sizes=[128, 256, 512])
    without, small = free.predicted(1024, ()), free.point(128).peak_bytes
    before_second = setting.state()
    limit = int(without - 0.06 * (without - small))
    search = setting.search(limit, sizes=[128, 256, 512, 1024], plans=[GELU])
    after = setting.state()
    train_again = [setting.train(torch.ones(4, 16)).item() for _ in range(2)]
    setting.lab.unwrap()
    return free, search, (before, before_second, after), train_again


@pytest.mark.row("F6")
@pytest.mark.row("F7")
def test_recomputing_lets_the_batch_double(found):
    _, search, _, _ = found
    assert search.largest(()).size == 512
    assert search.largest(GELU).size == 1024
    assert search.point(1024).outcome in TOO_LARGE
    assert search.best_with_plans.size == 1024
    assert all(len(one.runs) == search.rounds for one in search.points if one.fits)
    assert all(one.peak_bytes <= search.limit_bytes for one in search.points if one.fits)
    assert all(run.executed_by == "ort" for one in search.points for run in one.runs)
    assert following(search) is None
    assert "Recomputing Gelu lets the batch double from 512 to 1,024" in closing_sentence(search)


def test_a_straight_line_predicts_the_peak(found):
    free, search, _, _ = found
    line = free.predicted(512, ())
    start = free.point(128).peak_bytes
    assert line - start == pytest.approx(free.point(512).peak_bytes - start, rel=0.15)
    assert free.point(512).predicted_bytes == line  # what was predicted before it ran stays in the record
    measured = search.point(1024, GELU)
    assert measured.predicted_bytes - start == pytest.approx(measured.peak_bytes - start, rel=0.15)


def test_the_lab_is_as_it_was(found):
    _, _, (before, before_second, after), losses = found
    assert_same(before, before_second)
    assert_same(before, after)
    assert losses[1] < losses[0]


def test_no_plans_means_that_nothing_is_recomputed():
    setting = Setting()
    setting.lab.set(recompute="all but matmuls")
    setting.model(setting.make_batch(4)).backward()
    before = setting.state()
    search = setting.search(used() + 1024 * MIB, sizes=[128])
    runs = [run for point in search.points for run in point.runs]
    assert {(point.plans, run.options.recompute) for point in search.points for run in point.runs} == {
        ((), ())
    }
    assert len(runs) == search.rounds
    assert_same(before, setting.state())
    assert setting.lab.options.recompute == ("all but matmuls",)
    setting.lab.unwrap()


def test_without_a_misfit_no_plan_is_tried(found):
    free, _, _, _ = found
    assert {one.plans for one in free.points} == {()}
    assert "no plan is needed" in closing_sentence(free)


def test_the_sentence_says_whether_it_pays(found):
    _, search, _, _ = found

    def paced(factor: float) -> BatchSizeSearch:
        """The same search, every point at one pace, except 1,024 with the plan: `factor` times the time a sample."""
        copy = BatchSizeSearch.from_dict(search.to_dict())

        def at(ms: float, run):
            return replace(
                run, steps=tuple(replace(s, total_ms=ms + n / 1000) for n, s in enumerate(run.steps))
            )

        for one in search.points:
            slower = factor if (one.size, one.plans) == (1024, GELU) else 1.0
            copy.add(replace(one, runs=tuple(at(100.0 * slower * one.size / 512, run) for run in one.runs)))
        return copy

    faster, slower = closing_sentence(paced(1 / 1.08)), closing_sentence(paced(1 / 0.93))
    assert "; 1.08 times [1.08, 1.08] the samples per second." in faster
    assert "does not pay here: 0.93 times [0.93, 0.93]" in slower
    assert "no difference" in closing_sentence(paced(1.0)) or "1.00 times" in closing_sentence(paced(1.0))
    assert "batch 1,024, recomputing Gelu" in best_sentence(paced(0.5))


def test_a_hunt_shows_itself(found):
    _, search, _, _ = found
    shown = text.render(search)
    for word in (
        "memory, predicted",
        "memory, measured",
        "Gelu",
        "live buffers",
        "double from 512 to 1,024",
        "quartiles",
    ):
        assert word in shown
    assert "data:image/svg+xml" in html.render(search)
    table = search.table()
    assert list(table["batch"]) == [one.size for one in search.points]
    assert table["samples/s"].notna().sum() == sum(one.timed for one in search.points)
    figure = ortlab.plot(search)
    assert [axes.get_ylabel() for axes in figure.axes] == ["samples/s", "MiB"]


def test_a_hunt_goes_through_json(found, tmp_path):
    _, search, _, _ = found
    again = BatchSizeSearch.load(search.save(tmp_path / "search.json"))
    assert again.to_dict() == search.to_dict()
    assert repr(again) == repr(search)
    for spoilt in ("[]", "{", json.dumps({**search.to_dict(), "schema": 99}), json.dumps({"schema": 1})):
        (tmp_path / "spoilt.json").write_text(spoilt)
        with pytest.raises(LedgerError):
            BatchSizeSearch.load(tmp_path / "spoilt.json")


@pytest.mark.parametrize("engine", ["ort", "eager"])
def test_a_point_that_runs_out_of_memory_is_written_down_and_nothing_is_left(engine):
    setting = Setting(engine)
    before = setting.state()
    frozen = gc.get_freeze_count()
    # One smaller batch predicts nothing, so the large one is tried: it needs 2 GiB, and the ceiling is 100 MiB away.
    search = setting.search(used() + 40 * MIB, sizes=[64, 32768], plans=[GELU] if engine == "ort" else None)
    small, large = search.point(64), search.point(32768)
    assert small.outcome == FITS
    assert small.timed
    assert large.outcome == RAN_OUT
    assert large.reason.startswith("Ran out of memory")
    assert large.peak_bytes is None
    if engine == "ort":
        assert search.point(32768, GELU).outcome in TOO_LARGE
        assert "No plan that was tried" in closing_sentence(search)
    assert_same(before, setting.state())
    assert bool(gc.get_freeze_count()) == bool(frozen)
    assert torch.isfinite(setting.train(setting.make_batch(64)))  # sessions and threads still work
    assert setting.lab.status.executed_by == engine
    setting.lab.unwrap()


def test_what_is_predicted_not_to_fit_is_not_run():
    setting = Setting("eager")
    asked = []

    def make_batch(size: int) -> torch.Tensor:
        asked.append(size)
        return setting.make_batch(size)

    limit = used() + 300 * MIB
    search = setting.lab.find_batch_size(
        make_batch, device=limit, train=setting.train, sizes=[256, 512, 1 << 20], progress=False
    )
    refused = search.point(1 << 20)
    assert refused.outcome == PREDICTED
    assert refused.predicted_bytes > limit
    assert refused.peak_bytes is None
    assert 1 << 20 not in asked
    assert "not run" in text.render(search)
    setting.lab.unwrap()


def test_a_limit_is_of_what_a_step_needs():
    """Whatever the process holds besides: a limit far below it is one that batches fit under."""
    setting = Setting("eager")
    free = setting.lab.find_batch_size(
        setting.make_batch, "4 GiB", train=setting.train, sizes=[128, 256, 512], n=1, progress=False
    )
    needed = {one.size: one.step_memory_bytes for one in free.points}
    assert needed[512] == pytest.approx(2 * needed[256], rel=0.25)
    assert all(one.peak_bytes > one.step_memory_bytes for one in free.points)
    limit = (needed[256] + needed[512]) // 2
    assert limit < used()
    search = setting.lab.find_batch_size(
        setting.make_batch, limit, train=setting.train, sizes=[256, 512], n=1, progress=False
    )
    assert [(one.size, one.fits) for one in search.points] == [(256, True), (512, False)]
    assert "of step memory" in text.render(search)
    assert BatchSizeSearch.from_dict(search.to_dict()).to_dict() == search.to_dict()
    setting.lab.unwrap()


def test_a_search_puts_back_what_the_step_reaches_besides():
    setting = Setting("eager")
    scheduler = torch.optim.lr_scheduler.StepLR(setting.optimizer, 1, 0.5)
    around = SimpleNamespace(scheduler=scheduler, done=0)

    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = setting.train(batch) / (1 + around.done)
        around.scheduler.step()
        around.done += 1
        return loss

    setting.search(used() + 512 * MIB, sizes=[2, 4], train=train)
    setting.lab.unwrap()
    assert (scheduler.last_epoch, around.done) == (0, 0)


def test_an_interrupted_hunt_is_resumed():
    setting = Setting("eager")
    before, once = setting.state(), iter([True])  # what a step counts is put back, an iterator is not

    def train(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 8 and next(once, False):  # in the third point
            raise KeyboardInterrupt
        return setting.train(batch)

    with pytest.raises(KeyboardInterrupt, match=r"resume=lab\.batch_size_searches\[0\]"):
        setting.search(used() + 512 * MIB, sizes=[2, 4, 8], train=train)
    (stopped,) = setting.lab.batch_size_searches
    assert [one.size for one in stopped.points] == [2, 4]
    assert "Interrupted after 2 points" in text.render(stopped)
    assert_same(before, setting.state())
    resumed = setting.lab.find_batch_size(setting.make_batch, train=train, resume=stopped, progress=False)
    assert resumed is stopped
    assert [one.size for one in resumed.points if one.timed] == [2, 4, 8]
    assert "Interrupted" not in text.render(resumed)
    assert_same(before, setting.state())
    with pytest.raises(OptionError, match="has its limit"):
        setting.lab.find_batch_size(setting.make_batch, "1 GiB", resume=resumed)
    setting.train(setting.make_batch(4))
    with pytest.raises(LedgerError, match="start"):
        setting.lab.find_batch_size(setting.make_batch, train=train, resume=stopped)
    setting.lab.unwrap()


@pytest.fixture(scope="module")
def eager():
    setting = Setting("eager")
    yield setting
    setting.lab.unwrap()


BAD = {
    "no limit": ({"limit": None}, "needs a limit"),
    "zero": ({"limit": 0}, "above zero"),
    "negative": ({"limit": "-6 GiB"}, "above zero"),
    "unknown unit": ({"limit": "6 GX"}, "'gx'"),
    "below the process": ({"limit": None, "device": "1 MiB"}, "below what is in use"),
    "of two things": ({"device": "1 GiB"}, "one limit"),
    "a percentage": ({"limit": "70%"}, "a search changes the batch"),
    "no sizes": ({"sizes": []}, "no batch sizes"),
    "size zero": ({"sizes": [0, 1]}, "not 0"),
    "sizes of text": ({"sizes": "12"}, "not '12'"),
    "no plans": ({"plans": 3}, "not a list of plans"),
    "a plan that is none": ({"plans": ["Gelu"]}, "Gelu"),
    "plans without ORT": ({"plans": [GELU]}, "act in ONNX Runtime"),
    "a batch of another size": ({"make_batch": lambda _: torch.ones(2, 16)}, "returned a batch of 2"),
    "a batch without tensors": ({"make_batch": lambda size: [size]}, "without tensors"),
    "no function": ({"make_batch": 3}, "make_batch must be a function, not a int"),
    "train is no function": ({"train": 3}, "train must be a function"),
    "no steps": ({"n": 0}, "from 1 on"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_changes_nothing(eager, case):
    given, says = BAD[case]
    before = eager.state()
    arguments = {
        "make_batch": eager.make_batch,
        "limit": "64 GiB",
        "train": eager.train,
        "sizes": [1],
        **given,
    }
    with pytest.raises(OrtlabError) as refusal:
        eager.lab.find_batch_size(progress=False, **arguments)
    assert says in str(refusal.value)
    assert eager.lab.batch_size_searches == []
    assert_same(before, eager.state())


def test_make_batch_that_raises_is_refused_first_and_written_down_later(eager):
    def ends_at_two(size: int) -> torch.Tensor:
        if size > 2:
            raise IndexError("no more samples")
        return torch.ones(size, 16)

    with pytest.raises(OptionError, match=r"make_batch\(4\) failed: IndexError: no more samples"):
        eager.lab.find_batch_size(ends_at_two, "64 GiB", train=eager.train, sizes=[4], progress=False)
    search = eager.lab.find_batch_size(ends_at_two, "64 GiB", train=eager.train, n=1, progress=False)
    assert [(one.size, one.outcome) for one in search.points] == [(1, FITS), (2, FITS), (4, FAILED)]
    assert "no more samples" in search.point(4).reason
    assert "could not be made or run" in closing_sentence(search)
    eager.lab.batch_size_searches.clear()


def test_a_model_without_a_loss_needs_a_step(wrap):
    model = nn.Linear(4, 4)
    lab = wrap(model, engine="eager")
    with pytest.raises(StepError, match="without a loss"):
        lab.find_batch_size(lambda size: torch.ones(size, 4), "64 GiB", progress=False)
    assert lab.batch_size_searches == []
    assert all(parameter.grad is None for parameter in model.parameters())


class Blocks(Deep):
    """The same in a list of blocks, which can be recomputed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, WIDE), nn.GELU(), nn.Linear(WIDE, 16)) for _ in range(2 * LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_layers_that_are_recomputed_let_the_batch_grow_more_than_plans():
    setting = Setting(model=Blocks)
    free = setting.search(None, limit="4 GiB", sizes=[128, 256], plans=())
    limit = int(free.predicted(300, ()))
    search = setting.search(None, limit=limit, sizes=[256, 512, 768])
    assert search.plan_sets[-2:] == (("recompute=layers",), ("recompute=layers but linear",))
    assert search.largest(()).size == 256
    layers = search.largest(("recompute=layers",))
    assert layers.size == 768
    assert {run.options.recompute for run in layers.runs} == {("layers",)}
    assert {run.options.memory_plan for run in layers.runs} == {()}
    assert layers.step_memory_bytes < search.point(256).step_memory_bytes * 2
    assert "layers but linear" in text.render(search)
    assert "lets the batch" in closing_sentence(search)
    # With each batch of 768 a hundred times as slow, the largest batch is not the fastest; another way to fit it is
    # slower still, so that it is not left to the clock which of them the sentence names.
    slower = BatchSizeSearch.from_dict(search.to_dict())
    for one in search.points:
        if one.size == 768:
            times = 100 if one.plans == ("recompute=layers",) else 10_000
            runs = [
                replace(run, steps=tuple(replace(step, total_ms=times * step.total_ms) for step in run.steps))
                for run in one.runs
            ]
            slower.add(replace(one, runs=tuple(runs)))
    assert slower.best_with_plans.size == 512
    assert "Largest batch: 768, recomputing layers, " in " ".join(text.render(slower).split())
    assert setting.lab.options.recompute == ()
    setting.lab.unwrap()


def test_what_is_recomputed_together_is_read_and_named():
    read = read_plan_sets(["recompute=layers:1/2 nested", ("Gelu+:1:-1", "recompute=all but matmuls"), ()])
    assert read == (("recompute=layers:1/2 nested",), ("Gelu+:1:-1", "recompute=all but matmuls"))
    assert [plans_name(one) for one in read] == ["layers:1/2 nested", "Gelu, all but matmuls"]
    for wrong in ("layers", "recompute=layers:x"):
        with pytest.raises(OptionError, match="is no set of plans") as refused:
            read_plan_sets([wrong])
        assert '"recompute=layers"' in refused.value.fix


def test_plans_of_another_model_are_not_taken_for_applied():
    setting = Setting()
    search = setting.search(used() + 30 * MIB, sizes=[64, 2048], plans=["BiasGelu+:1:-1"])
    point = search.point(64, ("BiasGelu+:1:-1",))
    assert point.outcome == FAILED
    assert "does not offer BiasGelu+:1" in point.reason
    setting.lab.unwrap()
