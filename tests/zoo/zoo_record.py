"""The zoo's results as JSON, one file for each torch; docs/compatibility.md is made from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PARITY = "test_four_steps_agree_with_pytorch"


class Recorder:
    """A pytest plugin that writes what each model's test found.

    Parameters
    ----------
    file
        Where the JSON goes. Nothing is written when only some of the zoo ran: a record is of all of it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Any:
        """Keep the outcome of a model's test with the differences that it noted."""
        report = (yield).get_result()
        if getattr(item, "originalname", "") != PARITY or report.when == "teardown":
            return
        if report.when == "call" or report.failed:
            noted = dict(item.user_properties).get("zoo", {})
            if report.failed:
                noted["note"] = call.excinfo.exconly().partition("\n")[0]
            self._found[item.callspec.id] = {"outcome": report.outcome, **noted}

    def pytest_sessionfinish(self) -> None:
        """Write the record, if all of the zoo ran."""
        from zoo_models import ENTRIES

        absent = {entry.name: entry.absent() for entry in ENTRIES if entry.absent()}
        missing = {entry.name for entry in ENTRIES} - self._found.keys() - absent.keys()
        if missing:
            print(f"\nNo zoo record: {len(missing)} models did not run.", file=sys.stderr)
            return
        sys.path.append(str(REPOSITORY / "bench"))
        from report import machine

        facts = {name: machine()[name] for name in ("cpu", "system", "python", "versions", "commit", "date")}
        cases = [
            {"model": entry.build.__name__, "attention": entry.attention}
            | (
                {"outcome": "absent", "note": absent[entry.name]}
                if entry.name in absent
                else self._found[entry.name]
            )
            for entry in ENTRIES
        ]
        self._file.write_text(json.dumps({**facts, "cases": cases}, indent=1) + "\n", encoding="utf-8")
