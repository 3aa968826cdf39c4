"""A sub-graph that Triton runs, drawn beside its code in a real JupyterLab."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_graph_browser import BERT, ready, run_all
from .test_panel_browser import notebook, screenshots

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser

FILES = f"""\
import pytest, sys
sys.path.append({str(Path(__file__).parents[1])!r})
import triton_files
layer = "/_original_module/bert/encoder/layer.0/attention/self"
part = triton_files.cut(lab.graph("gradient").model, [f"{{layer}}/Softmax", f"{{layer}}/Dropout"])
key = triton_files.write(part, lab.activations().symbols, pytest.MonkeyPatch())"""

LIST = "%ort_triton_kernels"
VIEW = "view = %ort_triton_kernels 1\nview"


@pytest.mark.row("H7")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_code_stands_beside_the_graph_and_in_colours(open_notebook, notebook, screenshots, theme):
    page = open_notebook(notebook(BERT, FILES, LIST, VIEW), theme=theme, width=1400, height=1800)
    run_all(page)
    view, frame = ready(page)
    code = view.locator("pre.ortlab-code")
    assert "@triton.jit" in code.inner_text()
    colours = {
        kind: code.locator(f".{kind}").first.evaluate("one => getComputedStyle(one).color")
        for kind in ("k", "nd", "n")
    }
    assert len(set(colours.values())) > 1
    drawn, beside = view.locator(".ortlab-frame").bounding_box(), code.bounding_box()
    assert beside["x"] > drawn["x"] + drawn["width"] - 1
    assert frame.locator("g.graph-node").count() > 1
    page.locator(".jp-Notebook").screenshot(path=screenshots / f"triton-{theme}.png")
    view.get_by_label("Stage").select_option("processed")
    view, frame = ready(page, 1)
    frame.get_by_text("Exp", exact=True).first.wait_for()
    view.screenshot(path=screenshots / f"triton-processed-{theme}.png")


def test_in_a_narrow_cell_the_code_stands_below(open_notebook, notebook, screenshots):
    page = open_notebook(notebook(BERT, FILES, VIEW), width=700, height=1500)
    run_all(page)
    view, _ = ready(page)
    drawn, beside = (
        view.locator(".ortlab-frame").bounding_box(),
        view.locator("pre.ortlab-code").bounding_box(),
    )
    assert beside["y"] >= drawn["y"] + drawn["height"]
    assert view.evaluate("view => view.scrollWidth <= view.clientWidth + 1")
    view.screenshot(path=screenshots / "triton-narrow.png")
