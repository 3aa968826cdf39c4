"""A real kernel for cells, with nothing of the user's configuration."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def executed(folder: Path, *cells: str) -> nbformat.NotebookNode:
    """Run cells in a fresh kernel; return the notebook that comes of it."""
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    document.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    client = NotebookClient(document, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "PYTHONPATH": path, "IPYTHONDIR": str(folder / "ipython")})
    return document
