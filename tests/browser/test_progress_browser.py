"""A long call where users wait for it: the bar under the running cell and in the panel, its end, and Ctrl-C."""

from __future__ import annotations

import re

import nbformat
import pytest

from .conftest import CELLS_SECONDS
from .test_panel_browser import WRAP, notebook, screenshots

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser

SHOWN = WRAP.replace("--no-panel ", "") + "\ncalls = 0\nfrom time import sleep"

LONG = """\
%%ort_step -n 2000
optimizer.zero_grad()
loss = torch.nn.functional.cross_entropy(model(x), y)
loss.backward()
optimizer.step()
calls += 1
sleep(0.002)  # a loader of data: without it, a quick machine is done before the time left is known
if calls % 500 == 0: print("call", calls)"""

WORDS = re.compile(r"Step ([\d,]+) of 2,000, loss \d\.\d+, [\d.]+ ms a step(, [\d.]+ (ms|s|min.*) left)?")


def begin(open_notebook, notebook, theme):
    page = open_notebook(notebook(SHOWN, LONG, "lab.runs"), theme=theme, height=1600)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    cell = page.locator(".jp-CodeCell").nth(1)
    bar = cell.locator(".jp-OutputArea-output progress")
    bar.wait_for(timeout=1000 * CELLS_SECONDS)
    return page, cell, bar


def step_shown(place) -> int:
    """Wait until a place says which step is done, and return its number."""
    line = place.get_by_text(WORDS).first
    line.wait_for()
    return int(WORDS.search(line.inner_text())[1].replace(",", ""))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_two_thousand_steps_show_how_far_they_are_and_leave_no_trace(
    open_notebook, notebook, jupyter, screenshots, theme
):
    page, cell, bar = begin(open_notebook, notebook, theme)
    panel = page.locator(".ortlab-panel").first
    first = step_shown(cell)
    cell.get_by_text(re.compile(r"\d (ms|s|min) left")).first.wait_for()
    assert step_shown(panel.locator(".ortlab-progress")) >= first
    page.screenshot(path=screenshots / f"progress-panel-{theme}.png")
    cell.screenshot(path=screenshots / f"progress-{theme}.png")
    assert step_shown(cell) > first
    assert 0.0 < float(bar.get_attribute("value")) < 1.0

    cell.get_by_text("Run #1 ort").first.wait_for(timeout=1000 * CELLS_SECONDS)
    assert bar.count() == 0
    assert not panel.locator(
        ".ortlab-progress progress, .ortlab-progress .widget-hprogress"
    ).first.is_visible()
    assert cell.locator("pre").first.inner_text().split("\n")[:4] == [
        "call 500", "call 1000", "call 1500", "call 2000",
    ]  # fmt: skip
    cell.screenshot(path=screenshots / f"progress-after-{theme}.png")
    page.keyboard.press("Control+s")
    page.locator(".jp-DirtyIndicator, .jp-mod-dirty").wait_for(state="detached")
    saved = nbformat.read(jupyter.folder / page.url.split("/tree/")[1].split("?")[0], as_version=4)
    outputs = saved.cells[1].outputs
    # A busy machine shows more than one bar; each leaves an output without data.
    assert not any(one["data"] for one in outputs if one.output_type == "display_data")
    assert "".join(one.text for one in outputs if one.output_type == "stream").count("call") == 4
    assert "<progress" not in str(outputs)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_an_interrupt_is_one_line_and_a_partial_run(open_notebook, notebook, screenshots, theme):
    page, cell, bar = begin(open_notebook, notebook, theme)
    step_shown(cell)
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_text("Interrupt Kernel", exact=True).click()
    line = cell.get_by_text(re.compile("Stopped after"))
    line.wait_for()
    said = re.fullmatch(
        r"Stopped after ([\d,]+) of 2,000 steps; kept as run 1 \(partial\)\. "
        r"The lab is as it was before; rerun with %ort_rerun, or lab\.rerun\(\)\.",
        line.inner_text().strip(),
    )
    assert said
    assert 0 < int(said[1].replace(",", "")) < 2000
    assert bar.count() == 0
    assert "Traceback" not in cell.inner_text()
    runs = page.locator(".ortlab-panel").first.get_by_role("table", name="Runs").locator("tbody tr")
    runs.first.wait_for()
    assert "partial" in runs.first.inner_text()
    cell.screenshot(path=screenshots / f"interrupted-{theme}.png")
