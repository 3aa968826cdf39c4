"""The graph tab in JupyterLab: it opens fitted, is read by mouse and keyboard, and every tab passes axe-core."""

from __future__ import annotations

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe

from .conftest import CELLS_SECONDS, pages
from .server import RULES
from .test_panel_browser import BERT, BERT_STEP, SHOW, STEP, WRAP, notebook, press, run_all, screenshots, tab

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser

DEEPER = BERT.replace("hidden_size=256, num_hidden_layers=2", "hidden_size=128, num_hidden_layers=4")

AGAIN = "lab.set(memory_level=1)\n_ = lab.rerun()"

FRAMES = """part => {
    part.scrollIntoView();
    return new Promise((seen) => requestAnimationFrame(() => setTimeout(seen)));
}"""
"""Shows a part of the page and waits until it is painted: contrast is judged of what is seen."""

LABELS = 12
"""Texts that are seen in any tab; as many at least have to be judged."""


def violations(page, part=".ortlab-panel"):
    """What axe-core finds in a part of the page: rule, element and what is wrong."""
    # JupyterLab's body has no height and hides what overflows it, so that axe-core takes every text for hidden.
    page.evaluate("document.body.style.height = '100vh'")
    page.locator(part).first.evaluate(FRAMES)
    response = Axe().run(page, context=part, options=RULES).response
    judged = [
        node
        for kind in ("passes", "violations")
        for rule in response[kind]
        if rule["id"] == "color-contrast"
        for node in rule["nodes"]
    ]
    assert len(judged) >= LABELS
    return [
        (rule["id"], node["html"], node["failureSummary"])
        for rule in response["violations"]
        for node in rule["nodes"]
    ]


def run_cells(page, *numbers):
    for number in numbers:
        page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-editor").nth(number).click()
        page.keyboard.press("Control+Enter")


def drawn(panel, number):
    """Wait for a drawing of the map, by its number, and return it."""
    panel.locator(f'.ortlab-map[data-ready="{number}"]').wait_for()
    return panel.locator(".ortlab-map")


@pytest.fixture(scope="module")
def panel(jupyter, chromium, tmp_path_factory):
    """The panel of a BERT after two runs, the second with recompute plans, with the graph tab open."""
    cells = [nbformat.v4.new_code_cell(cell) for cell in (DEEPER, BERT_STEP, AGAIN)]
    document = nbformat.v4.new_notebook(cells=cells)
    document.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(document, jupyter.folder / "map.ipynb")
    with pages(jupyter, chromium, tmp_path_factory.mktemp("map")) as open_page:
        page = open_page("map.ipynb", width=1400, height=900)
        panel = run_all(page)
        panel.get_by_text("Last run #2").wait_for(timeout=1000 * CELLS_SECONDS)
        tab(panel, "Graph")
        drawn(panel, 0)
        yield panel


def rows(panel, name):
    return panel.get_by_role("tree").get_by_role("treeitem", name=name)


def count(panel):
    return panel.get_by_role("tree").get_by_role("treeitem").count()


def facts(panel):
    return panel.get_by_label("What is known of the chosen row")


def test_the_graph_opens_fitted_with_forward_and_backward_in_one_row(panel, screenshots):
    room = panel.locator(".ortlab-mapped").evaluate("box => [box.scrollHeight, box.clientHeight]")
    assert room[0] <= room[1]
    assert panel.bounding_box()["height"] <= 700
    assert [rows(panel, f"layer.{number}").count() for number in range(4)] == [1] * 4
    row = rows(panel, "layer.0")
    sides = [row.locator(f".ortlab-{side} .ortlab-mapbar").bounding_box() for side in ("forward", "backward")]
    assert sides[0]["y"] == sides[1]["y"]
    assert sides[0]["x"] < sides[1]["x"]
    bands = panel.locator("path.ortlab-band")
    widths = bands.evaluate_all("all => all.map((one) => Number(one.getAttribute('stroke-width')))")
    assert max(widths) > 4 * min(widths)
    assert (
        panel.locator(".ortlab-maprow .ortlab-again").count() >= 2
    )  # memory_level=1 recomputes in each layer
    panel.screenshot(path=screenshots / "graph-map.png")


def test_a_click_says_what_ortlab_knows_and_rows_open_by_keyboard(panel):
    before = count(panel)
    row = rows(panel, "layer.1")
    row.click()
    facts(panel).get_by_text("bert.encoder.layer.1", exact=True).wait_for()
    names = facts(panel).locator("dt").all_inner_texts()
    assert names[:2] == ["module", "source"]
    assert {"forward", "backward", "keeps", "recomputes"} <= set(names)
    assert panel.locator(".ortlab-lit").count() >= 1
    page = panel.page
    page.keyboard.press("ArrowRight")  # opens in place
    page.keyboard.press("ArrowRight")
    assert count(panel) > before
    focused = page.evaluate(
        "[document.activeElement.getAttribute('aria-level'), document.activeElement.role]"
    )
    assert focused == [str(int(row.get_attribute("aria-level")) + 1), "treeitem"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert count(panel) == before
    page.keyboard.press("ArrowRight")
    press(panel, "Fit")
    assert count(panel) == before


def test_a_search_finds_operators_in_closed_modules(panel):
    search = panel.get_by_role("searchbox", name="Search modules and operators")
    search.fill("layer.1 softmax")
    rows(panel, "Softmax").first.click()
    assert facts(panel).locator("dd").first.inner_text() == "Softmax"
    facts(panel).get_by_text("bert.encoder.layer.1.attention.self", exact=True).wait_for()
    assert "found." in panel.locator(".ortlab-map .ortlab-said").inner_text()
    search.fill("no such thing")
    assert count(panel) == 0
    assert panel.locator(".ortlab-map .ortlab-said").inner_text().startswith("0 found.")
    search.fill("")


def test_it_is_coloured_by_time_and_by_what_changed_between_two_runs(panel, screenshots):
    panel.get_by_label("Colour by").select_option("time")
    drawn(panel, 1)
    assert " ms" in rows(panel, "layer.2").inner_text()
    panel.screenshot(path=screenshots / "graph-time.png")
    press(panel, "What changed")
    drawn(panel, 2)
    facts(panel).get_by_text("recompute nodes").first.wait_for()
    assert "Kept for backward: " in facts(panel).inner_text()
    panel.screenshot(path=screenshots / "graph-changes.png")
    assert violations(panel.page) == []


def test_the_nodes_around_an_operator_are_a_click_away(panel):
    search = panel.get_by_role("searchbox", name="Search modules and operators")
    search.fill("layer.0 softmax")
    rows(panel, "Softmax").first.click()
    press(panel, "Show the nodes around it")
    panel.locator(".ortlab-graph[data-ready]").wait_for()
    press(panel, "Back to the modules")
    panel.get_by_role("tree").wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_tab_passes_axe_core_before_and_after_the_first_step(
    open_notebook, notebook, screenshots, theme
):
    page = open_notebook(notebook(WRAP, SHOW, STEP, AGAIN), theme=theme, width=1000, height=900)
    run_cells(page, 0, 1)
    panel = page.locator(".ortlab-panel").first
    panel.wait_for(timeout=1000 * CELLS_SECONDS)
    panel.locator(".ortlab-switch").first.wait_for(state="attached")
    found = {}
    for state in ("empty", "after"):
        for name in ("Overview", "Memory", "Graph", "Switches", "Messages"):
            tab(panel, name)
            if (name, state) == ("Graph", "after"):
                drawn(panel, 0)
            page.wait_for_function("!document.querySelector('.ortlab-waits')")
            panel.screenshot(path=screenshots / f"axe-{theme}-{state}-{name.lower()}.png")
            found[state, name] = violations(page)
        if state == "empty":
            run_cells(page, 2, 3)
            panel.get_by_text("Last run #2").wait_for(timeout=1000 * CELLS_SECONDS)
    assert {where: what for where, what in found.items() if what} == {}
    page.add_style_tag(
        content=".ortlab-panel .ortlab-state { color: rgb(128 128 128 / 50%) !important }"
    )  # a fault
    assert [rule for rule, *_ in violations(page)] == ["color-contrast"]
