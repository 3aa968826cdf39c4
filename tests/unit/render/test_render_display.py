from __future__ import annotations

import warnings

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from ortlab.options import Options
from ortlab.render import display, html
from ortlab.runs import Ledger


@pytest.fixture
def shell():
    with warnings.catch_warnings():  # IPython adds a filter of its own
        return InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))


def test_registered_records_show_tables_in_both_forms(shell, new_run):
    ledger = Ledger([new_run(1)])
    display.register(shell)
    data, _ = shell.display_formatter.format(ledger)
    assert data["text/html"] == html.render(ledger)
    assert data["text/plain"].startswith("Runs\n\nrun ")


def test_a_record_inside_a_list_keeps_its_repr(shell):
    display.register(shell)
    data, _ = shell.display_formatter.format([Options(memory_level=1)])
    assert data == {"text/plain": "[Options(memory_level=1)]"}


def test_unregister_leaves_the_shell_as_it_was(shell):
    printers = {mime: dict(f.type_printers) for mime, f in shell.display_formatter.formatters.items()}
    display.register(shell)
    display.register(shell)
    display.unregister(shell)
    assert {mime: dict(f.type_printers) for mime, f in shell.display_formatter.formatters.items()} == printers
    data, _ = shell.display_formatter.format(Options())
    assert data == {"text/plain": "Options()"}
    display.unregister(shell)  # twice is harmless


def test_unregister_keeps_a_formatter_that_the_user_has_set_since(shell):
    def users_own(_record):
        return "<b>mine</b>"

    display.register(shell)
    shell.display_formatter.formatters["text/html"].for_type(Options, users_own)
    display.unregister(shell)
    data, _ = shell.display_formatter.format(Options())
    assert data["text/html"] == "<b>mine</b>"
