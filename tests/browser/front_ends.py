"""The panel in Notebook 7 and Voila, which nothing else needs: `nox -s front_ends` installs both and runs this."""

from __future__ import annotations

import pytest

from .conftest import CELLS_SECONDS, PATIENCE
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

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("where", ["notebooks", "voila/render"])
def test_the_panel_lives_and_acts(jupyter, chromium, notebook, screenshots, where):
    name = notebook(WRAP, STEP, SHOW)
    context = chromium.new_context(viewport={"width": 1300, "height": 900})
    context.set_default_timeout(1000 * CELLS_SECONDS)
    context.add_init_script(PATIENCE)
    page = context.new_page()
    page.goto(f"{jupyter.url}/{where}/{name}?token={jupyter.token}")
    if where == "notebooks":  # Voila runs the cells itself
        page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for()
        run_all(page)
    panel = page.locator(".ortlab-panel").first
    shown(panel, "Last run #1 ort")
    assert page.locator(".ortlab-saved").count() == 1
    assert not page.locator(".ortlab-saved").is_visible()
    panel.scroll_into_view_if_needed()
    page.screenshot(path=screenshots / f"front-end-{where.partition('/')[0]}.png")

    tab(panel, "Switches")
    panel.get_by_label("compute_optimizer", exact=True).uncheck()
    shown(panel, "rebuild pending")
    press(panel, "Rerun")
    shown(panel, "Last run #2 ort (compute_optimizer=False)")
    tab(panel, "Memory")
    panel.locator(".ortlab-bar").first.wait_for()
    tab(panel, "Graph")
    panel.locator(".ortlab-map[data-ready]").wait_for()
    assert height(panel) <= HEIGHT
    context.close()
    jupyter.end_kernels({name})
