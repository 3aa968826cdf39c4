"""Old configurations and old logs are read completely."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlab.errors import OptionError
from ortlab.memory import dialects, formulas, insight, read_saved
from ortlab.memory.plan_reading import read_plan
from ortlab.options import variables
from ortlab.render import html
from ortlab.render import text as plain

LOGS = Path(__file__).with_name("logs")


def log(name: str) -> str:
    return (LOGS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "plans"),
    [
        ("Dropout:0,Gelu:1,Tile:0", ("Gelu+:1:-1",)),
        ("Gelu:1, Tile:1", ("Gelu+:1:-1", "Tile+:1:-1")),
        ("BiasGelu+:1:-1,Cast+:2:3", ("BiasGelu+:1:-1", "Cast+:2:3")),
        (
            '["BiasGelu+Dropout+:1:-1", "Cast+:1:-1,Add+:1:2"]',
            ("BiasGelu+Dropout+:1:-1", "Cast+:1:-1", "Add+:1:2"),
        ),
        ("", ()),
        ("[]", ()),
    ],
)
def test_each_dialect_is_read(text, plans):
    assert variables.read_plans(text) == plans


@pytest.mark.parametrize("text", ["Gelu", "Gelu:3", "Gelu+:1:-1;Add+:1:-1", '["Gelu+:1', "[1]", "<b>:1"])
def test_what_is_no_plan_is_named(text):
    with pytest.raises(OptionError) as caught:
        variables.read_plans(text)
    assert caught.value.fix


def test_plans_are_written_in_each_dialect():
    plans = ("Gelu+:1:-1", "Tile+:1:-1")
    for write in (dialects.write_alleviation, dialects.write_inline, dialects.write_json):
        assert variables.read_plans(write(plans)) == plans


@pytest.mark.parametrize("plan", ["Gelu+Add+:1:-1", "Cast+:2:-1", "Gelu+:1:3"])
def test_the_first_dialect_says_what_it_cannot_say(plan):
    with pytest.raises(OptionError, match="2022"):
        dialects.write_alleviation([plan])


@pytest.mark.row("F3", "F5")
@pytest.mark.parametrize(
    ("name", "places"),
    [("alleviation_gelu_2022", [1]), ("alleviation_deberta_2022", [48, 2, 48, 96, 2, 2])],
)
def test_both_alleviation_summaries_are_read(name, places):
    (summary,) = dialects.read_summaries(log(name))
    assert [kept.places for one in summary.subgraphs for kept in one.patterns] == places
    assert summary.complete


@pytest.mark.row("F4")
def test_the_deberta_summary_says_what_was_recomputed():
    (summary,) = dialects.read_summaries(log("alleviation_deberta_2022"))
    assert summary.types == (("Dropout", 0), ("Gelu", 1), ("Tile", 1))
    assert [one.config for one in summary.subgraphs if one.on] == ["BiasGelu+:1:-1", "Tile+:1:-1"]
    assert summary.subgraphs[0].patterns[0].shape == ("attention_mask1_dim0", "256", "6144")


@pytest.mark.row("F11", "F18")
def test_the_feature_matrix_is_read():
    matrix = dialects.read_matrix(log("feature_matrix_2023"))
    assert (len(matrix.features), len(matrix.plans), len(matrix.symbols)) == (9, 10, 6)
    assert matrix.start_up == dialects.StartUp(10.73, 8.39, 0.06, 0.01, 0.31, 1.96)
    assert matrix.versions == "ONNX Runtime - 1.16.0+cu118, ONNX - 1.11.0"


@pytest.mark.row("F14")
def test_every_plan_of_the_feature_matrix_re_evaluates_to_the_printed_bytes():
    matrix = dialects.read_matrix(log("feature_matrix_2023"))
    sizes = dict(matrix.symbols)
    again = [formulas.read(plan.saving_symbolic).value(sizes) for plan in matrix.plans]
    assert again == [plan.saving_bytes for plan in matrix.plans]
    assert again[0] == 671_088_640


@pytest.mark.row("F16")
def test_the_memory_insight_table_is_read():
    table = insight.read(log("memory_insight_2023"))
    options = [option for row in table.rows for option in row.options]
    assert (len(table.rows), len(options)) == (14, 15)
    assert [option.config for option in options if option.applied] == [
        "BiasGelu+:1:-1",
        "Cast+:2:-1",
        "BiasGelu+:1:-1",
    ]


def test_shapes_of_the_memory_insight_table_are_evaluated():
    table = insight.read(log("memory_insight_2023"))
    sizes = {"inputs_input_ids_dim0": 2, "inputs_input_ids_dim1": 8}
    savings = {config: formulas.read(total).value(sizes) for config, (total, _) in table.savings().items()}
    assert savings["Reshape+:1:-1"] == 2 * 2560 * 2
    # Two rows: three-dimensional in two places, and one whose first dimension is a product.
    assert savings["BiasGelu+:1:-1"] == 2 * (2 * 8 * 10240 * 2) + 2 * 7 * 10240 * 2
    assert savings["Cast+:2:-1"] == 2 * 8 * 4 / 2


@pytest.mark.row("F9")
def test_what_this_release_reports_is_read(lab, experiment):
    lab.step(experiment.step)
    report = lab.plan().report
    table = insight.read(report)
    assert table.complete
    assert {option.config for row in table.rows for option in row.options} == {
        row.config for row in lab.plan().rows
    }


@pytest.mark.parametrize("name", ["alleviation_deberta_2022", "memory_insight_2023"])
def test_a_log_that_is_cut_in_the_middle_says_so(name):
    text = log(name)
    assert dialects.read_log(text).complete
    cut = dialects.read_log(text[: len(text) // 2])
    assert not cut.complete
    assert cut.alleviations or cut.insight.rows


@pytest.mark.parametrize(
    "text", ["", "no table at all", "MemoryInsight Summary - User config: ", "|3 |>>Option 1"]
)
def test_a_text_without_tables_has_none(text):
    assert not dialects.read_log(text)


def test_a_whole_log_gives_every_table():
    both = dialects.read_log(log("feature_matrix_2023") + log("memory_insight_2023"))
    assert both.matrix.plans
    assert both.insight.rows
    assert not both.alleviations


# ---- everything that a file or a log says ----------------------------------------------------------------------------

LOGS_OF_OLD = {
    "alleviation_gelu_2022": ("2022", 1),
    "alleviation_deberta_2022": ("2022", 5),
    "feature_matrix_2023": ("2023", 10),
    "memory_insight_2023": ("2023", 12),
    "feature_matrix_2024": ("2024", 11),
}


@pytest.mark.row("F3", "F11", "F16")
@pytest.mark.parametrize("name", LOGS_OF_OLD)
def test_a_log_is_read_and_its_tables_are_kept_without_its_other_lines(name):
    saved = read_saved(LOGS / f"{name}.txt")
    assert (saved.dialect, len(saved.rows), saved.complete) == (*LOGS_OF_OLD[name], True)
    assert saved.source == f"{name}.txt"
    assert "first line" not in read_saved("first line\n" + log(name)).tables()
    again = read_saved(saved.tables())
    assert (again.rows, again.symbols, again.log) == (saved.rows, saved.symbols, saved.log)
    for row in saved.rows:
        assert row.printed_bytes in (None, row.saving_bytes)
        assert row.config in plain.render(saved)


def _prefixed(text, prefix):
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize("name", LOGS_OF_OLD)
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: _prefixed(text, "worker-0: "),
        lambda text: _prefixed(text, "[1,0]<stderr>:  "),
        lambda text: _prefixed(text, "[0/8] "),
        lambda text: _prefixed(text, "2022-09-06 04:51:54.202336019 | ERROR | rank-0 | "),
        lambda text: _prefixed(text, "\x1b[93m2023-09-13 13:25:09,249 [INFO]\x1b[0m "),
        lambda text: text.replace("        ", "\t"),
        lambda text: "first line\n" + text + "\nstep 1: loss=2.3, 5 x 3\n| epoch | 3 |\n",
    ],
)
def test_a_log_is_read_whatever_it_was_piped_through(name, change):
    plain_log = read_saved(LOGS / f"{name}.txt")
    saved = read_saved(change(log(name)))
    assert (saved.rows, saved.symbols, saved.complete) == (plain_log.rows, plain_log.symbols, True)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("alleviation_deberta_2022", "=" * 33),
        ("memory_insight_2023", "=" * 80),
        ("feature_matrix_2023", "*" * 72),
    ],
)
def test_a_log_may_be_cut_anywhere_and_no_half_number_is_read(name, end):
    text = log(name)
    whole = read_saved(text)
    places = {row.config: row.places for row in whole.rows}
    found = set()
    for length in range(0, text.rindex(end), len(text) // 97):
        try:
            saved = read_saved(text[:length])
        except OptionError:
            continue
        assert not saved.complete
        assert "cut off" in plain.render(saved)
        assert all(row.places <= places[row.config] for row in saved.rows)
        assert {row.printed_bytes for row in saved.rows} <= {row.printed_bytes for row in whole.rows}
        found.add(len(saved.rows))
    assert found > {1, 2, 3}


@pytest.mark.parametrize(
    ("text", "dialect", "plans"),
    [
        ("Dropout:0,Gelu:1", "2022", ("Gelu+:1:-1",)),
        ("BiasGelu+:1:-1,Cast+:2:3\n", "2023", ("BiasGelu+:1:-1", "Cast+:2:3")),
        ('[\n  "BiasGelu+:1:-1"\n]', "2024", ("BiasGelu+:1:-1",)),
    ],
)
def test_a_configuration_is_read_from_a_text_and_from_a_file(tmp_path, text, dialect, plans):
    file = tmp_path / "configuration"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        file.write_text(text, encoding=encoding)
        for source in (text, file, str(file)):
            saved = read_saved(source)
            assert (saved.dialect, saved.enabled, saved.log) == (dialect, plans, None)
    assert variables.read_plans(saved.save(tmp_path / "new.json").read_text()) == plans


def test_plans_of_another_model_are_listed_with_the_near_names():
    model = read_plan({"Gelu+:1:-1": ("4", 3), "Dropout+:1:-1": ("4", 1)}, {}, "")
    saved = read_saved("Gelu+:1:2,BiasGelu+:1:-1,Tile+:1:-1").against(model)
    assert saved.present == ("Gelu+:1:2",)
    assert saved.absent == ("BiasGelu+:1:-1", "Tile+:1:-1")
    written = plain.render(saved)
    assert "does not have 2 of 3: BiasGelu+:1:-1 (near: Gelu+); Tile+:1:-1" in " ".join(written.split())
    assert "lab.set(memory_plan=['Gelu+:1:2'])" in written
    assert list(saved.table()["in this model"]) == [True, False, False]


@pytest.mark.parametrize(
    "text", ["", "  \n", "nothing of the kind", "absent.json", "no/such/file", "[" * 100_000, '["Gelu']
)
def test_what_holds_no_plans_is_explained(text):
    with pytest.raises(OptionError) as caught:
        read_saved(text)
    assert caught.value.fix
    assert len(str(caught.value)) < 1000


def test_markup_in_a_log_is_shown_and_not_obeyed():
    nasty = "<img src=x onerror=alert(1)>"
    text = log("alleviation_gelu_2022").replace("input1_dim0", nasty).replace("Gelu +", "<b>Gelu</b> +")
    written = html.render(read_saved(text))
    assert "<img" not in written
    assert "<b>" not in written
    assert "&lt;img" in written
    matrix = log("feature_matrix_2023").replace("640.0*inputs_input_ids_dim0", "__import__('os').abort()*a")
    assert read_saved(matrix).rows[0].saving_bytes is None


def test_a_log_whose_bytes_do_not_follow_from_its_formula_is_not_believed():
    text = log("feature_matrix_2023").replace("671,088,640", "671,088,641")
    assert "its own formula comes to 671,088,640 B" in " ".join(plain.render(read_saved(text)).split())
