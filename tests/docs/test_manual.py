"""What the manual says beside its code blocks: messages that are quoted, links, figures, what was measured."""

from __future__ import annotations

import ast
import collections
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ortlab
from ortlab.options.options import switches
from ortlab.options.switches import Group

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


def measured(bench: str) -> dict:
    """What a benchmark has stored."""
    return json.loads((REPOSITORY / f"bench/results/{bench}.json").read_text(encoding="utf-8"))


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


def test_no_page_and_no_help_names_a_row_of_a_list_that_readers_do_not_have():
    code = [path for folder in (PACKAGE, REPOSITORY / "bench") for path in folder.rglob("*.py")]
    assert len(code) > 200
    named = {
        str(path.relative_to(REPOSITORY)): found
        for path in (*WRITTEN, *code)
        if path.name != "contributing.md"  # says how a test is put to a row
        and (found := re.findall(r"\b[Rr]ows? [A-Z]\d+\b", path.read_text(encoding="utf-8")))
    }
    assert named == {}


def script(name: str):
    """Import a script of the manual, which lies in no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_switch_has_a_section_with_advice_an_example_and_what_was_measured():
    made = script("switch_pages")
    pages = "\n".join(made.page(group) for group in Group)
    sections = dict(re.findall(r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", pages))
    assert list(sections) == [one.name for one in switches()]
    for one in switches():
        section = sections[one.name]
        assert one.read(made.example(one)) != one.default
        assert f"%ort_set {one.name}={made.example(one)}\n" in section
        assert one.when in section
        assert one.unless in section
        models = re.findall(r"(?m)^\| `.*?` \| ([\w-]+) \|", section)
        assert set(models) == {"BERT", "GPT-2", "LSTM"} or "*Not measured: " in section
    assert made.index().count("\n| [`") == len(sections)


def test_every_module_of_the_reference_stands_on_one_page():
    made = script("module_pages")
    modules = made.modules()
    assert len(modules) == len({*modules}) > 50
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_every_public_name_and_magic_has_an_example_with_an_output():
    made = script("reference_pages")
    cells = made.examples()
    lacking = [name for name in made.names() if name not in cells or not cells[name]["outputs"]]
    assert lacking == []
    assert cells.keys() - {*made.names()} == {"setup", "end"}
    failed = [
        name for name, cell in cells.items() for one in cell["outputs"] if one["output_type"] == "error"
    ]
    assert failed == []


def test_the_figures_are_what_the_script_draws():
    drawings = script("drawings")
    old = [
        name
        for name, draw in drawings.DRAWINGS.items()
        if (DOCS / "images" / name).read_text(encoding="utf-8") != str(draw())
    ]
    assert old == [], "python docs/drawings.py draws them again"
    shown = "".join(prose(path) for path in WRITTEN)
    assert [name for name in drawings.DRAWINGS if name not in shown] == []


def test_the_first_screen_says_what_was_measured():
    found = measured("memory_engines")
    rows = found["tables"]["Each candidate, and the fastest of ONNX Runtime that needs no more memory"]
    eager = {row["model"]: row for row in rows if row["candidate"] == "eager"}

    def less(share: float) -> str:
        return f"{abs(share):.0%}".replace("%", " %")

    def of(name: str, than: str = "") -> str:
        row = eager[name]
        memory = row["its rise [MiB]"] / row["rise [MiB]"] - 1
        assert memory < 0  # the words below
        low, high = (float(end) for end in row["interval"].split(" - "))
        time = f"{less(row['ratio'] - 1)} {'less' if row['ratio'] < 1 else 'more'} time"
        time = f"and {time}" if high < 1 or low > 1 else "with no clear difference in time"
        return f"{less(memory)} less memory{than} {time}"

    said = f"a BERT needs {of('BERT', ' than in PyTorch')}, a GPT-2 {of('GPT-2')}, a Llama {of('Llama')}."
    for page in (REPOSITORY / "README.md", DOCS / "index.md"):
        assert said in " ".join(page.read_text(encoding="utf-8").split())


def test_the_table_of_engines_says_what_was_measured():
    held = "Each candidate, and the fastest of ONNX Runtime that needs no more memory"
    rows = [
        row for name in ("memory_engines", "memory_engines_large") for row in measured(name)["tables"][held]
    ]
    page = (DOCS / "sweeps.md").read_text(encoding="utf-8")
    header = re.search(r"(?m)^\| \|( `eager` .*)\|$", page)
    assert header is not None
    candidates = re.findall(r"`([^`]*)`", header[1])
    assert {row["candidate"] for row in rows} == set(candidates)
    for model in {row["model"] for row in rows}:
        ratios = {row["candidate"]: f"{row['ratio']:.2f}" for row in rows if row["model"] == model}
        assert f"| {model} | {' | '.join(ratios[one] for one in candidates)} |" in page


def test_the_table_of_speeds_says_what_was_measured():
    found = measured("models_speed")
    page = (DOCS / "speed.md").read_text(encoding="utf-8")
    sizes = ("small", "middle", "large")
    cells: dict[str, dict[str, str]] = {}
    for row in found["tables"]["Forward, backward and AdamW, worst first"]:
        kind, _, size = row["model"].rpartition(" ")
        time, ratio = row["PyTorch [ms]"], row["ORT / PyTorch"]
        cells.setdefault(kind, {})[size] = f"{ratio:.2f} ({time:.1f} ms)"
    assert len(cells) == 20
    for kind, by_size in cells.items():
        assert f"| {kind} | {' | '.join(by_size[size] for size in sizes)} |" in page
    medians = {claim["claim"]: f"{claim['value']:.2f}" for claim in found["claims"]}
    row = " | ".join(f"**{medians[f'ORT / PyTorch, median of the {size} models']}**" for size in sizes)
    assert f"| **median** | {row} |" in page
    assert medians["ORT / PyTorch, median of the models"] in page.partition("\n| ")[0]


def test_the_table_of_floors_says_what_was_measured():
    found = measured("recompute_floor")
    page = (DOCS / "recompute.md").read_text(encoding="utf-8")
    columns = ["checkpointed layers", "memory_level=1"]
    columns += [f"recompute={words}" for words in ("layers", "layers:1/2", "layers:1/2 nested")]
    rows = found["tables"]["Rise of a step above its start"]
    for name in {row["model"] for row in rows}:
        of_model = [row for row in rows if row["model"] == name]
        cells = [" / ".join(f"{row[f'{column} [MiB]']:.1f}" for row in of_model) for column in columns]
        assert f" | {' | '.join(cells)} |" in page


def test_the_page_of_benchmarks_shows_the_families_that_were_trained():
    printed = subprocess.run(
        [sys.executable, "bench/families.py", "--table"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    page = (REPOSITORY / "bench/README.md").read_text(encoding="utf-8")
    section = re.search(r"(?s)<!-- families -->\n(.*?)\n<!-- end of families -->", page)
    assert section is not None
    assert printed.stdout.strip() in section[1], "python bench/families.py --table prints it"


def test_the_page_of_models_says_how_outside_ones_ended():
    (rows,) = measured("outside_models")["tables"].values()
    ended = collections.Counter(row["verdict"] for row in rows)
    assert ended.keys() == {"parity", "refused"}  # the words below
    number = {3: "three"}[ended["refused"]]
    said = f"Of {len(rows)} public models"
    page = " ".join((DOCS / "compatibility.md").read_text(encoding="utf-8").split())
    assert said in page
    assert f"{ended['parity']} train with parity over batches of two sizes, and {number} are refused" in page


def test_the_page_of_models_says_how_families_ended():
    counts = measured("families")["counts"]
    page = " ".join((DOCS / "compatibility.md").read_text(encoding="utf-8").split())
    runs = sum(counts.values()) - counts["not run"]
    assert f"Of {sum(counts.values())} families of transformers outside the zoo, PyTorch runs {runs}" in page
    assert f"{counts['within']} train within 1e-5 of it, {counts['rounding']} within rounding" in page
    assert f"{counts['differs']} differ by more, and {counts['error']} are refused" in page


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


def test_the_changelog_begins_with_this_version_on_one_screen():
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    screen, _, detail = text.partition("<!-- what follows")
    assert re.findall(r"(?m)^## (.*)", screen)[0] == ortlab.__version__
    assert len(screen.splitlines()) <= 50
    assert detail.count("\n- ") > 100
    speed = measured("models_speed")
    found = [f"{claim['value']:.2f}" for claim in speed["claims"]]
    assert re.search(r"takes ([\d.]+) of PyTorch's", screen)[1] in found
    assert re.search(r"and up to ([\d.]+) ", screen)[1] in found
