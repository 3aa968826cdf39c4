"""The plan table and the saved activations explorer as a user meets them: JupyterLab in Chromium, a real model."""

from __future__ import annotations

import pytest

from .conftest import CELLS_SECONDS
from .test_panel_browser import STEP, notebook, press, run_all, screenshots, tab

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser

HOSTILE = '<img src=x onerror="hacked=1">'

WRAP = f"""\
%load_ext ortlab
import torch
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))
model.add_module({HOSTILE!r}, torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()))
model.add_module("head", torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(256, 16), torch.randint(0, 4, (256,))
lab = %ort_wrap --no-panel model"""

SHOW = "from ortlab.notebook.widgets.panel import Panel\npanel = Panel(lab)\npanel.plan.click()\npanel"

MANY = """\
from dataclasses import replace
from ortlab.notebook.widgets.plan_table import PlanTable
plan = lab.plan()
rows = [replace(plan.rows[0], config=f"Gelu{n}+:1:-1", saving_bytes=float(n)) for n in range(10_000)]
many = PlanTable(print)
many.show_plan(replace(plan, rows=tuple(rows)))
many"""


def nameless(element) -> list[str]:
    """Return the controls that the keyboard cannot reach, or that have no name for a screen reader."""
    return element.evaluate(
        """root => [...root.querySelectorAll('input, select, button')].filter(
            one => one.tabIndex < 0 || !(one.textContent.trim() || [...(one.labels || [])].some(
                label => label.textContent.trim()) || one.getAttribute('aria-label'))).map(one => one.outerHTML)"""
    )


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 600)])
def test_plans_are_sorted_filtered_ticked_and_evaluated(open_notebook, notebook, screenshots, theme, width):
    page = open_notebook(notebook(WRAP, STEP, SHOW, SHOW), theme=theme, width=width, height=4000)
    panel = run_all(page)
    second = page.locator(".ortlab-panel").nth(1)
    tab(panel, "Memory")
    tab(second, "Memory")
    table = panel.locator(".ortlab-plans .ortlab-records")
    rows = table.locator("tbody tr")
    saves = table.get_by_role("columnheader", name="saves")
    assert saves.get_attribute("aria-sort") == "none"
    saves.get_by_role("button").focus()
    page.keyboard.press("Enter")  # by keyboard, the focus stays on the heading
    table.locator("th[aria-sort=descending]").wait_for()
    page.keyboard.press("Enter")
    table.locator("th[aria-sort=ascending]").wait_for()

    table.get_by_label("Filter plans").press_sequentially("gelu")
    table.get_by_text(" of ").filter(has_text="plans").wait_for()
    assert all("gelu" in text.lower() for text in rows.all_inner_texts())

    second.locator(".ortlab-plans .ortlab-records").get_by_label("Gelu+:1:-1", exact=True).wait_for()
    table.get_by_label("Gelu+:1:-1", exact=True).focus()
    page.keyboard.press("Space")
    table.get_by_text("ticked: 1").wait_for()
    second.locator(".ortlab-plans .ortlab-records").get_by_text(
        "ticked: 1"
    ).wait_for()  # two panels stay in step
    places = table.get_by_label("places of Gelu+:1:-1, 1 to 2")
    places.fill("1")
    places.blur()
    panel.get_by_text("in proportion").wait_for()

    before = table.locator("tfoot").inner_text()
    batch = table.get_by_label("batch", exact=True)
    batch.focus()
    page.keyboard.press("ArrowRight")
    panel.get_by_text("predicted for another batch").wait_for()
    assert batch.input_value() == "257"
    page.keyboard.press("End")
    table.locator("tfoot").filter(has_not_text=before.split("\t")[-1].strip()).wait_for()
    assert page.evaluate("document.activeElement.type") == "range"
    panel.screenshot(path=screenshots / f"plans-{theme}-{width}.png")

    tab(panel, "Switches")
    press(panel, "Memory")
    panel.get_by_label("memory_level", exact=True).select_option("1")
    panel.locator(".ortlab-said").first.wait_for()  # the level has taken the ticked plan out, and says so
    tab(panel, "Memory")
    table.locator("tfoot").wait_for(state="detached")
    panel.get_by_text("memory_level=1 chooses the plans").first.wait_for()
    table.locator("input[aria-label='Gelu+:1:-1']:disabled").wait_for()
    assert nameless(panel) == []
    assert panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth + 1")


@pytest.mark.parametrize(("theme", "width"), [("dark", 1280), ("light", 600)])
def test_the_activations_is_explored_and_a_name_with_markup_stays_text(
    open_notebook, notebook, screenshots, theme, width
):
    page = open_notebook(
        notebook(WRAP, STEP, "%ort_activations", MANY), theme=theme, width=width, height=4000
    )
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    explorer = page.locator(".ortlab-panel").first
    explorer.wait_for(timeout=1000 * CELLS_SECONDS)
    table = explorer.locator(".ortlab-records").first
    total = table.locator("tfoot").inner_text().split()[-4:]
    for kind in ("layer", "operator", "module"):
        table.get_by_label("Show").select_option(kind)
        table.get_by_role("columnheader", name=kind, exact=True).wait_for()
        assert table.locator("tfoot").inner_text().split()[-4:] == total
    assert f"{HOSTILE}.0" in table.inner_text()
    explorer.screenshot(path=screenshots / f"activations-modules-{theme}-{width}.png")
    table.get_by_role("button", name=f"{HOSTILE}.1").click()
    table.get_by_text("1 activation", exact=True).wait_for()
    table.get_by_label("Show").select_option("")

    explorer.get_by_role("button", name="Which plan removes what").click()
    plans = explorer.locator(".ortlab-records").nth(1)
    plans.get_by_role("button", name="Gelu+:1:-1").click()
    table.locator(".ortlab-marked").nth(1).wait_for()
    assert table.locator("tr.ortlab-marked").count() == 2
    explorer.get_by_text("Gelu+:1:-1 removes 2 activations").wait_for()
    table.locator("tr.ortlab-marked button").first.click()
    explorer.get_by_text("Removed by Gelu+:1:-1").wait_for()
    assert plans.locator("tr.ortlab-marked").inner_text().startswith("removes it")
    explorer.screenshot(path=screenshots / f"activations-{theme}-{width}.png")
    assert explorer.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None
    assert nameless(explorer) == []
    assert explorer.evaluate("panel => panel.scrollWidth <= panel.clientWidth + 1")

    many = page.locator(".ortlab-records").last  # ten thousand rows do not stop the browser
    many.get_by_text("1 to 50 of 10,000 plans").wait_for()
    many.get_by_role("columnheader", name="saves").get_by_role("button").click()
    many.get_by_label("Gelu9999+:1:-1", exact=True).wait_for()
    many.get_by_role("button", name="Later").click()
    many.get_by_text("51 to 100 of 10,000 plans").wait_for()
    assert many.locator("tbody tr").count() == 50
