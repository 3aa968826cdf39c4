"""The notebooks: a cell fails that shows an error or another output; what is stored can be read as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

REPOSITORY = Path(__file__).parents[2]
BOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"

SHOWS_AN_ERROR = """
from IPython.core.error import UsageError
from IPython import get_ipython
def no_such_switch(line):
    raise UsageError(line)
get_ipython().register_magic_function(no_such_switch)
%no_such_switch memory
"""


@pytest.mark.parametrize(
    ("source", "tags", "said"),
    [
        ("print('as stored')", [], ""),
        ("print('another')", [], "Cell outputs differ"),
        (SHOWS_AN_ERROR, ["nbval-ignore-output"], "UsageError: memory"),
        ("1 / 0", ["nbval-ignore-output"], "division by zero"),
    ],
    ids=["as stored", "another output", "an error that a magic shows", "an exception"],
)
def test_a_cell_that_goes_wrong_fails(source, tags, said, tmp_path):
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": tags}, execution_count=1)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="as stored\n")]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel})
    nbformat.write(book, tmp_path / "book.ipynb")
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "nbval_errors", "--nbval", str(tmp_path / "book.ipynb")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (tested.returncode == 0) == (not said), tested.stdout
    assert said in tested.stdout


def hidden(cell: nbformat.NotebookNode) -> bool:
    """Tell whether a cell is folded in JupyterLab and left out of the manual."""
    tagged = "remove-cell" in cell.metadata.get("tags", [])
    assert tagged == cell.metadata.get("jupyter", {}).get("source_hidden", False)
    return tagged


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
class TestANotebook:
    def test_is_short_and_checks_itself_out_of_sight(self, book):
        cells = nbformat.read(book, as_version=4).cells
        assert sum(not hidden(cell) for cell in cells) <= 25
        assert any(hidden(cell) and "assert" in cell.source for cell in cells)
        assert [cell.source for cell in cells if not hidden(cell) and "assert " in cell.source] == []
        # What is folded shows nothing that a reader would miss.
        assert [cell.source for cell in cells if hidden(cell) and cell.get("outputs")] == []

    def test_was_executed_in_order_and_to_its_end(self, book):
        code = [cell for cell in nbformat.read(book, as_version=4).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
        assert [output for cell in code for output in cell.outputs if output.output_type == "error"] == []

    def test_shows_its_figures_without_a_kernel(self, book):
        for cell in nbformat.read(book, as_version=4).cells:
            shown = [output.get("data", {}) for output in cell.get("outputs", [])]
            for data in shown:
                html = "".join(data.get("text/html", ""))
                assert "<svg" not in html  # JupyterLab takes it out of a notebook that is not trusted
                if WIDGET in data:
                    assert html or any("text/html" in other for other in shown)
            if "ortlab.plot(" in cell.source:
                assert any("image/png" in data for data in shown)

    def test_tells_no_figure_that_no_cell_has(self, book):
        cells = nbformat.read(book, as_version=4).cells
        code = " ".join(
            cell.source + json.dumps(cell.outputs, ensure_ascii=False)
            for cell in cells
            if cell.cell_type == "code"
        )
        told = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
        figures = re.findall(r"\d[\d.,]* ?(?:%|x\b|ms\b|s\b|[KMG]i?B\b|nodes\b|steps\b|times\b)", told)
        assert [one for one in figures if re.sub(r"\D+$", "", one) not in code] == []
        assert (
            re.findall(r"\b(?:is|are|trains|runs) (?:slower|faster|quicker)\b", told) == []
        )  # each machine has its own


def test_seven_tutorials_in_order():
    assert [book.stem[:3] for book in BOOKS] == [f"{number:02d}_" for number in range(1, 8)]
    for page in ("README.md", "docs/index.md"):
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        assert [book.stem for book in BOOKS if book.stem not in text] == []
