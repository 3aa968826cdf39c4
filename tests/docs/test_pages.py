"""Every code block of the README and of the manual runs as it is written, and prints what the page says."""

from __future__ import annotations

import nbformat
import pages
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.timeout(1800)  # a page beside others on a busy machine


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.name)
def test_a_page_tells_what_each_of_its_blocks_is(path):
    assert pages.read(path).notes == []


WITH_CODE = [path for path in pages.PAGES if any(not block.mark for block in pages.read(path).blocks)]


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: path.name)
def test_the_blocks_of_a_page_run_in_order(executed, path):
    page = executed(path)
    faults = [f"{block}\n{block.source}\n{block.fault}" for block in page.blocks if block.fault]
    assert not faults, "\n\n".join(faults)
    assert all(block.ran for block in page.blocks if not block.mark)


def test_the_examples_of_the_reference_run_in_order_and_show_what_they_showed(tmp_path):
    notebook = nbformat.read(pages.DOCS / "examples.ipynb", as_version=4)
    stored = {cell.id: kinds(cell) for cell in notebook.cells}
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, kernel_name="python3", timeout=pages.TIMEOUT_S, resources=place).execute()
    assert {cell.id: kinds(cell) for cell in notebook.cells} == stored


def kinds(cell) -> set[str]:
    """What a cell shows, but for the words: what it prints, and each form in which it shows its value."""
    found = set()
    for output in cell.get("outputs", ()):
        found |= {output.get("name")} if output.output_type == "stream" else {*output.data}
    return found - {"stderr"}
