"""What the manual says beside its code blocks: messages that are quoted, links, figures, what was measured."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

import ortlab

PACKAGE = Path(ortlab.__file__).parent
REPOSITORY = PACKAGE.parent
DOCS = REPOSITORY / "docs"
WRITTEN = sorted(
    path
    for folder, pattern in (
        (REPOSITORY, "*.md"),
        (DOCS, "*.md"),
        (REPOSITORY / "bench", "*.md"),
        (PACKAGE, "**/*.md"),
        (REPOSITORY / "notebooks", "*.ipynb"),
    )
    for path in folder.glob(pattern)
)


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


def prose(path: Path) -> str:
    """The text of a page, or of the Markdown cells of a notebook, without blocks of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"(?ms)^ *```.*?^ *```", "", text)


def anchors(path: Path) -> set[str]:
    """The names that links can give the headings of a page, as myst and GitHub make them."""
    heads = re.findall(r"(?m)^#+ (.*)", prose(path))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_link_inside_the_repository_leads_somewhere(path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert broken == []


def test_the_figures_are_what_the_script_draws():
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    old = [
        name
        for name, draw in drawings.DRAWINGS.items()
        if (DOCS / "images" / name).read_text(encoding="utf-8") != str(draw())
    ]
    assert old == [], "python docs/drawings.py draws them again"
    shown = "".join(prose(path) for path in WRITTEN)
    assert [name for name in drawings.DRAWINGS if name not in shown] == []


def test_the_first_screen_says_what_was_measured():
    found = json.loads((REPOSITORY / "bench/results/memory_engines.json").read_text(encoding="utf-8"))
    held = {
        row["model"]: (row["its rise [MiB]"] / row["rise [MiB]"] - 1, row["ratio"] - 1)
        for row in found["tables"][
            "Each candidate, and the fastest of ONNX Runtime that needs no more memory"
        ]
        if row["candidate"] == "eager"
    }

    def less(share: float) -> str:
        return f"{abs(share):.0%}".replace("%", " %")

    (bert, gpt, llama) = (held[name] for name in ("BERT", "GPT-2", "Llama"))
    assert bert[0] < 0 > bert[1] and gpt[0] < 0 < gpt[1] and llama[1] > 0  # noqa: PT018 - the words below
    said = (
        f"a BERT needs {less(bert[0])} less memory than in PyTorch and {less(bert[1])} less time, "
        f"a GPT-2 {less(gpt[0])} less memory and {less(gpt[1])} more time. "
        f"For a Llama at equal memory, PyTorch is ahead by {less(llama[1])}."
    )
    for page in (REPOSITORY / "README.md", DOCS / "index.md"):
        assert said in " ".join(page.read_text(encoding="utf-8").split())


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
