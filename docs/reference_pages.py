"""A page for each public name and each magic: what its docstring says, and its example with the output it had."""

from __future__ import annotations

import copy
import inspect
import json
import re
from pathlib import Path
from typing import Any

import ortlab
from ortlab.lab.lab import Lab
from ortlab.notebook import magics

HERE = Path(__file__).parent


def names() -> list[str]:
    """Every public name: of the package, of a lab, and the magics."""
    of_lab = [name for name in vars(Lab) if not name.startswith("_")]
    return [*(f"ortlab.{name}" for name in ortlab.__all__), *(f"lab.{name}" for name in of_lab), *_magics()]


def examples() -> dict[str, dict[str, Any]]:
    """Return the cell of each name in `docs/examples.ipynb`, which has the name for its tag."""
    notebook = json.loads((HERE / "examples.ipynb").read_text(encoding="utf-8"))
    return {cell["metadata"]["tags"][0]: cell for cell in notebook["cells"] if cell["cell_type"] == "code"}


def write(folder: Path) -> None:
    """Write a page for each name into the folders `reference` and `magics`, and a table of each of the two."""
    cells = examples()
    for kind, prefixes in (("reference", ("ortlab.", "lab.")), ("magics", ("%",))):
        (folder / kind).mkdir(exist_ok=True)
        rows = ["| | |", "|---|---|"]
        for name in names():
            if name.startswith(prefixes):
                file = name.replace("%", "")
                page = folder / kind / f"{file if name[:2] != '%%' else f'{file}_cell'}.ipynb"
                page.write_text(json.dumps(notebook(name, cells[name])), encoding="utf-8")
                rows.append(f"| [`{name}`](_generated/{kind}/{page.name}) | {_summary(name)} |")
        (folder / f"{kind}.md").write_text("\n".join([*rows, ""]), encoding="utf-8")


def notebook(name: str, cell: dict[str, Any]) -> dict[str, Any]:
    """Return the page of a name."""
    if name.startswith("%"):
        described = inspect.cleandoc(_magics()[name].__doc__ or "")
    else:
        described = (
            f".. auto{_kind(name)}:: {name.replace('lab.', 'ortlab.Lab.', 1) if name[:4] == 'lab.' else name}"
        )
        described += "\n   :no-members:" if inspect.isclass(_object(name)) else ""
    shown = {**copy.deepcopy(cell), "metadata": {}}
    shown.pop("id", None)
    above = _markdown(
        f"# `{name}`\n\n{_place(name)}````{{eval-rst}}\n{described}\n````\n\n## Example\n\n{_before(name)}"
    )
    return {"cells": [above, shown], "metadata": _METADATA, "nbformat": 4, "nbformat_minor": 4}


_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def _place(name: str) -> str:
    """Return the place that the page of a name's source links back to: the name where it is defined."""
    if not name.startswith("ortlab."):
        return ""
    found = _object(name)
    return f'<span id="{found.__module__}.{found.__qualname__}"></span>\n\n'


def _before(name: str) -> str:
    """Say what the example goes on from."""
    lab = (
        ""
        if name in {"ortlab.preflight", "ortlab.wrap", "%ort_preflight", "%ort_wrap"}
        else ", a `lab` around it"
    )
    return (
        f"*Behind a small BERT, a batch{lab} and a step `train`, as `docs/examples.ipynb` has them. Executed with the "
        "output below; times are of a busy machine.*"
    )


def _magics() -> dict[str, Any]:
    """Every magic, by the name that a user types."""
    found = {}
    for kind in (one for one in vars(magics).values() if hasattr(one, "magics")):
        for prefix, table in (("%", "line"), ("%%", "cell")):
            for name, method in kind.magics[table].items():
                found[f"{prefix}{name}"] = getattr(kind, method) if isinstance(method, str) else method
    return found


def _object(name: str) -> Any:
    owner, _, own = name.partition(".")
    return inspect.getattr_static(Lab, own) if owner == "lab" else getattr(ortlab, own)


def _kind(name: str) -> str:
    found = _object(name)
    if isinstance(found, property):
        return "property"
    if name.startswith("lab."):
        return "method"
    return "class" if inspect.isclass(found) else "function"


def _summary(name: str) -> str:
    """Return the first sentence of its docstring."""
    owner, _, own = name.partition(".")
    found = _magics()[name] if name.startswith("%") else getattr(Lab if owner == "lab" else ortlab, own)
    first = (inspect.getdoc(found) or "").split("\n\n")[0]
    return re.sub(r"\s+", " ", first).replace("|", "\\|").replace("``", "`")
