"""Memory measured in the running process: it re-adds, shows what is there, and leaves everything as it was."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ortlab
from ortlab.errors import OptionError, StepError
from ortlab.memory.measured import Known, MemoryMeasurement, PhasePeak, StepMemory
from ortlab.records.memory_phases import MemoryPhases, is_read
from ortlab.render import html, text
from ortlab.runs import process_memory
from ortlab.runs.process_memory import CudaGauge, gauge_of
from ortlab.runs.step_memory import known_bytes

MIB = 2**20
CPU = torch.device("cpu")

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process")


@pytest.fixture
def lab(noisy_experiment):
    """Wrap a model with dropout, and run two steps."""
    lab = ortlab.wrap(noisy_experiment.model)
    lab.step(noisy_experiment.step, n=2, progress=False)
    yield lab
    lab.unwrap(forget=True)


@pytest.fixture
def experiment(noisy_experiment):
    """Return what `lab` is of."""
    return noisy_experiment


def equal(before, after):
    return len(before) == len(after) and all(map(torch.equal, before, after))


class Keeping(nn.Module):
    """Keeps `kept` MiB for backward, and takes `temporary` MiB in forward for a moment."""

    def __init__(self, kept: int, temporary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.kept = kept
        self.temporary = temporary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.temporary:
            torch.ones(self.temporary * MIB, dtype=torch.uint8)
        many = x.expand(self.kept * MIB // 4) * self.weight
        return many.square().sum()  # square keeps its input


# ---- what is measured ----------------------------------------------------------------------------------------------


@only_linux
def test_what_a_step_keeps_and_takes_shows_up(wrap):
    model = Keeping(64, 0)
    x = torch.ones(1)

    def step():
        model(x).backward()

    lab = wrap(model, engine="eager")
    kept = lab.memory(step, n=2)
    model.temporary = 512
    taken = lab.memory(step, n=2)

    # The product is kept; its gradient and that of the square are two more, and the square itself is gone by then.
    assert kept.saved_bytes == pytest.approx(64 * MIB, rel=0.1)
    assert kept.step.highest.phase == "backward"
    assert kept.rise_bytes > 120 * MIB
    assert taken.saved_bytes == pytest.approx(64 * MIB, rel=0.1)
    assert taken.step.highest.phase == "forward"
    assert taken.rise_bytes == pytest.approx(512 * MIB, rel=0.1)
    temporaries = {piece.name: piece.number_of_bytes for piece in taken.breakdown()}[
        "temporaries of the forward"
    ]
    assert temporaries == pytest.approx((512 - 64) * MIB, rel=0.1)
    assert kept.spread_bytes < 6 * MIB


@only_linux
def test_freed_memory_of_an_earlier_step_hides_nothing():
    """glibc serves large buffers from gaps in its heap, whatever its thresholds are, so the gaps are filled."""
    model = Keeping(64, 0)
    x = torch.ones(1)
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 32 * MIB)
    blocks = [torch.ones(8 * MIB, dtype=torch.uint8) for _ in range(16)]
    del blocks[::2]  # gaps of 8 MiB

    lab = ortlab.wrap(model, engine="eager")
    measured = lab.memory(lambda: model(x).backward(), n=1)
    lab.unwrap()

    assert measured.saved_bytes == pytest.approx(64 * MIB, rel=0.1)


@only_linux
def test_an_ort_step_is_measured_as_it_is_set_up(lab, experiment):
    measured = lab.memory(n=2)

    assert (measured.engine, measured.device, measured.scope) == ("ort", "cpu", "this process")
    assert measured.kind == "resident set, large buffers mapped"
    assert measured.options == lab.options.to_dict()
    assert [phase.phase for phase in measured.step.phases] == ["forward", "backward", "optimizer", "the rest"]
    assert all(
        phase.peak_bytes >= max(phase.before_bytes, phase.after_bytes) for phase in measured.step.phases
    )
    assert len(measured.steps) == 2
    pieces = {piece.name: piece for piece in measured.breakdown()}
    numbers = sum(parameter.numel() for parameter in experiment.model.parameters())
    assert pieces["parameters"].number_of_bytes == 4 * numbers
    assert measured.step.gradient_bytes == 4 * numbers
    # AdamW keeps two moments of each number, and the step of each parameter.
    count = len(list(experiment.model.parameters()))
    assert pieces["optimizer state"].number_of_bytes == 8 * numbers + 4 * count
    assert {piece.source for piece in pieces.values()} == {"computed", "measured"}
    assert sum(piece.number_of_bytes for piece in pieces.values()) == measured.peak_bytes


@only_linux
def test_changes_are_for_the_measurement_only(lab):
    measured = lab.memory(n=1, engine="eager", memory_level=1)

    assert (measured.engine, measured.options["memory_level"]) == ("eager", 1)
    assert (lab.engine, lab.options.memory_level, lab.options.cpu_memory_arena) == ("ort", 0, True)


# ---- nothing is left behind ----------------------------------------------------------------------------------------


@only_linux
def test_everything_is_put_back(lab, experiment):
    before, configuration = experiment.state(), lab._bench.configuration
    gradients = [parameter.grad for parameter in experiment.model.parameters()]

    lab.memory(n=1)

    assert equal(before, experiment.state())
    assert [parameter.grad for parameter in experiment.model.parameters()] == gradients
    assert lab._bench.configuration == configuration
    assert len(lab.runs) == 1
    assert lab.step(experiment.step, progress=False).executed_by == "ort"


@only_linux
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("no more data")])
def test_everything_is_put_back_after_a_failure(lab, experiment, failure):
    before, configuration = experiment.state(), lab._bench.configuration
    calls = []

    def step():
        calls.append(1)
        loss = experiment.step()
        if len(calls) == 3:
            raise failure
        return loss

    with pytest.raises(type(failure)):
        lab.memory(step)

    assert equal(before, experiment.state())
    assert lab._bench.configuration == configuration
    lab.rerun(1, progress=False)


@only_linux
def test_an_optimizer_that_only_the_step_knows_is_put_back_and_counted(experiment, wrap):
    class Hidden:
        optimizer = torch.optim.SGD(experiment.model.parameters(), lr=0.1, momentum=0.9)

    def step():
        nn.functional.cross_entropy(experiment.model(experiment.x), experiment.y).backward()
        Hidden.optimizer.step()
        Hidden.optimizer.zero_grad()

    lab = wrap(experiment.model, engine="eager")
    measured = lab.memory(step, n=1)

    assert Hidden.optimizer.state_dict()["state"] == {}
    moments = {piece.name: piece.number_of_bytes for piece in measured.breakdown()}["optimizer state"]
    assert moments == 4 * sum(parameter.numel() for parameter in experiment.model.parameters())


# ---- what cannot be measured ---------------------------------------------------------------------------------------


def test_a_lab_without_a_step_says_what_to_do(experiment, wrap):
    lab = wrap(experiment.model)
    with pytest.raises(StepError, match="no step to go back to"):
        lab.memory()


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_number_of_steps_that_is_none_is_refused(lab, steps):
    with pytest.raises(StepError, match="whole number"):
        lab.memory(n=steps)


def test_a_wrong_option_is_refused(lab):
    with pytest.raises(OptionError):
        lab.memory(memory_levle=1)
    assert lab.engine == "ort"


@only_linux
def test_a_step_that_falls_back_is_not_called_one_of_ort(wrap):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(torch.tanh, self.linear(x), use_reentrant=True).sum()

    torch.manual_seed(1)
    model = Checkpointed()
    x = torch.randn(2, 4)
    lab = wrap(model, fallback=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with (
        pytest.warns(ortlab.errors.FallbackWarning),
        pytest.raises(StepError, match="not ONNX Runtime") as refusal,
    ):
        lab.memory(lambda: model(x).backward())
    assert refusal.value.why
    assert equal(before, list(model.parameters()))
    assert lab.memory(lambda: model(x).backward(), engine="eager").engine == "eager"


@only_linux
def test_a_step_that_builds_something_each_time_is_refused(lab, experiment):
    sizes = iter(range(1, 100))

    lab.set(static_shape=True)
    with pytest.raises(StepError, match=r"builds something|was built"):
        lab.memory(lambda: experiment.model(torch.randn(2 + next(sizes), 4)).sum().backward())


def test_systems_that_cannot_tell_say_why(lab, monkeypatch):
    monkeypatch.setattr(process_memory.sys, "platform", "darwin")
    before = lab._bench.configuration
    with pytest.raises(StepError, match="cannot be measured here") as refusal:
        lab.memory()
    assert "/proc" in refusal.value.why
    assert lab._bench.configuration == before


_COUNTED_APART = """
import mmap, os, random
from ortlab.runs import process_memory

processors, draw, kept = sorted(os.sched_getaffinity(0)), random.Random(7), []
for _ in range(200):
    for _ in range(draw.randint(1, 40)):
        os.sched_setaffinity(0, {draw.choice(processors)})
        pages = draw.randint(1, 8)
        kept.append(mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        kept[-1][:: mmap.PAGESIZE] = b"1" * pages
        if len(kept) > 20:
            kept.pop(draw.randrange(20)).close()
    os.sched_setaffinity(0, processors)
    process_memory.reset_peak()
    now, peak = process_memory.resident_set()
    assert peak - now <= 8 * mmap.PAGESIZE, (peak, now)
"""


@only_linux
def test_the_mark_of_a_peak_knows_what_every_processor_has_counted():
    """Linux counts pages on each processor apart, and its mark did not know up to 31 of each."""
    # In a process of its own, where no other thread gives pages back meanwhile.
    run = subprocess.run([sys.executable, "-c", _COUNTED_APART], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@only_linux
def test_a_peak_starts_anew_where_no_thread_may_choose_its_processor(monkeypatch):
    def refused(*_):
        raise PermissionError("not here")

    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as large:
        large.write(bytes(64 * MIB))
    _, before = process_memory.resident_set()
    monkeypatch.setattr(os, "sched_setaffinity", refused)
    process_memory.reset_peak()
    assert process_memory.resident_set()[1] < before - 32 * MIB
    monkeypatch.delattr(os, "sched_setaffinity")  # as on other systems than Linux
    process_memory.reset_peak()


@only_linux
def test_gaps_are_filled_and_malloc_is_asked_for_its_statistics_once(monkeypatch):
    """They walk over every gap: asked a hundred times a step, a heap of many made a step take half a minute."""
    asked, kib = [], 1024
    with process_memory.following_live_buffers() as gaps:
        libc = gaps._libc
        gaps.fill()  # so that what follows stands side by side
        blocks = [libc.malloc(30 * kib) for _ in range(400)]
        for number, block in enumerate(blocks):
            if number % 4:
                libc.free(block)  # leaves gaps of 90 KiB

        class Counted:
            def __getattr__(self, name):
                asked.append(name)
                return getattr(libc, name)

        def mapped(size: int) -> bool:
            block = libc.malloc(size)
            try:
                return process_memory._is_mapped(block)
            finally:
                libc.free(block)

        assert not mapped(50 * kib)
        monkeypatch.setattr(gaps, "_libc", Counted())
        assert gaps.fill() >= 50 * 90 * kib
        assert mapped(50 * kib)
        assert asked.count("mallinfo2") == 1
        monkeypatch.undo()
        for block in blocks[::4]:
            libc.free(block)


def test_another_c_library_is_named(monkeypatch):
    monkeypatch.setattr(process_memory, "_libc", lambda: object().mallinfo2)
    if sys.platform == "linux":
        assert "glibc" in process_memory.reason_unknown()


def test_on_cuda_the_allocator_is_asked(monkeypatch):
    calls = []
    for name, answer in (
        ("synchronize", None),
        ("memory_allocated", 3),
        ("max_memory_allocated", 7),
        ("reset_peak_memory_stats", None),
    ):
        monkeypatch.setattr(
            torch.cuda, name, lambda _, name=name, answer=answer: calls.append(name) or answer
        )
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats",
        lambda _: {"allocated_bytes.all.current": 5, "reserved_bytes.all.peak": 9},
    )
    gauge = gauge_of(torch.device("cuda:0"))
    assert isinstance(gauge, CudaGauge)
    with gauge.ready() as gaps:
        assert gaps is None
        assert gauge.read() == (3, 7)
    # The peak is read before it starts anew, once the device has done what it was asked.
    assert calls == ["synchronize", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"]
    assert gauge.details() == {
        "allocated": 5,
        "max allocated": 0,
        "cached": 0,
        "max cached": 9,
        "inactive": 0,
        "max inactive": 0,
    }


# ---- tensors and records -------------------------------------------------------------------------------------------


def test_a_storage_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("view", self.embedding.weight.detach()[:2])
            self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))

    model = Tied()
    optimizer = torch.optim.SparseAdam(model.parameters())
    indices, values = torch.tensor([[1, 2]]), torch.ones(2, 4)
    model.head.weight.grad = torch.sparse_coo_tensor(indices, values, (10, 4), check_invariants=True)
    known = known_bytes(model, [optimizer], CPU)
    assert known == Known(parameters=160, buffers=5, gradients=2 * 8 + 8 * 4, optimizer=0)
    assert known_bytes(model, [], torch.device("meta")).total == 0


def measurement():
    """Two steps of a model whose peak is in backward."""
    known = Known(100, 10, 0, 200)
    phases = (
        PhasePeak("forward", 1000, 1500, 1400),
        PhasePeak("backward", 1400, 1700, 1100),
        PhasePeak("optimizer", 1100, 1150, 1100),
    )
    step = StepMemory(1000, 1700, phases, known, (known,) * 3, 100, {})
    other = StepMemory(1010, 1690, phases, known, (known,) * 3, 100, {})
    return MemoryMeasurement((step, other), "ort", {"memory_level": 0}, "resident set", "cpu", 3)


def test_figures_are_of_the_step_with_the_highest_rise():
    record = measurement()
    assert (record.start_bytes, record.peak_bytes, record.rise_bytes, record.spread_bytes) == (
        1000,
        1700,
        700,
        20,
    )
    assert record.typical_rise_bytes == 690
    assert record.saved_bytes == 400
    assert {piece.name: piece.number_of_bytes for piece in record.breakdown()} == {
        "parameters": 100,
        "buffers": 10,
        "gradients": 0,
        "optimizer state": 200,
        "saved activations and outputs": 400,
        "temporaries of the backward": 300,
        "libraries and the rest": 690,
    }
    assert record.table()["bytes"].sum() == record.peak_bytes


def test_what_the_forward_leaves_holds_the_named_activations_only_where_it_is_more():
    less, more = (replace(measurement(), named_activations_bytes=named) for named in (390, 410))
    page = " ".join(text.render(less).split())
    assert "behind (measured). Of that, lab.activations() names 390 B (worked out from shapes)." in page
    page = " ".join(text.render(more).split())
    assert "lab.activations() names 410 B (worked out from shapes): more, since buffers also lie" in page


def test_a_measurement_is_json_and_back():
    import json

    record = measurement()
    assert MemoryMeasurement.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_what_lies_between_phases_has_the_peak_only_above_them():
    known = Known(0, 0, 0, 0)
    forward = PhasePeak("forward", 0, 100 * MIB, 100 * MIB)
    between = PhasePeak("the rest", 100 * MIB, 100 * MIB + 4096, 100 * MIB)
    step = StepMemory(0, 100 * MIB + 4096, (forward, between), known, (known, known), 0, {})
    assert step.highest is forward
    above = PhasePeak("the rest", 100 * MIB, 164 * MIB, 100 * MIB)
    assert StepMemory(0, 164 * MIB, (forward, above), known, (known, known), 0, {}).highest is above


# ---- phases of a run, and ORTModule's log --------------------------------------------------------------------------

LOG = (Path(__file__).parents[2] / "docs" / "memory_phases_2023.txt").read_text(encoding="utf-8").rstrip()
"""What upstream's guidelines show of a run on eight GPUs (the observer that was added there with #16213)."""


@pytest.mark.row("E6")
def test_the_golden_log_is_read_and_written_back():
    phases = MemoryPhases.read(f"some line before\n{LOG}\n  0%|    | 1/200 [00:26<1:26:18, 26.02s/it]")
    assert phases.log("[0/8] ") == LOG
    assert phases.steps == (1, 2)
    assert [one.sizes["allocated"] // MIB for one in phases.readings] == [
        1866, 23277, 23277, 2932, 2356, 23767, 23767, 3422,
    ]  # fmt: skip
    assert phases.readings[-1].sizes["max allocated"] == 26705 * MIB
    assert phases.readings[-1].sizes["max cached"] == 29342 * MIB
    assert phases.names == ("allocated", "max allocated", "cached", "max cached", "inactive", "max inactive")
    assert phases.table().shape == (8, 8)


def test_the_log_of_one_line_and_of_1_17_are_read():
    whole = MemoryPhases.read(" ".join(LOG.splitlines()))
    assert whole.log("[0/8] ") == LOG
    later = "rank-0 step 3 memory (MiB) | phase: pre_forward | allocated: 5 | param: 7 | grad: 0 | buffer: 2"
    assert MemoryPhases.read(later).log("rank-0 ") == later


def test_a_text_without_statistics_is_refused():
    with pytest.raises(OptionError, match="no line") as refusal:
        MemoryPhases.read("step 0: <b>loss</b> 3.1")
    assert refusal.value.fix


def test_steps_are_read_as_upstream_reads_them():
    assert [step - 1 for step in range(1, 70) if is_read(step)] == [*range(10), 16, 32, 64]


# ---- pages and figures ---------------------------------------------------------------------------------------------


def test_pages_say_what_was_measured():
    page = text.render(measurement())
    assert "700 B above its start" in page
    assert "in the backward" in page
    assert "saved activations and outputs" in page
    assert "computed" in page
    assert "resident set, this process" in page
    phases = text.render(MemoryPhases.read(LOG))
    assert "22.7 GiB" in phases
    assert "max cached" in phases
    assert "print_memory_stats" in text.render(MemoryPhases((), "run 3"))
    drawn = html.render(MemoryPhases.read(LOG)) + html.render(measurement())
    assert drawn.count("data:image/svg+xml") == 2


@pytest.mark.parametrize("record", [measurement(), MemoryPhases.read(LOG), MemoryPhases(())])
def test_figures_can_be_saved(record, tmp_path):
    target = tmp_path / "memory.svg"
    ortlab.plot(record).savefig(target)
    assert "<svg" in target.read_text(encoding="utf-8")
