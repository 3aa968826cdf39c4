"""Messages, and what a click would redo, as a user sees them: JupyterLab in Chromium, a real model."""

from __future__ import annotations

import re

import pytest

from .test_panel_browser import STEP, WRAP, notebook, press, run_all, screenshots, shown, tab

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser

TALKING = WRAP + " log_level=VERBOSE"

LONG = STEP.replace("-n 20", "-n 120")

SHOW = "import ortlab\npanel = ortlab.panel(lab)\npanel"


def unfold(panel):
    """Open the messages."""
    tab(panel, "Messages")


def test_messages_are_folded_by_run_and_filtered(open_notebook, notebook, screenshots):
    page = open_notebook(notebook(TALKING, LONG, SHOW, "lab.messages"), theme="dark", height=2600)
    panel = run_all(page)
    unfold(panel)
    fold = panel.locator("details").filter(has_text="Run 1:").first
    assert not fold.locator("table").is_visible()  # folded at first
    fold.locator("summary").first.focus()
    page.keyboard.press("Enter")
    fold.locator("table").wait_for()
    assert fold.locator("tbody tr").count() == 50
    panel.screenshot(path=screenshots / "messages.png")

    panel.get_by_label("Level", exact=True).select_option("INFO and worse")
    panel.get_by_label("Source", exact=True).select_option("exporter")
    shown(panel, "Run 1: 1 INFO")
    panel.get_by_text("Run 1: 1 INFO").click()
    panel.get_by_text("Exported graph: graph(").first.click()
    panel.get_by_text("onnx::").first.wait_for()
    panel.screenshot(path=screenshots / "messages-graph.png")

    panel.get_by_label("Source", exact=True).select_option("all")
    panel.get_by_label("Level", exact=True).select_option("all")
    panel.get_by_label("Run", exact=True).select_option("Run 1")
    # What every step says again is one row with its number.
    panel.get_by_text(re.compile(r"\([\d,]+ times\)")).first.wait_for()
    panel.get_by_label("Contains", exact=True).fill("nothing like it")
    page.keyboard.press("Enter")
    shown(panel, "Run 1: none")
    assert panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth + 1")


def test_ten_thousand_messages_do_not_freeze_the_panel(open_notebook, notebook):
    many = """\
for number in range(10_000):
    lab._bench.log.add("INFO" if number % 2 else "VERBOSE", "ONNX Runtime", f"message {number}")"""
    page = open_notebook(notebook(WRAP, STEP, many, SHOW), height=2600)
    panel = run_all(page)
    unfold(panel)
    panel.locator("summary").filter(has_text="Outside runs: 5,000 INFO, 5,000 VERBOSE").wait_for()
    panel.get_by_label("Contains", exact=True).fill("message 999")
    page.keyboard.press("Enter")
    panel.locator("summary").filter(has_text="Outside runs: 6 INFO, 5 VERBOSE").wait_for()
    panel.get_by_label("Contains", exact=True).fill("")
    page.keyboard.press("Enter")
    panel.get_by_label("Run", exact=True).select_option("Outside runs")
    panel.get_by_text("1 to 200 of 10,000").wait_for()
    rows = panel.locator(".ortlab-messages details[open] tbody tr")
    assert rows.count() < 300
    first = rows.first.inner_text()
    press(panel, "Later")
    panel.get_by_text("201 to").first.wait_for()
    assert rows.first.inner_text() != first


def test_each_switch_says_what_a_click_redoes_and_what_that_took(open_notebook, notebook, screenshots):
    page = open_notebook(notebook(WRAP, STEP, SHOW), height=2200)
    panel = run_all(page)
    tab(panel, "Switches")
    press(panel, "Memory")
    row = panel.locator(".ortlab-switch").filter(has=page.get_by_label("memory_level", exact=True))
    chip = row.locator(".ortlab-chip")
    assert "rebuilds the session, " in chip.inner_text()
    assert "in run 1" in chip.inner_text()
    panel.get_by_label("memory_level", exact=True).select_option("1")
    shown(panel, "Changed since the last build: memory_level.")
    panel.screenshot(path=screenshots / "pending.png")
    assert "no rebuild if changed back" in chip.inner_text()
    press(panel, "Rerun")
    panel.get_by_text("Changed since the last build").wait_for(state="hidden")
    shown(row, "in run 2")
