"""The README's first minute: the manual's model, cells in other orders, commands that are tested elsewhere."""

from __future__ import annotations

import copy
import re

import pages
import pytest

pytestmark = pytest.mark.timeout(1800)  # a page beside others on a busy machine

README = pages.PAGES[0]


@pytest.fixture(scope="module")
def blocks():
    return pages.read(README).blocks


def cells(blocks: list[pages.Block]) -> tuple[list[pages.Block], list[pages.Block]]:
    """The cells that set up (model, wrap, step), and each line of the later ones as a cell of its own."""
    kernel = [block for block in blocks if block.info == "python"]
    (step,) = [number for number, block in enumerate(kernel) if block.source.startswith("%%ort_step")]
    later = []
    for block in kernel[step + 1 :]:
        for line in block.source.splitlines():
            one = copy.copy(block)
            one.source, one.expected = line, None
            later.append(one)
    return kernel[: step + 1], later


def test_the_model_is_that_of_the_manual(blocks):
    (model,) = pages.read(pages.DOCS / "_model.md").blocks
    assert [block.source for block in blocks].count(model.source) == 1


def test_what_the_readme_installs_is_what_the_checks_install(blocks):
    installed, tested = [block.source for block in blocks if block.mark == "installs"]
    checks = (pages.REPOSITORY / "run-tests").read_text(encoding="utf-8")
    assert "-c requirements/constraints.txt" in installed
    assert "-c requirements/constraints.txt --group dev -e '.[cpu]'" in checks
    assert "-e '.[cpu]' && .venv/bin/ortlab demo" in installed  # the demo is run by tests/unit/test_demo.py
    assert tested == "./run-tests\n"


@pytest.mark.parametrize(
    "file",
    ["binder/requirements.txt", "environment.yml", ".devcontainer/devcontainer.json", "docs/installation.md"],
)
def test_every_other_way_installs_the_environment_of_the_readme(file):
    text = (pages.REPOSITORY / file).read_text(encoding="utf-8")
    assert re.search(r"-c (\.\./)?requirements/constraints\.txt", text)
    assert re.search(r"-e '?\.\[cpu\]'?", text)


@pytest.mark.parametrize("path", [README, pages.DOCS / "index.md"], ids=lambda path: path.name)
def test_the_lines_that_the_first_screen_adds_are_those_of_the_first_minute(blocks, path):
    run = [
        re.sub(r"\s+# .*", "", line)
        for block in blocks
        if block.info == "python"
        for line in block.source.splitlines()
    ]
    added = pages.read(path).added
    assert len(added) == 4
    assert [line for line in added if line not in run] == []


def test_any_cell_may_follow_the_set_up_and_any_other(blocks, tmp_path):
    set_up, later = cells(blocks)
    assert [block.source.split()[0] for block in later] == ["%ort_budget", "%ort_compare", "%ort_graph"]
    budget, compare, graph = later
    # The page itself has the budget first; here each of the others is, and all of them stand the other way round.
    # In fewer steps: what the page promises of them, `test_pages.py` holds.
    for block in set_up:
        block.source = block.source.replace("%%ort_step -n 20", "%%ort_step -n 3")
    again = [copy.copy(block) for block in set_up]
    order = [*set_up, graph, compare, budget, *again, copy.copy(compare)]
    for block in order:
        block.expected = None
    pages.run(order, tmp_path)
    faults = [f"{block}\n{block.source}\n{block.fault}" for block in order if block.fault]
    assert not faults, "\n\n".join(faults)
    assert all(block.ran for block in order)
