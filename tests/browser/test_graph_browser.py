"""Graphs in the cells of a real JupyterLab: all stages, search, selection both ways."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from playwright.sync_api import TimeoutError as NoAnswerError

from .conftest import CELLS_SECONDS
from .test_memory_browser import nameless
from .test_panel_browser import STEP, WRAP, notebook, screenshots

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser

STAGES = ("exported", "processed", "optimized", "gradient", "execution")

SHOW = "import ortlab\nview = ortlab.show_graph(lab, height=420)\nview"

SELECTED = "view.selected"

SCRATCH = "None"
"""The last cell, which `execute` writes into."""

NUMBERS = itertools.count()

BERT = """\
%load_ext ortlab
import torch, ortlab
from transformers import BertConfig, BertForMaskedLM
torch.manual_seed(3)
config = BertConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=500
)
model = BertForMaskedLM(config)
lab = %ort_wrap --no-panel model
tokens = torch.randint(0, 500, (2, 16))
model(input_ids=tokens, labels=tokens).loss.backward()"""


def run_all(page):
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()


def ready(page, number=0):
    """Wait until the frame of the view has drawn page `number`, and return both."""
    view = page.locator(f".ortlab-graph[data-ready='{number}']").first
    view.wait_for(timeout=1000 * CELLS_SECONDS)
    return view, view.frame_locator("iframe")


def execute(page, expression):
    """Evaluate an expression in the notebook's last cell and return what it prints."""
    number = next(NUMBERS)
    cell = page.locator(".jp-Notebook .jp-CodeCell").last
    editor = cell.locator(".cm-content")
    editor.click()
    # Both give the editor the focus again: a page that is still being drawn may have taken it since the click.
    editor.fill(f"print('answer {number}:', {expression})")
    editor.press("Control+Enter")
    output = cell.locator(".jp-OutputArea-output", has_text=f"answer {number}:").last
    try:
        output.wait_for()
    except NoAnswerError as error:
        focus = page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
        raise AssertionError(f"The cell is {cell.inner_text()!r}, and {focus!r} has the focus.") from error
    page.keyboard.press("Escape")
    return output.inner_text().strip().removeprefix(f"answer {number}: ")


@pytest.mark.row("B1")
def test_each_stage_is_opened_searched_and_selected_in(open_notebook, notebook, screenshots):
    page = open_notebook(notebook(BERT, SHOW, SCRATCH), height=1500)
    run_all(page)
    number = 0
    for stage in reversed(STAGES):
        view = page.locator(".ortlab-graph").first
        view.wait_for(timeout=1000 * CELLS_SECONDS)
        if stage != "execution":
            view.get_by_label("Stage").select_option(stage)
            number += 1
        view, frame = ready(page, number)
        if stage in {"execution", "exported"}:
            view.screenshot(path=screenshots / f"graph-{stage}.png")
        search = frame.get_by_label("Search nodes")
        search.fill("attention matmul")
        found = frame.locator("#ortlab-found button").first
        found.wait_for()
        name = found.get_attribute("title")
        assert "attention" in name.lower()
        found.click()
        view.get_by_text(f"Selected: {name}").wait_for()
        assert execute(page, SELECTED) == f"[{name!r}]"
        search.fill("")

    view.get_by_role("button", name="Show around the selected node").click()
    view, frame = ready(page, number + 1)
    view.get_by_text("nodes are drawn: those within 2 hops").wait_for()
    frame.locator("#ortlab-status:empty").wait_for(state="attached")  # it is said once, above the drawing
    assert 1 < frame.locator("g.graph-node").count() < 60
    assert execute(page, SELECTED) == f"[{name!r}]"
    view.screenshot(path=screenshots / "graph-around.png")
    view.get_by_role("button", name="Back to the whole graph").click()
    view, frame = ready(page, number + 2)
    assert nameless(view) == []
    assert view.evaluate("view => view.scrollWidth <= view.clientWidth + 1")


def test_a_click_tells_python_and_python_selects_and_marks(open_notebook, notebook, screenshots):
    page = open_notebook(notebook(WRAP, STEP, SHOW, SCRATCH), theme="dark", height=1500)
    run_all(page)
    view, frame = ready(page)
    frame.locator("g.graph-node", has_text="Gelu").first.click()
    view.get_by_text("Selected: ").wait_for()
    told = execute(page, SELECTED)
    assert re.fullmatch(r"\['[^']*Gelu[^']*'\]", told), told

    gemm = json.loads(execute(page, "__import__('json').dumps([n for n in view.names if 'Gemm' in n])"))
    assert gemm
    execute(page, f"view.select({gemm[:1]!r}), view.highlight({{n: 'added' for n in view.names[:2]}})")
    view.get_by_text(f"Selected: {gemm[0]}").wait_for()
    frame.locator("g.graph-node.select").first.wait_for()
    frame.locator("path.node-border.ortlab-added").nth(1).wait_for()
    assert execute(page, SELECTED) == f"{gemm[:1]!r}"
    view.screenshot(path=screenshots / "graph-marked.png")

    execute(page, "view.search('gelu')")
    frame.locator("#ortlab-found button").first.wait_for()
    assert frame.get_by_label("Search nodes").input_value() == "gelu"


def test_a_drawing_that_takes_too_long_is_given_up_by_the_notebook(open_notebook, notebook):
    # The frame itself can end only its layout; here reading and painting alone take longer than they may.
    chain = """\
import onnx, ortlab
import ortlab.notebook.widgets.graph_view
ortlab.notebook.widgets.graph_view.PATIENCE_MS = 1
nodes = [onnx.helper.make_node("Relu", [f"x{at}"], [f"x{at + 1}"], name=f"relu{at}") for at in range(2_500)]
graph = onnx.helper.make_graph(nodes, "chain", [onnx.ValueInfoProto(name="x0")], [])
onnx.save(onnx.helper.make_model(graph), "chain.onnx")
view = ortlab.show_graph(ortlab.open_graph("chain.onnx"), group="none")
view"""
    page = open_notebook(notebook(chain, SCRATCH), height=1500)
    run_all(page)
    view = page.locator(".ortlab-graph").first
    view.get_by_text("The browser could not draw it. It took longer than 0.001 s.").wait_for(
        timeout=1000 * CELLS_SECONDS
    )
    view.locator("svg").first.wait_for()
    assert view.locator("iframe").count() == 0
    execute(page, "setattr(ortlab.notebook.widgets.graph_view, 'PATIENCE_MS', 60_000)")
    view.get_by_label("Draw").select_option("module")  # it can be asked again
    view.locator("iframe").wait_for()
