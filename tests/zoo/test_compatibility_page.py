"""docs/compatibility.md says what the zoo's records say, and the records are of the zoo as it is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import zoo_models as models
from differences import TOLERANCE

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def zoo_table():
    """Return the module that makes the page; docs is a folder of Sphinx, no package."""
    spec = importlib.util.spec_from_file_location("zoo_table", REPOSITORY / "docs" / "zoo_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_records_make(zoo_table):
    assert zoo_table.PAGE.read_text(encoding="utf-8") == zoo_table.page(zoo_table.records())


def test_every_record_is_of_the_whole_zoo(zoo_table):
    entries = [(entry.build.__name__, entry.attention) for entry in models.ENTRIES]
    for record in zoo_table.records():
        assert [(case["model"], case["attention"]) for case in record["cases"]] == entries, (
            f"run the zoo anew for torch {zoo_table.torch_of(record)}, with --zoo-record"
        )


def test_there_is_a_record_for_both_ends_of_the_range_and_for_the_pinned_torch(zoo_table):
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    lowest, major, minor = re.search(r'"torch>=([\d.]+),<(\d+)\.(\d+)"', project).groups()
    pins = (REPOSITORY / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = next(one for one in pins if one.startswith("torch==")).split("==")[1].partition(" ")[0]
    found = [zoo_table.torch_of(record).rpartition(".")[0] for record in zoo_table.records()]
    assert found == [lowest, pinned.rpartition(".")[0], f"{major}.{int(minor) - 1}"]


def test_what_passed_is_within_the_tolerance(zoo_table):
    assert zoo_table.TOLERANCE == TOLERANCE
    for record in zoo_table.records():
        for case in record["cases"]:
            if case["outcome"] == "passed":
                assert case["steps"] == 4
                assert all(case[kind] <= TOLERANCE for kind in zoo_table.KINDS)
            else:
                assert case["note"], "what did not pass says why"


def test_a_failed_and_an_absent_model_are_shown_as_such(zoo_table):
    passed = {
        "outcome": "passed",
        "loss": 1e-7,
        "gradient": 2e-7,
        "parameter": 0.0,
        "buffer": 0.0,
        "learning_rate": 1e-3,
    }
    cases = [
        {"model": "one", "attention": "eager", **passed},
        {"model": "two", "attention": "sdpa", "outcome": "failed", "note": "BuildError: a | b"},
        {"model": "three", "attention": "sdpa", "outcome": "absent", "note": "no sdpa"},
    ]
    record = {
        "versions": {"torch": "2.13.0+cpu", "transformers": "5.0"},
        "cases": cases,
        "date": "2026-11-21T17:00:00",
        "commit": "abc",
        "python": "3.11.7",
    }
    text = zoo_table.tables([record])
    assert "| 1 / 2 |" in text
    assert "| `one` | eager | 1 / 2 / 0 / 0 | learning rate 0.001 |" in text
    assert r"| `two` | sdpa | **failed** | torch 2.13.0: BuildError: a \| b |" in text
    assert "| `three` | sdpa | absent | no sdpa |" in text
