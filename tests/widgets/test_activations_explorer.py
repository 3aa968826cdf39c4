"""The explorer over the saved activations of a real model: groups that add up, filters, which plan removes what."""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace

import nbformat
import pytest
from ipywidgets.widgets.widget import _instances as open_widgets
from nbconvert import HTMLExporter

from ortlab import units
from ortlab.memory.saved_activations import ActivationsSource
from ortlab.notebook.widgets.activations_explorer import ActivationsExplorer, activations_explorer, bundle_of
from ortlab.render import html, text

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def explorer(lab):
    explorer = ActivationsExplorer()
    explorer.show(lab.activations(), lambda: lab.activations(plans=True))
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
    activations = lab.activations()
    assert len(rows(explorer.table)) == len(activations.rows) > 2
    assert explorer.table.table["totals"][-2:] == [units.size(activations.total_bytes), "100.0 %"]
    tell(explorer.table, "filter", "gelu")
    gelu = [row for row in activations.rows if "gelu" in f"{row.operator} {row.value} {row.module}".lower()]
    assert len(rows(explorer.table)) == len(gelu) < len(activations.rows)
    assert explorer.table.table["totals"][-2] == units.size(sum(row.bytes for row in gelu))


@pytest.mark.parametrize("kind", ["layer", "operator", "module"])
def test_groups_add_up_to_the_same_and_open(explorer, lab, kind):
    activations = lab.activations()
    tell(explorer.table, "pick", kind)
    groups = activations.by(kind)
    assert names(explorer.table) == [group.name for group in groups]
    assert explorer.table.table["totals"] == [
        "together",
        str(len(activations.rows)),
        units.size(activations.total_bytes),
        "100.0 %",
    ]
    tell(explorer.table, "choose", groups[0].name)
    assert len(rows(explorer.table)) == groups[0].count
    assert explorer.table.table["totals"][-2] == units.size(groups[0].bytes)
    assert explorer.table.table["picker"]["value"] == "within"
    tell(explorer.table, "pick", "")
    assert len(rows(explorer.table)) == len(activations.rows)


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
    assert (
        explorer.activations.total_bytes
        == lab.activations().at(batch=8).total_bytes
        == 2 * lab.activations().total_bytes
    )
    assert explorer.table.table["totals"][-2] == units.size(explorer.activations.total_bytes)
    tell(explorer.table, "slide", "batch", 0)
    assert "batch cannot be 0" in explorer.errors.text
    assert explorer.activations.symbols == lab.activations().at(batch=8).symbols
    assert lab.status == before


def test_a_cell_that_is_run_again_shows_the_same_explorer_and_no_other_changes_it(lab):
    gc.collect()
    before = set(open_widgets)
    for _ in range(3):  # a cell that is run again
        activations = lab.activations()
        assert list(bundle_of(activations)) == [VIEW]
    explorer = activations_explorer(lab, activations)
    shown = explorer.activations
    opened = len(set(open_widgets) - before)
    other = lab.activations().at(batch=8).shown("operator")
    assert bundle_of(other)[VIEW] != bundle_of(activations)[VIEW]
    assert explorer.activations is shown  # the cell above still shows what it was asked for
    assert len(set(open_widgets) - before) == 2 * opened
    second = activations_explorer(lab, other)
    assert names(second.table) == [group.name for group in other.by("operator")]
    assert "Saved activations by operator" in second._repr_mimebundle_()["text/html"]
    explorer.close()
    second.close()
    assert set(open_widgets) == before
    assert (
        bundle_of(replace(activations, source=ActivationsSource())) == {}
    )  # of no lab: its text and HTML are all


def test_a_copy_of_a_activations_leaves_its_lab_behind(lab):
    activations = lab.activations()
    assert activations.source.lab is lab
    copy = pickle.loads(pickle.dumps(activations))  # noqa: S301 - written here
    assert copy == activations
    assert copy.source.lab is None
    assert "source" not in activations.to_dict()


def test_a_saved_notebook_without_a_kernel_shows_the_static_table(lab):
    activations = lab.activations()
    forms = {
        **bundle_of(activations),
        "text/html": html.render(activations),
        "text/plain": text.render(activations),
    }
    output = nbformat.v4.new_output("execute_result", forms, execution_count=1)
    cell = nbformat.v4.new_code_cell("%ort_activations", outputs=[output], execution_count=1)
    shown, _ = HTMLExporter(template_name="basic").from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert "By layer" in shown
    assert units.size(activations.total_bytes) in shown
    assert "widget-view" not in shown
    activations_explorer(lab, activations).close()


def test_closing_leaves_nothing_behind(lab):
    gc.collect()
    before = set(open_widgets)
    for framed in (False, True):
        explorer = ActivationsExplorer(framed=framed)
        explorer.show(lab.activations(), lambda: lab.activations(plans=True))
        explorer.look.click()
        explorer.close()
    ActivationsExplorer().close()
    assert set(open_widgets) == before


def test_an_error_while_looking_for_plans_is_shown(lab):
    explorer = ActivationsExplorer()

    def failing():
        raise ZeroDivisionError("<b>no plan</b>")

    explorer.show(lab.activations(), failing)
    explorer.look.click()
    assert "ZeroDivisionError: &lt;b&gt;no plan" in explorer.errors.text
    assert not explorer.look.disabled
    explorer.close()
