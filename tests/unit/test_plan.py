"""A memory plan is evaluated for other batches, says what it does not know, and is written to files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ortlab.errors import OptionError
from ortlab.memory import formulas
from ortlab.memory.dialects import sentence
from ortlab.memory.plan import merged
from ortlab.memory.plan_reading import read_plan, with_measured_density
from ortlab.options.options import Options
from ortlab.records.density import LABEL, Density, DensityRow
from ortlab.records.runs import Run
from ortlab.render import text

SYMBOLS = {
    "input_ids_dim0": 2,
    "input_ids_dim1": 16,
    "labels_dim0": 2,
    "labels_dim1": 16,
    "valid_indices_count_0": 8,
}
SAVINGS = {
    "Gelu+:1:-1": ("((input_ids_dim0)*(128)*(input_ids_dim1)) * 4 * 1.000000", 3),
    "LayerNormalization+:1:-1": ("64.0*valid_indices_count_0", 1),
    "Slice+:1:-1": ("8*empty_dim_param0*empty_dim_param1", 1),
    "Reshape+:1:-1": ("labels_dim0*8", 1),
}
TOTALS = {"valid_indices_count_0": "labels_dim0*labels_dim1"}


@pytest.fixture
def plan():
    return read_plan(SAVINGS, SYMBOLS, "", label_totals=TOTALS)


def saving(plan):
    return {row.cluster: row.saving_bytes for row in plan.rows}


# ---- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("((a)*(128)) * 4 * 1.000000", 1536),
        ("640.0*a*b**2", 640 * 3 * 16),
        ("a*(384.0*b - 64.0)", 3 * (384 * 4 - 64)),
        ("-a**2 + 2*-b", -17),
        ("floor(a/2) + ceiling(a/2)", 3),
        ("Max(a, b, 1) - Min(a, b)", 1),
        ("Mod(b, a) + b//a + b % a", 3),
        ("1e3*a", 3000),
    ],
)
def test_arithmetic_is_evaluated_exactly_and_simplified_to_the_same(formula, value):
    read = formulas.read(formula)
    assert read.value({"a": 3, "b": 4}) == value
    assert formulas.read(read.simplified).value({"a": 3, "b": 4}) == value
    assert read.value({"b": 4}) is None or "a" not in read.symbols


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch ran')",
        "print(a)",
        "a.real(1)",
        "open(a)",
        "[a for a in (1,)]",
        "lambda: 1",
        "a if a else 1",
        "a = 1",
        "9**9**9",
        "(2**16)**17",
        "1/0",
        "",
        "a b",
        "((a)",
        "floor(1, 2)",
        "(" * 200 + "a" + ")" * 200,
        "9" * 5000,
        "a" * 2_000_000,
    ],
)
def test_what_is_no_arithmetic_is_refused_and_nothing_of_it_runs(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as caught:
        formulas.read(text).value({"a": 3})
    assert len(str(caught.value)) < 400
    assert not list(tmp_path.iterdir())


def test_a_sum_of_ten_thousand_places_is_read():
    assert formulas.read(" + ".join(["((a)*(4)) * 4"] * 10_000)).value({"a": 3}) == 480_000


# ---- another batch ---------------------------------------------------------------------------------------------------


@pytest.mark.row("F15")
def test_a_plan_is_evaluated_for_another_batch(plan):
    assert saving(plan)["Gelu+"] == 2 * 128 * 16 * 4
    again = plan.at(batch=16)
    assert saving(again)["Gelu+"] == 16 * 128 * 16 * 4
    assert saving(again) == saving(plan.at(input_ids_dim0=16, labels_dim0=16))
    assert again.symbols["labels_dim0"] == 16
    assert saving(plan.at(batch=4, sequence=32))["Gelu+"] == 4 * 128 * 32 * 4
    assert saving(plan)["Gelu+"] == 2 * 128 * 16 * 4
    assert plan.at() == plan


def test_rows_are_sorted_anew_and_ties_by_name(plan):
    few = plan.at(input_ids_dim0=1, input_ids_dim1=1, labels_dim0=1000)
    assert [row.cluster for row in few.rows] == ["LayerNormalization+", "Reshape+", "Gelu+", "Slice+"]
    reverse = read_plan(dict(reversed(SAVINGS.items())), SYMBOLS, "", label_totals=TOTALS)
    assert reverse.rows == plan.rows
    alike = {f"{name}+:1:-1": ("4*labels_dim0", 1) for name in "CAB"}
    assert [row.cluster for row in read_plan(alike, SYMBOLS, "").rows] == ["A+", "B+", "C+"]


def test_what_a_step_has_shown_does_not_hold_for_another_batch(plan):
    priced = replace(
        plan,
        rows=tuple(
            replace(row, peak_saving_bytes=1.0, cost_ms=1.0, measured_cost_ms=1.0) for row in plan.rows
        ),
        order_saving_bytes=1.0,
    )
    assert priced.at(batch=3).order_saving_bytes is None
    for row in priced.at(batch=3).rows:
        assert row.peak_saving_bytes is row.cost_ms is row.measured_cost_ms is row.bytes_per_ms is None


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"input_id_dim0": 4}, "Did you mean 'input_ids_dim0'"),
        ({"batch": 0}, "whole number"),
        ({"batch": -1}, "whole number"),
        ({"batch": 2.5}, "whole number"),
        ({"batch": True}, "whole number"),
        ({"input_ids_dim0": "4"}, "whole number"),
        ({"batch": 4, "input_ids_dim0": 5}, "given twice"),
        ({"label_density": 1.5}, "from 0 to 1"),
        ({"label_density": "a"}, "from 0 to 1"),
    ],
)
def test_a_wrong_size_is_explained(plan, sizes, says):
    with pytest.raises(OptionError, match=says):
        plan.at(**sizes)


def test_a_batch_that_cannot_be_told_is_asked_for():
    plan = read_plan({"Gelu+:1:-1": ("a_dim0*b_dim0", 1)}, {"a_dim0": 2, "b_dim0": 3}, "")
    with pytest.raises(OptionError, match=r"a_dim0 = 2, b_dim0 = 3"):
        plan.at(batch=4)
    with pytest.raises(OptionError, match="sequence"):
        plan.at(sequence=4)
    assert plan.at(a_dim0=4).rows[0].saving_bytes == 12


def test_the_label_density_of_the_first_batch_is_kept_and_another_can_be_given(plan):
    assert saving(plan)["LayerNormalization+"] == 64 * 8
    doubled = plan.at(batch=4)
    assert saving(doubled)["LayerNormalization+"] == 64 * 16
    assert doubled.origins["valid_indices_count_0"] == "label density 25.0%, that of the first batch"
    thin = plan.at(label_density=0.15)
    assert thin.symbols["valid_indices_count_0"] == round(0.15 * 32)
    assert thin.origins["valid_indices_count_0"] == "label density 15.0%, given"
    assert "label density 15.0%, given" in text.render(thin)
    assert saving(plan.at(valid_indices_count_0=32))["LayerNormalization+"] == 64 * 32
    with pytest.raises(OptionError, match="changes nothing"):
        read_plan({"Gelu+:1:-1": ("4", 1)}, {}, "").at(label_density=0.1)


def test_a_label_density_that_a_run_has_measured_resolves_what_the_batch_does_not_tell():
    run = Run(
        1,
        "ort",
        Options(),
        (),
        None,
        None,
        "",
        "cpu",
        "start",
        "data",
        seed=2,
        started_at="2026-11-21T20:00:00",
    )
    counted = Density(
        (DensityRow(1, LABEL, "labels", -100, 12, 32), DensityRow(2, LABEL, "labels", -100, 4, 32))
    )
    sizes = {name: size for name, size in SYMBOLS.items() if name != "valid_indices_count_0"}
    plan = read_plan(SAVINGS, sizes, "", label_totals=TOTALS)
    assert saving(plan)["LayerNormalization+"] is None
    assert with_measured_density(plan, [run]) == plan
    found = with_measured_density(plan, [run, replace(run, number=7, density=counted)])
    assert saving(found)["LayerNormalization+"] == 64 * 8
    assert found.origins["valid_indices_count_0"] == "label density 25.0%, measured in run 7"
    assert "measured in run 7" in text.render(found)


def test_a_count_of_labels_is_not_carried_over_to_a_batch_that_it_is_not_of():
    plan = read_plan(SAVINGS, SYMBOLS, "")
    assert saving(plan)["LayerNormalization+"] == 512
    assert saving(plan.at(batch=4))["LayerNormalization+"] is None
    with pytest.raises(OptionError, match="cannot be worked out"):
        plan.at(label_density=0.5)


@pytest.mark.row("F15", "T16")
def test_what_has_no_value_is_unresolved_and_never_a_zero_among_others(plan):
    last = plan.rows[-1]
    assert (last.cluster, last.saving_bytes) == ("Slice+", None)
    assert last.unresolved == plan.unresolved == ("empty_dim_param0", "empty_dim_param1")
    written = text.render(plan)
    assert "Not in the order of savings" in written
    assert "empty_dim_param0" in written
    known = plan.at(empty_dim_param0=100, empty_dim_param1=1000)
    assert known.rows[0].cluster == "Slice+"
    assert not known.unresolved


def test_plans_of_parts_are_evaluated_together():
    encoder = read_plan(
        {"Gelu+:1:-1": ("4*x_dim0", 2)}, {"x_dim0": 2}, "", enabled=("Gelu+:1:-1",), applied={"Gelu+:1": 2}
    )
    decoder = read_plan(
        {"Gelu+:1:-1": ("8*y_dim0*y_dim1", 1)}, {"y_dim0": 3, "y_dim1": 5}, "", applied={"Gelu+:1": 1}
    )
    both = merged({"encoder": encoder, "decoder": decoder}, missing=("head",))
    (row,) = both.rows
    assert (row.saving_bytes, row.frequency, row.parts) == (8 + 120, 3, ("encoder", "decoder"))
    again = both.at(batch=10)
    assert again.rows[0].saving_bytes == 40 + 400
    assert again.missing == ("head",)
    assert both.at(y_dim1=1).rows[0].saving_bytes == 8 + 24
    assert both.at(sequence=1).rows[0].saving_bytes == 8 + 24
    with pytest.raises(OptionError, match="Did you mean 'y_dim1'"):
        both.at(y_dim7=1)
    json.dumps(both.to_dict())


# ---- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.row("F19")
@pytest.mark.parametrize(
    ("cluster", "strategy", "frequency", "layers", "says"),
    [
        ("Gelu+", 1, 12, 12, "Recompute GELU in 12 layers instead of keeping it."),
        ("Gelu+", 1, 1, None, "Recompute GELU in 1 place instead of keeping it."),
        (
            "FusedMatMul+Add+Reshape+Transpose+",
            1,
            9,
            3,
            "Recompute matmul, addition, reshape and transpose in 9 places of 3 layers instead of keeping it.",
        ),
        (
            "Cast+",
            2,
            1,
            None,
            "Recompute cast in 1 place instead of keeping it; that saves a part",
        ),
        ("NeverHeardOf+", 1, 2, None, "Recompute NeverHeardOf in 2 places"),
    ],
)
def test_each_plan_is_one_plain_sentence(cluster, strategy, frequency, layers, says):
    assert sentence(cluster, strategy, frequency, layers).startswith(says)
    (row,) = read_plan({f"{cluster}:{strategy}:-1": ("4", frequency)}, {}, "").rows
    assert row.strategy == strategy


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("F12")
def test_plans_are_saved_in_each_dialect(plan, tmp_path):
    enabled = read_plan(SAVINGS, SYMBOLS, "", enabled=("Gelu+:1:-1", "Reshape+:1:-1"))
    assert json.loads(enabled.save(tmp_path / "plans.json").read_text()) == ["Gelu+:1:-1", "Reshape+:1:-1"]
    assert enabled.save(tmp_path / "p", dialect="2023").read_text().strip() == "Gelu+:1:-1,Reshape+:1:-1"
    assert enabled.save(tmp_path / "p", dialect="2022").read_text().strip() == "Gelu:1,Reshape:1"
    assert plan.save(tmp_path / "q", plans=["Gelu+:1:-1"]).exists()
    for wrong in ({"dialect": "2025"}, {"dialect": "2022", "plans": ["Gelu+:1:3"]}):
        with pytest.raises(OptionError):
            enabled.save(tmp_path / "absent.json", **wrong)
    with pytest.raises(OptionError, match="no plan to write"):
        plan.save(tmp_path / "absent.json")
    with pytest.raises(OptionError, match="cannot be written"):
        enabled.save(tmp_path / "no folder" / "plans.json")
    assert not (tmp_path / "absent.json").exists()
