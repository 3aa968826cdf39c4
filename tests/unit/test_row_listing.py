"""The list of rows: every row in scope has a test or a reason, and no verdict is better than its tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import row_listing
import rows

ROOT = Path(__file__).parents[2]


def marked_rows() -> set[str]:
    """Rows that any test is marked with, read without importing a test: all that they import takes long."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        given = [name for call in calls if ast.unparse(call.func) == "pytest.mark.row" for name in call.args]
        found |= {name.value for name in given if isinstance(name, ast.Constant)}
        if any(not isinstance(name, ast.Constant) for name in given):  # a name of the file's own table
            found |= {node.value for node in nodes if isinstance(node, ast.Constant)} & set(rows.ROWS)
    return found


def test_each_row_in_scope_has_a_test_or_a_reason():
    assert marked_rows() | set(rows.OPEN) == set(rows.ROWS)


def test_rows_without_a_test_are_named_and_fail_the_listing():
    command = [sys.executable, "-m", "pytest", "--rows", "--collect-only", "-q", "-p", "no:cacheprovider"]
    file = "tests/unit/engine/test_log_levels.py"
    finished = subprocess.run([*command, file], check=False, capture_output=True, text=True, cwd=ROOT)
    assert finished.returncode == pytest.ExitCode.TESTS_FAILED, (
        finished.stdout[-2000:] + finished.stderr[-2000:]
    )
    lines = {line.partition(" ")[0]: line for line in finished.stdout.splitlines() if line[:1] in "ABC"}
    assert row_listing.NOT_COVERED in lines["C1"]
    assert row_listing.NOT_RUN in lines["B2"]
    assert f"of {len(rows.ROWS)}" in finished.stdout


def test_the_scope_is_that_of_the_feature_list():
    groups = {
        "A": range(5, 8),
        "B": range(1, 11),
        "C": range(1, 8),
        "D": range(1, 10),
        "E": range(1, 8),
        "G": range(1, 6),
        "H": range(1, 8),
        "I": range(1, 9),
        "J": [6, 7],
    }
    groups |= {"F": [*range(1, 10), 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 23], "T": range(2, 19)}
    assert set(rows.ROWS) == {f"{letter}{number}" for letter, numbers in groups.items() for number in numbers}
    assert set(rows.OPEN) <= set(rows.ROWS)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], row_listing.NOT_COVERED),
        (["passed", "passed"], row_listing.DONE),
        (["passed", "failed"], row_listing.FAILED),
        (["passed", "error"], row_listing.FAILED),
        (["passed", ""], row_listing.NOT_RUN),
        (["passed", "skipped"], row_listing.NOT_RUN),
    ],
)
def test_a_row_is_done_only_if_every_test_of_it_passed(outcomes, expected):
    assert row_listing.verdict("C1", outcomes) == expected


def test_a_row_that_is_declared_open_is_never_counted_as_done(monkeypatch):
    monkeypatch.setitem(rows.OPEN, "C1", "for a reason")
    assert row_listing.verdict("C1", ["passed"]) == row_listing.OPEN
    assert row_listing.verdict("C1", ["failed"]) == row_listing.FAILED
