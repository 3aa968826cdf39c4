"""A real JupyterLab and a real Chromium, each started once, with nothing of the user's configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from forked import forked

from .server import CHROMIUM_FLAGS, JupyterServer, chromium_executable, started

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page

CELLS_SECONDS = 120
"""How long a kernel may take to start, import torch and run a notebook's cells."""

CLICK_SECONDS = 120
"""How long a click may take to show its result, an export and a rerun included."""

PATIENCE = """
const timeout = AbortSignal.timeout.bind(AbortSignal);
AbortSignal.timeout = (ms) => timeout(ms === 2000 ? 60000 : ms);
"""
"""Lets anywidget wait for a widget's module for a minute instead of 2 s, before the page's own code runs.

What happens to a widget that it gives up is a test of its own; two cores that run two checks at a time take longer now
and then, and the complaints of all other pages are counted.
"""


@pytest.fixture(scope="session")
def jupyter(tmp_path_factory) -> Iterator[JupyterServer]:
    with forked(tmp_path_factory.mktemp("kernels")), started(tmp_path_factory.mktemp("jupyter")) as server:
        yield server


@pytest.fixture(scope="session")
def chromium():
    from playwright.sync_api import sync_playwright

    executable = chromium_executable()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


@contextmanager
def pages(jupyter: JupyterServer, chromium: Browser, folder: Path) -> Iterator[Callable[..., Page]]:
    """Open notebooks in fresh pages; the console errors of every page are checked at the end.

    Yields a function of the notebook's name. `origin` is where the browser finds the server, `expected` a pattern of
    console errors that belong to the case, `script` runs in the page before anything else.
    """
    complaints: list[str] = []
    contexts = []
    notebooks = set()

    def open_page(
        notebook: str,
        *,
        theme: str = "light",
        width: int = 1280,
        height: int = 1000,
        origin: str = "",
        expected: str = "",
        script: str = PATIENCE,
        **context_options: Any,
    ) -> Page:
        jupyter.use_theme(theme)
        notebooks.add(notebook)
        context = chromium.new_context(viewport={"width": width, "height": height}, **context_options)
        contexts.append(context)
        context.set_default_timeout(1000 * CLICK_SECONDS)
        context.add_init_script(script)
        page = context.new_page()

        def complain(text: str) -> None:
            if not expected or not re.search(expected, text):
                complaints.append(text)

        page.on("pageerror", lambda error: complain(str(error)))
        page.on("console", lambda message: complain(message.text) if message.type == "error" else None)
        address = jupyter.address(notebook).replace(jupyter.url, origin or jupyter.url)
        page.goto(address, timeout=1000 * CELLS_SECONDS)
        page.wait_for_selector(".jp-Notebook", timeout=1000 * CELLS_SECONDS)
        # Cells that are run before the kernel has been connected stay as they are.
        page.get_by_text("| Idle").first.wait_for(timeout=1000 * CELLS_SECONDS)
        return page

    yield open_page
    for number, context in enumerate(contexts):
        for page in context.pages:
            page.screenshot(path=folder / f"page-{number}.png")  # what a failed test has seen last
        context.close()
    jupyter.end_kernels(notebooks)
    assert complaints == []


@pytest.fixture
def open_notebook(jupyter, chromium, tmp_path):
    """Open a notebook in a fresh page that is closed at the end of the test; see `pages`."""
    with pages(jupyter, chromium, tmp_path) as open_page:
        yield open_page
