"""When "faster" and "slower" are said of runs: in turns, or where a control shows that the machine did not drift."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ortlab.options.options import Options
from ortlab.records.comparison import compare
from ortlab.records.runs import Run, Step
from ortlab.records.verdicts import (
    FASTER,
    LESS_MEMORY,
    MORE_MEMORY,
    NO_DIFFERENCE,
    NOT_COMPARABLE,
    SLOWER,
    TOO_FEW,
    UNSTEADY,
    compare_times,
    memory_verdict,
    never_settled,
    settled,
    times_of_pytorch,
)
from ortlab.render import text
from ortlab.render.result_card import result_card

MIB = 1 << 20


def made(times, number=1, *, optimizer=20.0, faults=0, swapped=0, **changes) -> Run:
    """Make a run of these step times in ms; optimizer and faults are of every step, or one for each."""
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer] * len(times)
    pages = faults if isinstance(faults, (list, tuple)) else [faults] * len(times)
    steps = tuple(
        Step(time, 0.3 * time, 0.5 * time, spent, 0.0, 1.0, "ort", None, page, swapped)
        for time, spent, page in zip(times, optimizers, pages, strict=True)
    )
    record = Run(
        number=number,
        engine="ort",
        options=Options(),
        steps=steps,
        initialization=None,
        memory=None,
        fallback_reason="",
        device="cpu",
        start_digest="s",
        data_digest="d",
        seed=7,
        started_at="2026-01-01T00:00:00+00:00",
        optimizers=("AdamW",),
        others_cores=0.02,
    )
    return dataclasses.replace(record, **changes)


def around(middle: float, spread: float, seed: int, count: int = 21) -> list[float]:
    return list(middle * (1 + spread * np.random.default_rng(seed).standard_normal(count)))


# REVIEW 7: the same switches twice, once on a machine that was busy. The optimizer's step took 453 ms and 20.7 ms.


def test_a_busy_machine_makes_nothing_faster():
    busy = made(around(4100.0, 0.3, 1), 1, optimizer=around(453.0, 0.2, 2))
    idle = made(around(490.0, 0.03, 3), 2, optimizer=around(20.7, 0.03, 4))
    found = compare([busy, idle])
    contrast = found.contrasts[0]
    assert contrast.time_ratio < 0.15
    assert contrast.verdict == NOT_COMPARABLE
    assert "the optimizer's step, the same code in both" in contrast.time.reason
    assert "lab.compare(rerun=True)" in found.summary
    assert " ".join(text.render(found).split()).count("the same code in both") == 1


def test_a_machine_that_did_not_drift_gives_a_verdict():
    base = made(around(500.0, 0.02, 1), 1, optimizer=around(20.0, 0.02, 2))
    slow = made(around(600.0, 0.02, 3), 2, optimizer=around(20.1, 0.02, 4))
    assert compare([base, slow]).contrasts[0].verdict == SLOWER
    assert compare([slow, base]).contrasts[0].verdict == FASTER


def test_a_drift_that_the_control_allows_is_no_effect_of_a_switch():
    base = made(around(500.0, 0.01, 1), 1, optimizer=around(20.0, 0.01, 2))
    drifted = made(around(530.0, 0.01, 3), 2, optimizer=around(21.2, 0.01, 4))
    assert compare([base, drifted]).contrasts[0].verdict == NO_DIFFERENCE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer": 0.0}, "no optimizer's step"),
        ({"optimizers": ("SGD",)}, "different optimizers"),
        ({"others_cores": 0.9}, "other programs used 0.9 of"),
        ({"swapped": 400}, "the machine swaps"),
        ({"optimizer": [5.0, 80.0] * 10 + [20.0]}, "too unsteady to tell how fast"),
    ],
)
def test_without_a_control_there_is_no_verdict(changes, reason, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    base, other = made(around(500.0, 0.02, 1), 1), made(around(300.0, 0.02, 3), 2, **changes)
    found = compare([base, other]).contrasts[0]
    assert found.verdict == NOT_COMPARABLE
    assert reason in found.time.reason
    assert found.time_low < 0.6 < found.time_high + 0.02  # the numbers are there all the same


def test_few_steps_have_no_interval():
    found = compare_times([made([10.0, 10.0])], [made([9.0, 9.0])])
    assert (found.verdict, math.isnan(found.low)) == (TOO_FEW, True)


def test_a_turn_counts_from_where_page_faults_have_settled():
    # As measured of eager in turns with ORT: its heap was trimmed in the other's turn.
    run = made([2400.0, 1870.0, 1137.0, 897.0, 900.0, 893.0], faults=[200_000, 104_802, 15_968, 0, 12, 0])
    assert [step.total_ms for step in settled(run)] == [897.0, 900.0, 893.0]
    steady = made([50.0] * 6, faults=[70_000, 21_216, 61_056, 21_000, 60_000, 22_000])
    assert len(settled(steady)) >= 3
    assert len(settled(made([50.0] * 6, faults=[None] * 6))) == 5


def in_turns(
    ratio: float, *, drift: float = 0.0, noise: float = 0.01, rounds: int = 6, seed: int = 0, within=0.02
):
    """Make the runs of two configurations in turns on a machine that grows slower by `drift` in each round."""
    generator = np.random.default_rng(seed)
    sides: tuple[list[Run], list[Run]] = ([], [])
    for number in range(rounds):
        speed = 100.0 * (1 + drift * number)
        for side, factor in zip(sides, (1.0, ratio), strict=True):
            middle = speed * factor * (1 + noise * generator.standard_normal())
            times = middle * (1 + within * generator.standard_normal(8))
            side.append(made(list(times), sweep=1, optimizer=0.0, others_cores=1.5))
    return sides


def test_a_drift_meets_both_sides_of_a_round():
    base, other = in_turns(1.2, drift=0.5)
    found = compare_times(base, other)
    assert found.in_turns
    assert found.verdict == SLOWER
    assert 1.15 < found.low < 1.2 < found.high < 1.25


def test_equal_settings_in_turns_are_silent():
    verdicts = [
        compare_times(*in_turns(1.0, drift=0.2, noise=noise, seed=seed)).verdict
        for noise in (0.005, 0.02, 0.05)
        for seed in range(40)
    ]
    assert not {FASTER, SLOWER} & {*verdicts}


def test_a_difference_below_the_margin_gets_no_word_however_sure():
    assert compare_times(*in_turns(1.02, noise=0.0005, within=0.001)).verdict == NO_DIFFERENCE


def test_two_rounds_are_runs_one_after_another():
    base, other = in_turns(1.5, rounds=2)
    assert compare_times(base, other).verdict == NOT_COMPARABLE


# REVIEW 6 and 9: three plans take 38 % off what a step needs, and the peak of the process rises.


def test_memory_is_what_a_step_needs_and_never_the_process():
    from ortlab.records.runs import PeakMemory
    from ortlab.render import text

    plain = made(
        [10.0] * 9, 1, step_memory_bytes=104 * MIB, memory=PeakMemory(700 * MIB, 764 * MIB, "resident set")
    )
    plans = made(
        [11.0] * 9,
        2,
        options=Options(memory_level=1),
        step_memory_bytes=64 * MIB,
        memory=PeakMemory(730 * MIB, 797 * MIB, "resident set"),
    )
    found = compare([plain, plans])
    assert found.contrasts[0].memory == LESS_MEMORY
    assert found.contrasts[0].memory_ratio == pytest.approx(64 / 104)
    assert "needs 38 % less step memory" in found.summary
    page = text.render(found)
    assert "104 MiB" in page  # before and after stand side by side
    assert "64.0 MiB" in page
    assert "764" not in page
    assert "797" not in page


def test_memory_that_repeats_differ_by_is_the_same():
    assert memory_verdict(100 * MIB, 101 * MIB) == ""
    assert memory_verdict(5 * MIB, 5 * MIB + 900_000) == ""
    assert (memory_verdict(100 * MIB, 90 * MIB), memory_verdict(90 * MIB, 100 * MIB)) == (
        LESS_MEMORY,
        MORE_MEMORY,
    )
    assert memory_verdict(None, 5) == ""


def test_the_summary_can_be_quoted():
    base = made(around(500.0, 0.01, 1), 1, step_memory_bytes=100 * MIB)
    other = made(around(605.0, 0.01, 3), 2, step_memory_bytes=42 * MIB, options=Options(memory_level=1))
    assert compare([base, other]).summary.startswith(
        "Run 2 (memory_level=1) needs 58 % less step memory and 21 % more time (95 % interval 2"
    )
    fallen = tuple(dataclasses.replace(step, executed_by="fallback") for step in other.steps)
    assert "cannot be compared" in compare([base, dataclasses.replace(other, steps=fallen)]).summary


def test_a_short_step_is_remarked_on():
    from ortlab.render import text

    page = " ".join(text.render(compare([made([0.9] * 9), made([0.8] * 9, 2)])).split())
    assert "A step takes less than 2 ms, and much of that is Python's own time." in page
    assert "less than 2 ms" not in text.render(compare([made([9.0] * 9), made([8.0] * 9, 2)]))


def test_other_batches_and_steps_are_compared_and_said():
    base = made(around(500.0, 0.01, 1), 1)
    other = made(around(1000.0, 0.01, 2, count=11), 2, data_digest="e")
    contrast = compare([base, other]).contrasts[0]
    assert contrast.verdict == SLOWER
    assert contrast.remarks == (
        "other number of steps: 11 and 21",
    )  # the data of more steps are never the same
    as_many = made(around(1000.0, 0.01, 2), 2, data_digest="e")
    remarks = compare([base, as_many]).contrasts[0].remarks
    assert remarks == ("other data: the model did not see the same inputs",)


def test_a_wide_interval_around_equal_times_is_not_called_alike():
    wide = compare_times(*in_turns(1.0, noise=0.3, seed=5))
    assert wide.low < 0.9
    assert wide.high > 1.1
    assert wide.verdict == UNSTEADY
    assert compare_times(*in_turns(1.0, noise=0.005)).verdict == NO_DIFFERENCE


def test_what_takes_much_longer_than_pytorch_says_so_where_that_is_shown():
    ours, eager = made(around(160, 0.01, 1)), made(around(100, 0.01, 2), 2, engine="eager")
    forwards, backwards = compare([ours, eager]), compare([eager, ours])
    for found in (forwards, backwards):
        (slow,) = found.slow
        assert slow.run is ours
        assert slow.times == pytest.approx(1.6, abs=0.02)
        assert "lab.profile() says where a step's time goes." in " ".join(text.render(found).split())
        profiled = dataclasses.replace(found, spent={1: "LSTMGrad (93 %)"})
        for said in (text.render(profiled), result_card(profiled).sentence):
            words = " ".join(said.split())
            assert (
                f"takes {slow.times:.2f} times PyTorch's time. Most of its step goes to LSTMGrad (93 %)."
                in words
            )
    quick = made(around(110, 0.01, 1))
    assert not compare([quick, eager]).slow
    assert not compare([ours, made(around(100, 0.01, 2), 2)]).slow  # both are ONNX Runtime
    drifted = made(around(160, 0.01, 1), optimizer=40.0)
    assert compare([drifted, eager]).contrasts[0].verdict == NOT_COMPARABLE
    assert not compare([drifted, eager]).slow
    assert math.isnan(times_of_pytorch("eager", "ort", compare([drifted, eager]).contrasts[0].time))


def test_a_run_whose_page_faults_fall_until_its_end_says_so():
    falling = made(
        [900.0] * 9, faults=[800_000, 400_000, 200_000, 100_000, 50_000, 24_000, 12_000, 6_000, 2_000]
    )
    steady = made([900.0] * 9, number=2, faults=[200_000, 9_000, *[4_000] * 7])
    assert never_settled(falling)
    assert not never_settled(steady)
    assert not never_settled(made([900.0] * 3, faults=[90_000, 9_000, 0]))  # too few to tell
    found = compare([falling, steady])
    assert found.unsettled == (1,)
    assert "Page faults had not settled in run 1: some of its time" in " ".join(text.render(found).split())
    assert "Page faults had not settled" not in text.render(
        compare([steady, dataclasses.replace(steady, number=3)])
    )
