"""The order of the rooms: a module imports from its own and from those above it, as docs/contributing.md lists them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ortlab

PACKAGE = Path(ortlab.__file__).parent

PAGE = PACKAGE.parent / "docs" / "contributing.md"
ROOMS = [
    name
    for row in re.findall(r"(?m)^\| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8").partition("| room |")[2])
    for name in re.findall(r"`(\w+)(?:/|\.py)`", row)
]
"""From the one that knows nobody to the one that may know all: the first column of the page's table."""

OUTSIDE = {"ortlab", "ortlab.loading", "ortlab.optim", "ortlab.ortmodule"}
"""The package's own names, what reads any record, and what users import by itself: these stand in no room."""

EXCEPTIONS = {
    # The base of every record asks for its page when it is shown, and not before.
    ("ortlab.shown", "ortlab.notebook.widgets.display"),
    ("ortlab.shown", "ortlab.render.headlines"),
    ("ortlab.shown", "ortlab.render.lab_pages"),
    ("ortlab.shown", "ortlab.render.pages"),
    ("ortlab.shown", "ortlab.render.text"),
}
"""Imports against the order. This set may only shrink."""


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    """Modules of ortlab that a file imports when it runs, wherever in it; not those that only type hints need."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hints = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in hints:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ortlab":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (
                    inner
                    if (PACKAGE.parent / inner.replace(".", "/")).with_suffix(".py").exists()
                    else node.module
                )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "ortlab")


def test_every_module_stands_in_a_room():
    assert len(ROOMS) == len({*ROOMS}) > 15
    assert {name for name, _ in modules() if room(name) not in ROOMS} == OUTSIDE


def test_imports_run_one_way():
    found = {
        (name, imported)
        for name, path in modules()
        if name not in OUTSIDE
        for imported in imports(path)
        if imported not in OUTSIDE and ROOMS.index(room(imported)) > ROOMS.index(room(name))
    }
    assert found == EXCEPTIONS


def test_no_modules_import_each_other_in_a_circle():
    """Wherever in a file the import stands: an import inside a function is one as well."""
    left = {
        name: {one for one in imports(path) if one not in OUTSIDE and (name, one) not in EXCEPTIONS}
        for name, path in modules()
        if name not in OUTSIDE
    }
    while free := {name for name, imported in left.items() if not imported & (left.keys() - {name})}:
        left = {name: imported for name, imported in left.items() if name not in free}
    assert left == {}  # what is left imports itself by way of others, or imports what does


def test_the_engines_page_names_every_file_and_folder_of_the_room():
    engine = PACKAGE / "engine"
    page = (engine / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:operators/)?([\w*]+)(?:\.py|/)?`", page))
    there = {
        path.stem for path in engine.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    operators = {path.stem for path in (engine / "operators").glob("*.py") if "symbolics" not in path.stem}
    assert (there | operators) - named - {"__init__", "operators"} == set()
    assert set(re.findall(r"`(?:operators/)?(\w+)(?:\.py|/)`", page)) <= there | operators | {
        "symbolic_words"
    }


def test_a_lab_can_be_imported_before_onnxruntime_is():
    """Its first import has to be that of `ortlab.engine.installation.import_apart`."""
    code = "import sys, ortlab.lab.lab; sys.exit('onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
