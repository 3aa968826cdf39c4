"""Records without the extension in JupyterLab: the panel of a lab, and figures that an untrusted notebook keeps."""

from __future__ import annotations

import nbformat
import pytest
from kernel import executed

from .conftest import CELLS_SECONDS
from .test_panel_browser import notebook, run_all, screenshots
from .test_panel_life_browser import NOT_FOUND

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser

WRAP = """\
import torch
import ortlab
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
x, y = torch.randn(256, 16), torch.randint(0, 4, (256,))
lab = ortlab.wrap(model)
lab"""

STEP = """\
def step():
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss

lab.step(step, n=4)"""

FIGURES = {
    "activations": "lab.activations()",
    "graph": "lab.graph()",
    "sweep": 'lab.sweep({"engine": ["ort", "eager"], "memory_level": [0, 1]}, n=4)',
    "memory": "lab.memory()",
}


@pytest.fixture(scope="module")
def saved(jupyter, tmp_path_factory):
    """Run the cells in a real kernel without the extension, and return the notebook as it would be saved."""
    return executed(tmp_path_factory.mktemp("records"), WRAP, STEP, *FIGURES.values())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_an_untrusted_notebook_shows_every_figure(open_notebook, jupyter, saved, screenshots, theme):
    # Nobody has signed it, as in a fresh clone.
    nbformat.write(saved, jupyter.folder / f"untrusted-{theme}.ipynb")
    page = open_notebook(f"untrusted-{theme}.ipynb", theme=theme, height=6000, expected=NOT_FOUND)
    page.locator(".jp-Notebook table").first.wait_for()
    for number, name in enumerate(FIGURES, start=2):
        cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
        figure = cell.locator("img[src^='data:image/svg']").first
        figure.wait_for()
        assert figure.evaluate("one => one.decode().then(() => one.naturalWidth)") > 300, name
        assert figure.bounding_box()["height"] > 100, name
        assert figure.get_attribute("alt"), name
        cell.screenshot(path=screenshots / f"untrusted-{name}-{theme}.png")
    assert page.locator(".jp-OutputArea-output svg").count() == 0


def test_a_lab_shows_its_panel_without_the_extension(open_notebook, notebook, screenshots):
    page = open_notebook(notebook(WRAP, STEP, *FIGURES.values()), height=6000)
    run_all(page)
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    assert page.locator(".ortlab-panel .ortlab-header").count() == 1
    for number in range(2, 2 + len(FIGURES)):
        cells.nth(number).locator("img[src^='data:image/svg'], .ortlab-panel table").first.wait_for(
            timeout=1000 * CELLS_SECONDS
        )
    page.screenshot(path=screenshots / "records.png")
