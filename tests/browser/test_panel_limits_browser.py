"""The panel at its limits: deep and tiny models, long names, zoomed pages, a sweep under two panels, a dead kernel."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from .conftest import CELLS_SECONDS
from .test_graph_map_browser import drawn, rows, run_cells
from .test_panel_browser import (
    HEIGHT,
    SHOW,
    STEP,
    WRAP,
    height,
    notebook,
    press,
    run_all,
    screenshots,
    shown,
    tab,
)
from .test_panel_life_browser import LOST, NOT_FOUND

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser

TABS = ("Overview", "Memory", "Graph", "Switches", "Messages")

DEEP = """\
%load_ext ortlab
import torch
torch.manual_seed(3)
LONG = "block_" + 294 * "x"

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(LONG, torch.nn.Linear(8, 8))

    def forward(self, x):
        return torch.tanh(getattr(self, LONG)(x))

class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(500))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model, x = Deep(), torch.randn(16, 8)
lab = %ort_wrap --no-panel model"""

SLOW = """\
import time
from ortlab.notebook.widgets.record_table import Column, Content, Intents, Look, RecordTable

ticked = set()

def show(words):
    plans = Content(
        ["Gelu", "Cast"], [Column("plan", str, str)], str, lambda plan: Look(plan, ticked=plan in ticked),
        ("plan", "plans"), totals=lambda _: {"plan": words}
    )
    table.show(plans)

def tick(plan, on):
    table.draw()  # what other news of the kernel do: the same table once more, and another one
    show("not answered yet")
    time.sleep(2)
    if plan == "Gelu":  # the other one is refused
        ticked.add(plan)
    show(f"answered {plan}")

table = RecordTable("Recompute plans", Intents(tick=tick))
show("nobody has asked")
table"""

TINY = """\
%load_ext ortlab
import torch

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.factor

model, x = Scaled(), torch.randn(2, 4)
lab = %ort_wrap --no-panel model"""

SUMMED = "%%ort_step -n 3\nmodel(x).sum().backward(); model.zero_grad()"

NO_BACKWARD = "%%ort_step -n 3\nmodel.eval()\nwith torch.no_grad():\n    model(x)"

MANY = """\
from dataclasses import replace
for number in range(2, 1001):
    lab.runs.add(replace(lab.runs[0], number=number))
panel.runs.show()"""

DYING = "import os, signal, threading\nthreading.Timer(2, os.kill, [os.getpid(), signal.SIGKILL]).start()"


def fits(panel):
    """Whether the panel is as high as it may be at most, and nothing in it stands out at its side."""
    assert height(panel) <= HEIGHT
    assert panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth + 1")


def each_tab(panel, folder, name):
    """Open every tab, and see that it fits."""
    for one in TABS:
        tab(panel, one)
        panel.page.wait_for_function("!document.querySelector('.ortlab-waits')")
        panel.screenshot(path=folder / f"{name}-{one.lower()}.png")
        fits(panel)


@pytest.mark.slow
def test_five_hundred_layers_with_names_of_three_hundred_characters_fit(open_notebook, notebook, screenshots):
    page = open_notebook(notebook(DEEP, SUMMED, SHOW), width=1000, height=900)
    panel = run_all(page)
    each_tab(panel, screenshots, "deep")
    bars = panel.locator(".ortlab-bar")
    assert bars.count() == 2
    assert bars.first.locator("span").count() <= 13  # the largest layers, and the others together
    tab(panel, "Graph")
    drawn(panel, 0)
    room = panel.locator(".ortlab-mapped").evaluate("box => [box.scrollHeight, box.clientHeight]")
    assert room[0] <= room[1]
    panel.get_by_role("searchbox", name="Search modules and operators").fill("layers.499 tanh")
    rows(panel, "Tanh").first.click()
    fits(panel)
    panel.screenshot(path=screenshots / "deep-found.png")


def test_one_node_is_shown_and_so_is_a_model_without_a_backward(open_notebook, notebook, screenshots):
    page = open_notebook(notebook(TINY, SUMMED, SHOW, NO_BACKWARD), width=1000, height=900)
    run_cells(page, 0, 1, 2)
    panel = page.locator(".ortlab-panel").first
    panel.wait_for(timeout=1000 * CELLS_SECONDS)
    panel.locator(".ortlab-switch").first.wait_for(state="attached")
    each_tab(panel, screenshots, "one-node")
    tab(panel, "Graph")
    assert rows(drawn(panel, 0), "the model itself").count() == 1

    run_cells(page, 3)
    shown(panel, "Last run #2 ort")
    each_tab(panel, screenshots, "no-backward")
    assert panel.get_by_role("alert").count() == 0


def test_a_thousand_runs_fit(open_notebook, notebook, screenshots):
    page = open_notebook(notebook(WRAP, STEP, SHOW, MANY), width=1000, height=900)
    panel = run_all(page)
    shown(panel, "1,000 runs")
    assert (
        panel.get_by_role("table", name="Runs").locator("tbody tr").first.inner_text().strip()[:9]
        == "#1000 ort"
    )
    each_tab(panel, screenshots, "many-runs")


@pytest.mark.parametrize("percent", [50, 200])
def test_a_zoomed_page_holds_the_whole_panel(open_notebook, notebook, screenshots, percent):
    """A browser zooms by giving a page fewer or more pixels of its own, each drawn larger or smaller."""
    page = open_notebook(
        notebook(WRAP, STEP, SHOW),
        width=140_000 // percent,
        height=90_000 // percent,
        device_scale_factor=percent / 100,
    )
    panel = run_all(page)
    shown(panel, "Last run #1 ort")
    each_tab(panel, screenshots, f"zoom-{percent}")


def test_two_panels_follow_a_sweep(open_notebook, notebook, screenshots):
    second = "from ortlab.notebook.widgets.panel import Panel\nsecond = Panel(lab)\nsecond"
    sweep = "%ort_sweep compute_optimizer=True,False memory_level=0,1 engine=ort,eager -n 40"
    page = open_notebook(notebook(WRAP, STEP, SHOW, second, sweep), height=3000)
    run_cells(page, 0, 1, 2, 3)
    panels = page.locator(".ortlab-panel")
    panels.nth(1).locator(".ortlab-switch").first.wait_for(state="attached", timeout=1000 * CELLS_SECONDS)
    run_cells(page, 4)
    panels.nth(1).get_by_text("point").first.wait_for()  # how far it is, in both
    panels.nth(0).get_by_text("point").first.wait_for()
    tab(panels.nth(1), "Switches")  # turned while the kernel is busy
    page.get_by_text("Sweep 1: lab.sweeps[0] shows its points.").first.wait_for(timeout=1000 * CELLS_SECONDS)
    page.wait_for_function("!document.querySelector('.ortlab-waits')")
    assert panels.nth(1).get_by_role("tab", selected=True).inner_text().startswith("Switches")
    tab(panels.nth(1), "Overview")
    page.wait_for_function("!document.querySelector('.ortlab-waits')")
    tables = [panels.nth(at).get_by_role("table", name="Runs") for at in (0, 1)]
    tables[1].locator("tbody tr").nth(5).wait_for()
    assert tables[0].inner_text() == tables[1].inner_text()
    for at in (0, 1):
        fits(panels.nth(at))
        shown(panels.nth(at), "ONNX Runtime: ready.")
        assert panels.nth(at).locator(".ortlab-progress .widget-hprogress").first.is_hidden()
        assert panels.nth(at).get_by_role("alert").count() == 0
    panels.nth(1).screenshot(path=screenshots / "sweep-panels.png")


def test_a_tick_stays_until_the_kernel_answers(open_notebook, notebook):
    page = open_notebook(notebook(SLOW))
    run_cells(page, 0)
    table = page.get_by_role("table", name="Recompute plans")
    for plan in ("Gelu", "Cast"):
        box = table.get_by_label(plan)
        box.wait_for(timeout=1000 * CELLS_SECONDS)
        box.check()
        table.get_by_text("not answered yet").wait_for()
        assert box.is_checked()
        table.get_by_text(f"answered {plan}").wait_for()
        expect(box).to_be_checked(checked=plan == "Gelu")


def test_a_kernel_that_dies_while_the_slider_moves_is_said(open_notebook, notebook, screenshots):
    # JupyterLab refuses a message to a kernel that it knows to be dead, which a move may be before the panel hears it.
    expected = f"{NOT_FOUND}|^Cannot send$"
    page = open_notebook(notebook(WRAP, STEP, SHOW, DYING), width=1000, height=900, expected=expected)
    run_cells(page, 0, 1, 2)
    panel = page.locator(".ortlab-panel").first
    panel.locator(".ortlab-switch").first.wait_for(state="attached", timeout=1000 * CELLS_SECONDS)
    tab(panel, "Memory")
    press(panel, "Predict what less memory costs")
    slider = panel.get_by_label("Share of step memory to keep, in percent")
    slider.wait_for()
    run_cells(page, 3)
    lost = panel.get_by_role("alert").filter(has_text=LOST)
    slider.focus()
    moves = 0
    while not lost.is_visible() and moves < 600:
        page.keyboard.press("ArrowLeft" if moves % 2 else "ArrowRight")
        page.wait_for_timeout(50)
        moves += 1
    assert lost.is_visible()
    assert moves > 10
    assert slider.evaluate("one => Boolean(one.closest('[inert]'))")
    assert page.locator(".ortlab-panel.ortlab-waits").count() == 0
    fits(panel)
    saved = page.locator(".ortlab-saved").first
    assert "#1 ort" in saved.inner_text()
    panel.screenshot(path=screenshots / "panel-dead.png")
    page.get_by_text("| Idle").first.wait_for(timeout=1000 * CELLS_SECONDS)  # as a server has to wait for it
