"""The option --rows of pytest: run the tests that prove rows of the feature list, and say which rows are done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
import rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DONE: Final = "done"
FAILED: Final = "failed"
OPEN: Final = "open"
NOT_COVERED: Final = "not covered"
NOT_RUN: Final = "not run"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rows",
        action="store_true",
        help="run only tests that are marked with rows of the feature list, and list which rows are done",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(*names): proves these rows of the feature list (tests/rows.py)")
    if config.getoption("rows"):
        config.pluginmanager.register(RowListing(config), "row-listing")


def names_of(item: pytest.Item) -> Iterator[str]:
    """Every row that a test is marked with.

    Raises
    ------
    pytest.UsageError
        If there is no such row.
    """
    for mark in item.iter_markers("row"):
        for name in mark.args:
            if name not in rows.ROWS:
                raise pytest.UsageError(
                    f"{item.nodeid} is marked with {name!r}, which tests/rows.py does not have."
                )
            yield name


def verdict(name: str, outcomes: Iterable[str]) -> str:
    """Say how a row stands, given how its tests ended ("" for one that has not run)."""
    ended = set(outcomes)
    if ended & {"failed", "error"}:
        return FAILED
    if name in rows.OPEN:
        return OPEN
    if not ended:
        return NOT_COVERED
    return DONE if ended == {"passed"} else NOT_RUN


class RowListing:
    """Keeps the tests of each row and how they ended, and prints the list."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: dict[str, list[str]] = {name: [] for name in rows.ROWS}
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen, left_out = [], []
        for item in items:
            names = list(names_of(item))
            (chosen if names else left_out).append(item)
            for name in names:
                self._tests[name].append(item.nodeid)
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.when == "call" or report.skipped:
            self._outcomes[report.nodeid] = report.outcome

    def verdicts(self) -> dict[str, str]:
        """How each row stands."""
        return {
            name: verdict(name, (self._outcomes.get(test, "") for test in tests))
            for name, tests in self._tests.items()
        }

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("rows of the feature list")
        verdicts = self.verdicts()
        for name, promise in rows.ROWS.items():
            write(f"{name:<4} {verdicts[name]:<12} {promise}")
            if name in rows.OPEN:
                write(f"{'':17} open: {rows.OPEN[name]}")
            for test in sorted({test.partition("[")[0] for test in self._tests[name]}):
                cases = [case for case in self._tests[name] if case.partition("[")[0] == test]
                many = f" ({len(cases)} cases)" if len(cases) > 1 else ""
                write(f"{'':17} {test}{many}")
        count = list(verdicts.values()).count
        write(f"done {count(DONE)} of {len(rows.ROWS)}, declared open {count(OPEN)}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        found = set(self.verdicts().values())
        wrong = {NOT_COVERED} if self._config.getoption("collectonly") else {NOT_COVERED, FAILED, NOT_RUN}
        if session.exitstatus == pytest.ExitCode.OK and found & wrong:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
