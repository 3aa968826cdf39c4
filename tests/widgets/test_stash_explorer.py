"""The explorer over the stash of a real model: groups that add up, filters, which plan removes what."""

from __future__ import annotations

import gc

import nbformat
import pytest
from ipywidgets.widgets.widget import _instances as open_widgets
from nbconvert import HTMLExporter

from ortlab.render import html, text, units
from ortlab.widgets.stash_display import bundle_of, remember, stash_explorer
from ortlab.widgets.stash_explorer import StashExplorer


@pytest.fixture
def explorer(lab):
    explorer = StashExplorer()
    explorer.show(lab.stash(), lambda: lab.stash(plans=True))
    yield explorer
    explorer.close()


def rows(table) -> list[dict]:
    return table.table["rows"]


def names(table) -> list[str]:
    return [row["cells"][0] for row in rows(table)]


def tell(table, act, *values):
    """Do what the browser's script does."""
    table._handle_custom_msg({"do": act, "with": list(values)}, [])


def test_each_activation_is_a_row_and_they_add_up_to_the_total(explorer, lab):
    stash = lab.stash()
    assert len(rows(explorer.table)) == len(stash.rows) > 2
    assert explorer.table.table["totals"][-2:] == [units.size(stash.total_bytes), "100.0 %"]
    tell(explorer.table, "filter", "gelu")
    gelu = [row for row in stash.rows if "gelu" in f"{row.operator} {row.value} {row.module}".lower()]
    assert len(rows(explorer.table)) == len(gelu) < len(stash.rows)
    assert explorer.table.table["totals"][-2] == units.size(sum(row.bytes for row in gelu))


@pytest.mark.parametrize("kind", ["layer", "operator", "module"])
def test_groups_add_up_to_the_same_and_open(explorer, lab, kind):
    stash = lab.stash()
    tell(explorer.table, "pick", kind)
    groups = stash.by(kind)
    assert names(explorer.table) == [group.name for group in groups]
    assert explorer.table.table["totals"] == [
        "together",
        str(len(stash.rows)),
        units.size(stash.total_bytes),
        "100.0 %",
    ]
    tell(explorer.table, "choose", groups[0].name)
    assert len(rows(explorer.table)) == groups[0].count
    assert explorer.table.table["totals"][-2] == units.size(groups[0].bytes)
    assert explorer.table.table["picker"]["value"] == "within"
    tell(explorer.table, "pick", "")
    assert len(rows(explorer.table)) == len(stash.rows)


def test_an_activation_says_which_plan_removes_it_and_a_plan_marks_what_it_removes(explorer):
    gelu = next(row for row in rows(explorer.table) if row["cells"][0] == "Gelu")
    tell(explorer.table, "choose", gelu["key"])
    assert "nobody has looked yet" in explorer._details.value
    explorer.look.click()
    assert explorer.errors.text == ""
    assert explorer.look.layout.display == "none"
    assert "Removed by Gelu+:1:-1." in explorer._details.value
    assert [row["key"] for row in rows(explorer.plans) if row["mark"] == "removes it"] == ["Gelu+:1:-1"]

    tell(explorer.plans, "choose", "Gelu+:1:-1")
    removed = [row for row in rows(explorer.table) if row["mark"] == "removed"]
    assert [row["cells"][0] for row in removed] == ["Gelu", "Gelu"]
    assert rows(explorer.table)[:2] == removed  # they come first
    assert "Gelu+:1:-1 removes 2 activations, 1.00 KiB" in explorer._details.value
    tell(explorer.plans, "choose", "Gelu+:1:-1")
    assert not any(row["mark"] for row in rows(explorer.table))


def test_another_batch_is_evaluated_without_a_build(explorer, lab):
    before = lab.status
    tell(explorer.table, "slide", "batch", 8)
    assert explorer.stash.total_bytes == lab.stash().at(batch=8).total_bytes == 2 * lab.stash().total_bytes
    assert explorer.table.table["totals"][-2] == units.size(explorer.stash.total_bytes)
    tell(explorer.table, "slide", "batch", 0)
    assert "batch cannot be 0" in explorer.errors.text
    assert explorer.stash.symbols == lab.stash().at(batch=8).symbols
    assert lab.status == before


def test_a_record_of_a_lab_is_shown_in_its_one_explorer(lab):
    gc.collect()
    before = set(open_widgets)
    for _ in range(3):  # a cell that is run again
        stash = remember(lab.stash().shown(""), lab)
        assert list(bundle_of(stash)) == ["application/vnd.jupyter.widget-view+json"]
    explorer = stash_explorer(lab)
    assert explorer.stash is stash
    opened = len(set(open_widgets) - before)
    bundle_of(remember(lab.stash().shown("operator"), lab))
    assert len(set(open_widgets) - before) == opened
    assert names(explorer.table) == [group.name for group in stash.by("operator")]
    assert "application/vnd.jupyter.widget-view+json" in explorer._repr_mimebundle_()
    assert "Stash by operator" in explorer._repr_mimebundle_()["text/html"]
    explorer.close()
    assert set(open_widgets) == before
    assert bundle_of(lab.stash().shown("")) == {}  # of no lab that is known: its text and HTML are all


def test_a_saved_notebook_without_a_kernel_shows_the_static_table(lab):
    stash = remember(lab.stash().shown(""), lab)
    forms = {**bundle_of(stash), "text/html": html.render(stash), "text/plain": text.render(stash)}
    output = nbformat.v4.new_output("execute_result", forms, execution_count=1)
    cell = nbformat.v4.new_code_cell("%ort_stash", outputs=[output], execution_count=1)
    shown, _ = HTMLExporter(template_name="basic").from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert "By layer" in shown
    assert units.size(stash.total_bytes) in shown
    assert "widget-view" not in shown
    stash_explorer(lab).close()


def test_closing_leaves_nothing_behind(lab):
    gc.collect()
    before = set(open_widgets)
    for framed in (False, True):
        explorer = StashExplorer(framed=framed)
        explorer.show(lab.stash(), lambda: lab.stash(plans=True))
        explorer.look.click()
        explorer.close()
    StashExplorer().close()
    assert set(open_widgets) == before


def test_an_error_while_looking_for_plans_is_shown(lab):
    explorer = StashExplorer()

    def failing():
        raise ZeroDivisionError("<b>no plan</b>")

    explorer.show(lab.stash(), failing)
    explorer.look.click()
    assert "ZeroDivisionError: &lt;b&gt;no plan" in explorer.errors.text
    assert not explorer.look.disabled
    explorer.close()
