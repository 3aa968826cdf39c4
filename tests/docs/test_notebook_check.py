"""The check of the notebooks: a cell fails that shows an error or another output, as it would for a reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

REPOSITORY = Path(__file__).parents[2]

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
