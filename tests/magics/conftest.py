"""A real shell per test: no history database, errors raised into the test, and nothing left behind."""

from __future__ import annotations

import builtins
import linecache
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config


class RaisingShell(InteractiveShell):
    """A shell whose `run` raises what the cell raised, so that a test cannot miss it."""

    def run(self, cell: str):
        """Run a cell and return the value of its last line."""
        result = self.run_cell(cell)
        result.raise_error()
        return result.result

    def formats(self, value: object) -> dict[str, str]:
        """Every form in which a front end could show the value, by MIME type."""
        return self.display_formatter.format(value)[0]

    def showtraceback(self, *args, **kwargs) -> None:
        """Print nothing: the error reaches the test."""

    def showsyntaxerror(self, *args, **kwargs) -> None:
        """Print nothing: the error reaches the test."""


def registrations(shell: InteractiveShell) -> dict[str, object]:
    """What an extension can register in a shell."""
    formatters = shell.display_formatter.formatters
    kept = {
        f"{mime}, {table}": dict(getattr(formatter, table))
        for mime, formatter in formatters.items()
        for table in ("singleton_printers", "type_printers", "deferred_printers")
    }
    kept["mime bundle"] = dict(shell.display_formatter.mimebundle_formatter.type_printers)
    kept["magics"] = {kind: dict(magics) for kind, magics in shell.magics_manager.magics.items()}
    kept["callbacks"] = {event: list(calls) for event, calls in shell.events.callbacks.items()}
    return kept


def interpreter_hooks() -> dict[str, object]:
    """What a shell changes in the interpreter while it lives."""
    return {
        "main": sys.modules["__main__"],
        "displayhook": sys.displayhook,
        "excepthook": sys.excepthook,
        "builtins": {name: value for name, value in vars(builtins).items() if name != "_"},
    }


@pytest.fixture
def bare_shell():
    """Start a shell without ortlab, and prove at the end that it and the interpreter are as they were."""
    before = interpreter_hooks()
    config = Config()
    config.HistoryManager.enabled = False
    RaisingShell.clear_instance()
    shell = RaisingShell.instance(config=config)
    try:
        yield shell
    finally:
        shell.restore_sys_module_state()
        shell.atexit_operations()
        RaisingShell.clear_instance()
        for name in shell.compile._filename_map:
            linecache.cache.pop(name, None)
    assert interpreter_hooks() == before


@pytest.fixture
def shell(bare_shell):
    """Load ortlab into a shell, and unload it again after the test."""
    before = registrations(bare_shell)
    bare_shell.run("%load_ext ortlab")
    yield bare_shell
    bare_shell.run("%unload_ext ortlab")
    assert registrations(bare_shell) == before


@pytest.fixture
def captured():
    """Collect what cells print and display."""
    with capture_output() as output:
        yield output
