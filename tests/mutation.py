"""Break the package in random places, one at a time, and say which of them the tests do not notice.

    python tests/mutation.py                               # 50 places; about an hour on an idle machine
    python tests/mutation.py --places 9 --seed 3 --only ortlab/memory

Each mutant flips a comparison, drops a line or changes a constant, in turn, in a copy of the repository. The test files
that name what was changed run until one test fails, those that name most of it first; a test that fails without the
change as well notices nothing. What needs more than `--seconds` is not noticed, so the share is a lower bound; they are
seconds of the processor, so that a busy machine finds the same.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "build", "_build", "_generated", "__pycache__", "results", "images")
KINDS = ("comparison", "line", "constant")
PAIRS = [(ast.Eq, ast.NotEq), (ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
FLIPPED = dict(PAIRS) | {right: left for left, right in PAIRS}
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.Delete, ast.Continue, ast.Break)
LEFT_OUT = {"annotation", "returns", "decorator_list"}
OF_ALL = ("tests/unit/test_lab.py", "tests/unit/test_analyses.py", "tests/magics/test_records_shown.py")
"""Tests that reach most of the package without naming it: they come last."""


@dataclass(frozen=True)
class Place:
    """Where a file is changed, and what stands there then."""

    file: str
    function: str
    kind: str
    node: ast.AST
    new: str

    def mutated(self, text: str) -> str:
        """Put in what is new; `ast` counts rows from one, and columns in bytes."""
        lines = [line.encode() for line in text.splitlines(keepends=True)]
        first, last = self.node.lineno - 1, self.node.end_lineno - 1
        joined = (
            lines[first][: self.node.col_offset] + self.new.encode() + lines[last][self.node.end_col_offset :]
        )
        return b"".join([*lines[:first], joined, *lines[last + 1 :]]).decode()


def changed(node: ast.AST, function: str) -> tuple[str, str]:
    """Say what kind of mutant a node can be, and what would stand there; nothing where it can be none."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        flipped = ast.Compare(node.left, [FLIPPED[type(node.ops[0])]()], node.comparators)
        return "comparison", f"({ast.unparse(flipped)})"
    if isinstance(node, DROPPED) and function:
        return "line", "pass"
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        return "constant", repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value
        and " " not in node.value
    ):
        return "constant", repr(node.value * 2)
    return "", ""


def places(file: str, node: ast.AST, function: str = "") -> Iterator[Place]:
    """Find what can be changed in a file; annotations, docstrings and sentences are left out."""
    kind, new = changed(node, function)
    if kind:
        yield Place(file, function, kind, node, new)
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ):
        return
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}".strip(".")
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and name not in LEFT_OUT and not text:
                yield from places(file, child, function)


def tests_of(place: Place, text: str, tests: dict[str, str]) -> list[str]:
    """Choose the test files that name the function, its module or what else is public there, or have its name."""
    module = place.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    room, _, stem = module.rpartition(".")
    public = [one.name for one in ast.parse(text).body if isinstance(one, (ast.FunctionDef, ast.ClassDef))]

    def weight(test: str) -> int:
        def named(name: str) -> bool:
            return name[:1] not in {"_", ""} and re.search(rf"\b{name}\b", tests[test]) is not None

        imported = module in tests[test] or re.search(rf"from {room} import .*\b{stem}\b", tests[test])
        shared = {*Path(test).stem.split("_")} & {*stem.split("_")}
        found = 4 * named(place.function.rpartition(".")[2]) + 3 * bool(imported) + 2 * len(shared)
        return found + min(3, sum(map(named, public))) + (room.rpartition(".")[2] in test.split("/"))

    found = sorted(filter(weight, tests), key=lambda test: (-weight(test), len(tests[test])))
    return [*found, *(test for test in OF_ALL if test not in found)]


def first_failure(copy: Path, tests: list[str], seconds: int) -> str:
    """Run tests in a child until one fails, and name that one; torch is imported there already."""
    said = copy / "failed.txt"
    said.unlink(missing_ok=True)

    class Watch:
        def pytest_runtest_logreport(self, report) -> None:
            if report.failed and not said.exists():
                said.write_text(report.nodeid, encoding="utf-8")

        pytest_collectreport = pytest_runtest_logreport

    if not (child := os.fork()):
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:1] = [str(copy)]
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        quiet = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
        os._exit(pytest.main([*quiet, *tests], plugins=[Watch()]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests have started
    if said.exists():
        return said.read_text(encoding="utf-8")
    if code > 2:
        raise RuntimeError(f"pytest did not run {tests}.")
    return f"the process ended by signal {-code}" if code < 0 and code != -signal.SIGXCPU else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--places", type=int, default=50)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--seconds", type=int, default=300, help="of the processor for each place")
    parser.add_argument("--only", default="ortlab", help="a file or folder of the package")
    asked = parser.parse_args()
    import torch  # noqa: F401 - the children have it, and need not import it each
    import transformers  # noqa: F401

    copy = shutil.copytree(REPOSITORY, Path(tempfile.mkdtemp()) / "copy", ignore=NOT_COPIED)
    texts = {
        str(one.relative_to(copy)): one.read_text(encoding="utf-8") for one in sorted(copy.rglob("*.py"))
    }
    slow = ("tests/browser/", "tests/docs/", "tests/packaging/")
    tests = {name: text for name, text in texts.items() if "/test_" in name and not name.startswith(slow)}
    files = [name for name in texts if name.startswith(asked.only)]
    found = [place for name in files for place in places(name, ast.parse(texts[name]))]
    drawn, noticed = random.Random(asked.seed), 0
    for number in range(asked.places):
        place = drawn.choice([one for one in found if one.kind == KINDS[number % len(KINDS)]])
        text = texts[place.file]
        (copy / place.file).write_text(place.mutated(text), encoding="utf-8")
        failed = first_failure(copy, chosen := tests_of(place, text, tests), asked.seconds)
        (copy / place.file).write_text(text, encoding="utf-8")
        if "::" in failed and first_failure(copy, [failed], asked.seconds):
            failed = ""
        noticed += failed != ""
        old = " ".join(ast.get_source_segment(text, place.node).split())
        print(f"{number + 1:3} {place.file}:{place.node.lineno} {place.function}: {old} -> {place.new}")
        print(f"    {failed or f'NOT NOTICED by {len(chosen)} files'}", flush=True)
    print(f"{noticed} of {asked.places} noticed: {noticed / asked.places:.0%}")
    shutil.rmtree(copy.parent)


if __name__ == "__main__":
    main()
