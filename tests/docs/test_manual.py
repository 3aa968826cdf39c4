"""What the manual says of the package beside its code blocks: messages that are quoted, pages that are linked."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import ortlab

PACKAGE = Path(ortlab.__file__).parent
DOCS = PACKAGE.parent / "docs"


def texts() -> str:
    """All texts in the code of the package, a line each; what stands in braces is left out of them."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [one.value if isinstance(one, ast.Constant) else "{}" for one in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_message_in_troubleshooting_is_one_of_the_package():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [re.sub(r"\{\w+\}", "{}", one) for one in re.findall(r"(?m)^`(.+)`\n:", page)]
    assert len(quoted) > 15
    known = texts()
    assert [one for one in quoted if one not in known] == []


def test_every_page_stands_once_in_the_contents():
    contents = re.findall(
        r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.DOTALL
    )
    lines = [line for one in contents for line in one.splitlines() if line and not line.startswith(":")]
    named = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    assert len(named) == len({*named})
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index", "_model", "_steps"}
    assert pages == {name for name in named if not name.startswith("_generated/")}


def test_what_the_recipes_name_is_there():
    page = (DOCS / "adding.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:ortlab|tests|bench|docs)/[\w/.]*)`", page)) - {
        "bench/name.py",
        "bench/results/name.json",
    }
    assert len(files) > 15
    assert [name for name in sorted(files) if not (DOCS.parent / name).exists()] == []
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    for name in (
        "def switch(",
        "class Effect(",
        "class Shown",
        "def install_all(",
        "def replace(",
        "def line(",
    ):
        assert name in code


def test_the_citation_is_of_this_version():
    cited = (DOCS.parent / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {ortlab.__version__}\n" in cited
