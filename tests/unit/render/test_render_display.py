from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from ortlab.options.options import Options
from ortlab.records.runs import Ledger
from ortlab.render import html, text
from ortlab.render.page import Note, Page


@pytest.fixture
def shell():
    with warnings.catch_warnings():  # IPython adds a filter of its own
        return InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))


def test_records_show_tables_in_both_forms(shell, new_run):
    ledger = Ledger([new_run(1)])
    data, _ = shell.display_formatter.format(ledger)
    assert data == {"text/html": html.render(ledger), "text/plain": text.render(ledger)}
    assert str(ledger) == text.render(ledger)
    assert str(ledger).startswith("Runs\n\nrun ")


def test_a_record_inside_a_list_keeps_its_repr(shell):
    data, _ = shell.display_formatter.format([Options(memory_level=1)])
    assert data == {"text/plain": "[Options(memory_level=1)]"}


def test_a_formatter_of_the_users_own_goes_first(shell):
    shell.display_formatter.formatters["text/html"].for_type(Options, lambda _: "<b>mine</b>")
    data, _ = shell.display_formatter.format(Options())
    assert data["text/html"] == "<b>mine</b>"


def test_what_is_no_block_of_a_page_is_refused_where_it_is_made():
    with pytest.raises(TypeError, match="'Title': 7 is not a block of a page"):
        Page("Title", (Note("words"), 7))


def test_a_record_that_nobody_shows_loads_nobody_who_could_show_it():
    code = (
        "import sys\n"
        "from ortlab.options.options import Options\n"
        "from ortlab.records.runs import Ledger\n"
        "Ledger(), Options(memory_level=1)\n"
        "above = ('ortlab.render', 'ortlab.notebook.widgets', 'IPython')\n"
        "print([name for name in sys.modules if name.startswith(above)])\n"
        "repr(Ledger()), str(Ledger())\n"
        "print([name for name in sys.modules if name.startswith(('ortlab.notebook.widgets', 'IPython', 'torch'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]
