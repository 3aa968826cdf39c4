from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ortlab.options.options import Options
from ortlab.records.runs import Ledger
from ortlab.render import text
from ortlab.render.lab_pages import difference_page
from ortlab.render.page import Column, Page, Table, row

GOLDEN = Path(__file__).parent / "golden"
"""Pages as they were read and found good; `text.render` of the same records has to give them again."""


def test_a_run_says_who_executed_it_and_where_each_number_comes_from(new_run):
    written = text.render(new_run(2))
    assert written == (GOLDEN / "run.txt").read_text(encoding="utf-8").rstrip("\n")
    assert "Executed by ONNX Runtime on cpu." in written
    assert "Start-up: reported by ORT, from the export on" in written
    assert re.search(r"step memory +120 MiB +measured: how far a step rises above its start", written)
    facts, machine = written.split("The process and the machine")
    assert "902 MiB" not in facts
    assert re.search(r"peak of the process +902 MiB +measured, resident set of this process", machine)
    assert re.search(r"loss +7\.0000 → 5\.0000 +measured", written)


def test_the_parts_of_a_step_add_up_to_the_step(new_run):
    shown = dict(re.findall(r"^([a-z ]+?) +([\d.]+) ms", text.render(new_run(1, "eager")), re.MULTILINE))
    whole = float(shown.pop("step"))
    assert list(shown) == ["forward", "backward", "optimizer", "everything else"]
    assert sum(map(float, shown.values())) == pytest.approx(whole, abs=0.05)  # half the last digit


def test_the_comparison_is_one_table_with_intervals(comparison):
    expected = (GOLDEN / "comparison.txt").read_text(encoding="utf-8").rstrip("\n")
    assert text.render(comparison) == expected


def test_a_fallback_is_never_called_ort(comparison, fallback_run):
    written = text.render(fallback_run)
    assert "PYTORCH (fallback): Unsupported operator" in written
    assert "Executed by ONNX Runtime" not in written
    line = next(line for line in text.render(comparison).splitlines() if line.startswith("#4"))
    assert line.startswith("#4 PYTORCH (fallback)")
    assert "! #4 PYTORCH (fallback): run 4 was executed by PyTorch, not ORT" in text.render(comparison)


def test_what_many_runs_share_is_said_once(new_run):
    runs = [replace(new_run(number), unkept=("a generator",)) for number in range(1, 27)]
    written = " ".join(text.render(Ledger([*runs, new_run(27)])).split())
    assert "#1 to #26: The run cannot be repeated from its start" in written
    assert written.count("cannot be repeated") == 1


def test_an_empty_ledger_says_what_to_do_next():
    assert "lab.step(fn, n=20)" in text.render(Ledger())


def test_a_ledger_of_a_thousand_runs_shows_the_latest(new_run):
    written = text.render(Ledger([new_run(number) for number in range(1, 1001)]))
    assert "#1000 ort" in written
    assert "#950 ort" not in written
    assert "950 earlier runs: lab.runs.table() has all runs." in written
    assert len(written.splitlines()) < 65


def test_options_mark_what_differs_from_the_default():
    written = text.render(Options(memory_level=1))
    assert "Changed: memory_level." in written
    assert re.search(r"memory_level +1 \(default 0\) +new session", written)
    assert re.search(r"compute_optimizer +on +new graph", written)


def test_the_difference_of_options_says_what_going_over_costs():
    written = text.render(difference_page(Options(), Options(memory_level=2, log_level="INFO")))
    assert re.search(r"memory_level +0 +2 +new session", written)
    assert "Going over takes: new session." in written
    assert "No switch differs." in text.render(difference_page(Options(), Options()))


def test_a_hostile_name_cannot_break_a_table_or_a_terminal():
    name = "node\x1b[31m\nsecond line\x07 \u202e"
    columns = (Column("name"), Column("count", numeric=True))
    written = text.table(Table("", columns, (row(name, "1"), row("宽度", "22"))))
    assert "\x1b" not in written
    assert "\x07" not in written
    assert "\u202e" not in written
    assert len(written.splitlines()) == 4
    assert r"\x1b[31m second line\x07" in written
    # Two wide characters fill four columns, so the number still ends where the other one ends.
    head, wide = written.splitlines()[0], written.splitlines()[3]
    assert len(wide) == len(head) - 2


def test_ragged_rows_are_refused():
    with pytest.raises(ValueError, match="a row of 1 cells under 2 headings"):
        Table("ragged", (Column("a"), Column("b")), (row("x"),))


def test_an_unknown_record_is_refused_by_name():
    with pytest.raises(TypeError, match=r"no page for a dict; .*Comparison, .*Ledger"):
        text.render({})


def test_a_page_renders_itself():
    assert text.render(Page("Title", ())) == "Title"
