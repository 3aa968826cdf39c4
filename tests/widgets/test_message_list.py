"""The panel's messages over records: folded, filtered, page by page."""

from __future__ import annotations

import re

import pytest

from ortlab.notebook.widgets.controls import Looks, close_tree
from ortlab.notebook.widgets.message_list import PAGE, MessageList
from ortlab.records.messages import EXPORTER, RUNTIME, MessageLog


@pytest.fixture
def log():
    return MessageLog()


@pytest.fixture
def shown(log):
    looks = Looks()
    messages = MessageList(lambda: log.messages, looks)
    messages.opened()
    yield messages
    close_tree(messages)


def words(shown) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", shown._list.value).split())


def fill(log, run, count, level="INFO"):
    with log.during_run(run):
        for number in range(count):
            log.add(level, RUNTIME, f"message {number} of {run}")


def test_without_messages_it_says_so(shown):
    assert words(shown) == "No messages."


def test_runs_are_folded_and_counted_the_newest_first(shown, log):
    fill(log, 1, 3)
    fill(log, 2, 2, "WARNING")
    shown.refresh.click()
    assert shown._list.value.count("<details>") == 2
    assert words(shown).index("Run 2: 2 WARNING") < words(shown).index("Run 1: 3 INFO")
    assert [label for label, _ in shown.run.options] == ["all", "Run 2", "Run 1"]


def test_each_filter_filters(shown, log):
    fill(log, 1, 3)
    fill(log, 2, 2, "WARNING")
    log.add("INFO", EXPORTER, "outside <i>of runs</i>")
    shown.show()
    shown.level.value = "WARNING"
    assert words(shown).startswith("2 WARNING in 1 run.")
    shown.source.value = EXPORTER
    assert words(shown).startswith("No message fits; there are 2 WARNING, 4 INFO.")
    shown.level.value = ""
    assert "outside &lt;i&gt;of runs" in shown._list.value
    shown.source.value = ""
    shown.words.value = "MESSAGE 1"
    assert "1 WARNING, 1 INFO in 2 runs." in words(shown)
    shown.run.value = 0
    assert words(shown).startswith("Outside runs: none")


def test_a_chosen_run_is_open_and_turned_page_by_page(shown, log):
    fill(log, 1, 2 * PAGE + 10)
    shown.show()
    assert shown._pages.layout.display == "none"
    shown.run.value = 1
    assert "<details open>" in shown._list.value
    assert f"1 to {PAGE} of {2 * PAGE + 10}" in words(shown)
    assert shown.earlier.disabled
    shown.later.click()
    shown.later.click()
    assert shown.later.disabled
    assert shown._list.value.count("<tr>") == 10 + 1
    shown.words.value = "message 1 of"  # fewer pages than the one on show
    assert shown._list.value.count("<tr>") == 1 + 1
    shown.words.value = ""
    assert shown.earlier.disabled


def test_a_chosen_run_stays_chosen_while_others_come(shown, log):
    fill(log, 1, 3)
    shown.show()
    shown.run.value = 1
    fill(log, 2, 3)
    shown.show()
    assert shown.run.value == 1
    assert "Run 2" not in words(shown)


def test_one_hundred_thousand_messages_make_a_short_list(shown, log):
    fill(log, 1, 100_000)
    shown.show()
    shown.run.value = 1
    assert len(shown._list.value) < 100_000
