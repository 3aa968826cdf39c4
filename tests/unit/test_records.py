"""Runs, ledger, comparison and memory plan as plain records."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

import ortlab
from ortlab.errors import LedgerError
from ortlab.memory.formulas import read
from ortlab.memory.plan_reading import read_plan
from ortlab.options.options import Options
from ortlab.records.comparison import compare
from ortlab.records.runs import Initialization, Ledger, PeakMemory, Run, Step

MIB = 1 << 20


def run(
    number=1,
    *,
    times=(50.0, 10.0, 11.0, 12.0, 10.5),
    executed_by="ort",
    losses=None,
    optimizer_ms=1.0,
    **changes,
):
    losses = losses or [2.0 / (index + 1) for index in range(len(times))]
    steps = tuple(
        Step(time, time * 0.4, time * 0.4, optimizer_ms, 400.0 if index == 0 else 0.0, loss, executed_by)
        for index, (time, loss) in enumerate(zip(times, losses, strict=True))
    )
    record = Run(
        number=number,
        engine="ort",
        options=Options(memory_level=1),
        steps=steps,
        initialization=Initialization("export", 300.0, 1.0, 0.0, 20.0, 50.0, 400.0),
        memory=PeakMemory(100, 300, "resident set"),
        fallback_reason="",
        device="cpu",
        start_digest="s",
        data_digest="d",
        seed=7,
        started_at="2026-01-01T00:00:00+00:00",
        versions={"torch": "2.13.0"},
    )
    return dataclasses.replace(record, **changes)


def test_statistics_leave_the_first_step_out():
    assert run().step_ms == 10.75
    assert run(times=(50.0,)).step_ms == 50.0
    assert run().steps[1].other_ms == pytest.approx(1.0)


def test_a_title_names_what_differs_and_what_fell_back():
    assert run().title == "#1 ort (memory_level=1)"
    assert run(options=Options()).title == "#1 ort"
    assert (
        run(options=Options(memory_plan="Gelu+:1:-1,Cast+:1:2")).title
        == "#1 ort (memory_plan=Gelu+:1:-1,Cast+:1:2)"
    )
    assert run(executed_by="fallback").title.startswith("#1 PyTorch (fallback)")


def test_one_fallback_step_makes_the_run_a_fallback():
    steps = (*run().steps, *run(executed_by="fallback").steps[:1])
    assert run(steps=steps).executed_by == "fallback"


def test_a_run_survives_json(tmp_path):
    record = json.loads(json.dumps(run().to_dict()))
    assert Run.from_dict(record) == run()
    assert ortlab.load(run().save(tmp_path / "run.json")) == run()


@pytest.mark.parametrize(
    "damage", [{"schema": 99}, {"steps": [{"total_ms": 1}]}, {"unknown": 1}], ids=["schema", "step", "field"]
)
def test_a_damaged_record_is_refused(damage):
    with pytest.raises(LedgerError):
        Run.from_dict({**run().to_dict(), **damage})


def test_a_run_of_the_former_layout_is_still_read():
    record = run(2).to_dict()
    for name in ("step_memory_bytes", "no_step_memory", "others_cores"):
        del record[name]
    for step in record["steps"]:
        del step["page_faults"], step["swapped_pages"]
    found = Run.from_dict({**json.loads(json.dumps(record)), "schema": 1})
    assert found.steps == run(2).steps
    assert found.step_memory_bytes is None
    assert "did not measure it" in found.no_step_memory


def test_a_ledger_survives_a_file(tmp_path):
    ledger = Ledger([run(1, step_memory_bytes=5, others_cores=0.5), run(2)])
    assert list(Ledger.load(ledger.save(tmp_path / "ledger.json"))) == list(ledger)
    assert ledger.next_number == 3
    assert ledger.run(2) is ledger[1]
    with pytest.raises(LedgerError, match=r"no run 5[\s\S]*1, 2"):
        ledger.run(5)
    (tmp_path / "other.json").write_text("{}")
    for wrong in ("other.json", "absent.json"):
        with pytest.raises(LedgerError):
            Ledger.load(tmp_path / wrong)


def test_the_ledger_table_has_a_row_per_run():
    table = Ledger([run(1), run(2, initialization=None, memory=None)]).table()
    assert list(table["run"]) == [1, 2]
    assert list(table["initialisation [ms]"]) == [400.0, 0.0]
    assert table["step [ms]"][0] == 10.75


def test_a_clear_difference_is_called_one_and_noise_is_not():
    base = run(1, times=(50.0, 10.0, 10.1, 9.9, 10.0, 10.05, 9.95))
    fast = run(2, times=(50.0, 8.0, 8.1, 7.9, 8.0, 8.05, 7.95))
    same = run(3, times=(50.0, 10.3, 9.7, 10.0, 10.2, 9.8, 10.1))
    contrasts = compare([base, fast, same]).contrasts
    assert [contrast.verdict for contrast in contrasts] == ["faster", "no difference shown"]
    assert contrasts[0].time_ratio == pytest.approx(0.8)
    assert contrasts[0].time_low <= 0.8 <= contrasts[0].time_high < 0.85
    assert compare([base, fast], baseline=fast).contrasts[0].verdict == "slower"


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    import numpy as np

    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(60):
        a = (9.0, *generator.normal(10.0, 1.0, 30))
        b = (9.0, *generator.normal(12.0, 1.0, 30))
        contrast = compare([run(1, times=a), run(2, times=b)]).contrasts[0]
        covered += contrast.time_low <= 1.2 <= contrast.time_high
    assert covered >= 51  # of 60; 95 % nominal, a percentile bootstrap of medians is a little narrow


def test_too_few_steps_give_no_interval():
    contrast = compare([run(1, times=(50.0, 10.0, 11.0)), run(2)]).contrasts[0]
    assert math.isnan(contrast.time_low)
    assert contrast.verdict == "too few steps to tell"


def test_a_comparison_says_what_is_not_comparable():
    other = run(
        2,
        executed_by="fallback",
        fallback_reason="no symbolic",
        start_digest="t",
        data_digest="e",
        device="cuda:0",
        times=(50.0, 10.0, 11.0, 12.0),
    )
    remarks = "; ".join(compare([run(), other]).contrasts[0].remarks)
    for part in (
        "executed by PyTorch, not ORT: no symbolic",
        "other start",
        "other data",
        "5 and 4",
        "other device",
    ):
        assert part in remarks or "4 and 5" in remarks


def test_memory_of_another_device_is_not_divided():
    base = run(step_memory_bytes=100 * MIB)
    cuda = run(2, step_memory_bytes=50 * MIB, device="cuda:0")
    unknown = run(3, no_step_memory="It was not asked for.")
    same = run(4, step_memory_bytes=50 * MIB)
    ratios = [contrast.memory_ratio for contrast in compare([base, cuda, unknown, same]).contrasts]
    assert ratios == [None, None, 0.5]


def test_comparing_needs_two_runs():
    with pytest.raises(LedgerError, match="no run"):
        compare([])
    with pytest.raises(LedgerError, match="only one run"):
        compare([run()])


# --- memory plans ------------------------------------------------------------------------------------------------

# The table of the upstream change that introduced the plans, at 1 x 1024 (reference row F14).
REFERENCE = {
    "Reshape+Where+BiasSoftmax+:1:-1": ("640.0*inputs_input_ids_dim0*inputs_input_ids_dim1**2", 671_088_640),
    "Cast+:1:-1": (
        "inputs_input_ids_dim0*inputs_input_ids_dim1*(384.0*inputs_input_ids_dim1 - 64.0)",
        402_587_648,
    ),
    "Reshape+Where+:1:-1": ("128.0*inputs_input_ids_dim0*inputs_input_ids_dim1**2", 134_217_728),
    "BiasSoftmax+:1:-1": (
        "128.0*inputs_input_ids_dim0*inputs_input_ids_dim1*(inputs_input_ids_dim1 - 1)",
        134_086_656,
    ),
    "BiasGelu+:1:-1": ("inputs_input_ids_dim0*(122880.0*inputs_input_ids_dim1 - 20480.0)", 125_808_640),
}
SYMBOLS = {"inputs_input_ids_dim0": 1, "inputs_input_ids_dim1": 1024}


@pytest.mark.row("F13")
@pytest.mark.parametrize("config", REFERENCE)
def test_the_reference_savings_are_reproduced(config):
    formula, expected = REFERENCE[config]
    assert read(formula).value(SYMBOLS) == expected


def test_plans_are_sorted_and_marked():
    savings = {config: (formula, 5) for config, (formula, _) in reversed(REFERENCE.items())}
    plan = read_plan(savings, SYMBOLS, "report", enabled=("BiasGelu+:1:3",))
    assert [row.config for row in plan.rows] == list(REFERENCE)
    assert plan.enabled == ("BiasGelu+:1:-1",)
    assert plan.rows[-1].sentence == "Recompute GELU and its bias in 5 places instead of keeping it."
    assert list(plan.table()["predicted saving [bytes]"]) == [float(size) for _, size in REFERENCE.values()]
    assert json.loads(json.dumps(plan.to_dict()))["symbols"] == SYMBOLS


@pytest.mark.row("F20")
def test_a_level_enables_the_plans_of_its_strategy():
    savings = {"Gelu+:1:-1": ("8*a", 1), "Cast+:2:-1": ("4*a", 1)}
    levels = [read_plan(savings, {"a": 1}, "", memory_level=level).enabled for level in (0, 1, 2)]
    assert levels == [(), ("Gelu+:1:-1",), ("Gelu+:1:-1", "Cast+:2:-1")]


def test_an_unknown_symbol_leaves_the_saving_open():
    formula = read("256.0*valid_indices_count_0")
    assert formula.value({"a": 1}) is None
    assert formula.simplified == "256*valid_indices_count_0"
