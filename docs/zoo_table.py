"""Write the tables of docs/compatibility.md from the zoo's records.

The records are written by the tests themselves, one for each torch:

    python -m pytest tests/zoo --zoo-record bench/results/zoo-torch-2.13.json
    python docs/zoo_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE / "compatibility.md"
RECORDS = HERE.parent / "bench" / "results"
BEGIN, END = "<!-- zoo: python docs/zoo_table.py -->", "<!-- end of zoo -->"
KINDS = ("loss", "gradient", "parameter", "buffer")
UNIT = 1e-7
TOLERANCE = 1e-5
LEARNING_RATE = 1e-2

Record = dict[str, Any]


def records() -> list[Record]:
    """Return the records, oldest torch first."""
    read = [json.loads(file.read_text(encoding="utf-8")) for file in RECORDS.glob("zoo-torch-*.json")]
    return sorted(read, key=lambda record: [int(part) for part in torch_of(record).split(".")])


def torch_of(record: Record) -> str:
    """Return the version of torch without its build, as in 2.13.0."""
    version: str = record["versions"]["torch"]
    return version.partition("+")[0]


def tables(of: list[Record]) -> str:
    """Return what each torch passed, and every model's differences, as tables in Markdown."""
    unit = (
        f"Differences of {', '.join(KINDS)}, in units of {UNIT:g}; {TOLERANCE / UNIT:g} is what is allowed."
    )
    return f"{summary(of)}\n\n{unit}\n\n{models(of)}"


def summary(of: list[Record]) -> str:
    """Return one line for each torch: what is installed, how many models passed, the worst differences."""
    lines = [
        "| torch | transformers | passed / total | "
        + " | ".join(f"worst {kind}" for kind in KINDS)
        + " | run |",
        "|---" * (len(KINDS) + 4) + "|",
    ]
    for record in of:
        ran = [case for case in record["cases"] if case["outcome"] != "absent"]
        passed = [case for case in ran if case["outcome"] == "passed"]
        worst = " | ".join(f"{max(case[kind] for case in passed):.1e}" for kind in KINDS)
        lines.append(
            f"| {torch_of(record)} | {record['versions']['transformers']} | {len(passed)} / {len(ran)} | {worst} "
            f"| {record['date'][:10]}, commit {record['commit']}, Python {record['python']} |"
        )
    return "\n".join(lines)


def models(of: list[Record]) -> str:
    """Return one line for each model and attention, with the differences that each torch showed."""
    lines = [
        "| model | attention | " + " | ".join(f"torch {torch_of(record)}" for record in of) + " | note |",
        "|---" * (len(of) + 3) + "|",
    ]
    for cases in zip(*(record["cases"] for record in of), strict=True):
        first = cases[0]
        notes = dict.fromkeys(note(case, record) for case, record in zip(cases, of, strict=True))
        lines.append(
            f"| `{first['model']}` | {first['attention']} | "
            + " | ".join(figures(case) for case in cases)
            + f" | {'; '.join(filter(None, notes))} |"
        )
    return "\n".join(lines)


def figures(case: dict[str, Any]) -> str:
    """Return a model's differences in units of `UNIT`: loss, gradient, parameter, buffer."""
    if case["outcome"] == "absent":
        return "absent"
    if case["outcome"] != "passed":
        return "**failed**"
    return " / ".join(f"{case[kind] / UNIT:.2g}" for kind in KINDS)


def note(case: dict[str, Any], record: Record) -> str:
    """Return why a model is missing or failed, with the torch that it is said of, or what is special about its run."""
    said: str = case.get("note", "").replace("|", "\\|")
    if case["outcome"] == "failed":
        return f"torch {torch_of(record)}: {said}"
    special = case["outcome"] == "passed" and case["learning_rate"] != LEARNING_RATE
    return f"learning rate {case['learning_rate']:g}" if special else said


def page(of: list[Record]) -> str:
    """Return the page as it is, with its tables made anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(of)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(records()), encoding="utf-8")
