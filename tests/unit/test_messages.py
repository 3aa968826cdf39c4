"""Messages as records: chosen, counted, as a table, and how many a lab keeps."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ortlab.errors import OptionError
from ortlab.options import log_levels
from ortlab.records import messages
from ortlab.records.messages import EXPORTER, ORTMODULE, RUNTIME, Message, MessageLog, Messages
from ortlab.render import html, text
from ortlab.render.lab_pages import MESSAGES_SHOWN, RUNS_SHOWN


@pytest.fixture
def log():
    """Two runs and something outside of them."""
    log = MessageLog()
    with log.during_run(1):
        with log.during("export"):
            log.add("WARNING", EXPORTER, "Converting a tensor <b>to a Python boolean</b>")
            log.add("INFO", ORTMODULE, "Exporting the PyTorch model to ONNX...")
        with log.during("session"):
            log.add("INFO", RUNTIME, "table\nwith\nlines", place="memory_optimizer.cc:248 PrintSummary")
    log.add("VERBOSE", RUNTIME, "Number of streams: 1")
    with log.during_run(2):
        log.add("ERROR", RUNTIME, "Non-zero status code")
    return log


def test_each_condition_chooses(log):
    said = log.messages
    assert [one.level for one in said] == ["WARNING", "INFO", "INFO", "VERBOSE", "ERROR"]
    assert [one.run for one in said] == [1, 1, 1, None, 2]
    assert [one.stage for one in said] == ["export", "export", "session", "step", "step"]
    assert len(said.of(level="warning")) == 2
    assert len(said.of(level="FATAL")) == 0
    assert len(said.of(source="onnxruntime")) == 3
    assert len(said.of(source="ONNX Runtime", run=1)) == 1
    assert [one.text for one in said.of(run=0)] == ["Number of streams: 1"]
    assert len(said.of(stage="session", text="WITH")) == 1
    assert said.of() is not said
    assert list(said.of()) == list(said)


@pytest.mark.parametrize(
    "wrong", [{"level": "LOUD"}, {"source": "torch"}, {"stage": "backward"}, {"level": 3}]
)
def test_a_word_that_is_none_is_refused_with_those_that_are(log, wrong):
    with pytest.raises(OptionError) as refusal:
        log.messages.of(**wrong)
    assert str(*wrong.values()) in refusal.value.what
    assert "It is one of" in refusal.value.fix


def test_counts_put_the_worst_first(log):
    assert list(log.messages.counts.items()) == [("ERROR", 1), ("WARNING", 1), ("INFO", 2), ("VERBOSE", 1)]
    assert log.messages.runs == (2, None, 1)
    assert repr(log.messages) == "Messages(1 ERROR, 1 WARNING, 2 INFO, 1 VERBOSE)"
    assert repr(Messages()) == "Messages(none)"


def test_the_table_is_a_data_frame_with_times(log):
    table = log.messages.table()
    assert list(table.columns) == ["when", "run", "stage", "level", "source", "text", "place"]
    assert len(table) == 5
    assert table["run"].isna().sum() == 1
    assert abs(datetime.now(timezone.utc) - table["when"].iloc[-1]) < timedelta(minutes=5)
    assert len(Messages().table()) == 0


def test_a_lab_keeps_the_latest_and_says_how_many_it_dropped(monkeypatch):
    monkeypatch.setattr(messages, "KEPT", 3)
    log = MessageLog()
    for number in range(5):
        log.add("INFO", RUNTIME, str(number))
    assert [one.text for one in log.messages] == ["2", "3", "4"]
    assert log.messages.forgotten == 2
    assert "2 earlier messages were dropped" in text.render(log.messages)


def test_what_is_repeated_from_another_lab_comes_once_and_belongs_to_the_present_run(log):
    other = MessageLog()
    with other.during_run(7):
        other.repeat(log.messages[:2])
        other.repeat(log.messages[:2])
    assert [(one.text, one.run) for one in other.messages] == [(one.text, 7) for one in log.messages[:2]]
    assert [one.when for one in other.messages] == [one.when for one in log.messages[:2]]


def test_messages_are_noted_while_a_block_lasts():
    log = MessageLog()
    with log.noting() as outer:
        log.add("INFO", ORTMODULE, "one")
        with log.noting() as inner:
            log.add("INFO", ORTMODULE, "two")
        log.add("INFO", ORTMODULE, "three")
    log.add("INFO", ORTMODULE, "four")
    assert [one.text for one in outer] == ["one", "two", "three"]
    assert [one.text for one in inner] == ["two"]


def test_a_page_folds_runs_the_newest_first_and_escapes(log):
    log.file = Path("/somewhere/1-2.log")
    written = html.render(log.messages)
    titles = ["Run 2: 1 ERROR", "Outside runs: 1 VERBOSE", "Run 1: 1 WARNING, 2 INFO"]
    places = [written.index(f"<details><summary>{title}</summary>") for title in titles]
    assert places == sorted(places)
    assert "&lt;b&gt;to a Python boolean" in written
    assert "<summary>table (+2 lines)</summary><pre>table\nwith\nlines</pre>" in written
    assert "/somewhere/1-2.log" in written
    plain = text.render(log.messages)
    assert all(title in plain for title in titles)
    assert "table (+2 lines)" in plain


def test_a_page_stays_short():
    said = [
        Message("INFO", RUNTIME, f"{run}-{number}", run=run) for run in range(1, 10) for number in range(200)
    ]
    written = html.render(Messages(said))
    assert written.count("<tr>") == RUNS_SHOWN * (MESSAGES_SHOWN + 1)
    assert "1 to 50 of 200; lab.messages.of(run=9) has all." in written
    assert "3 earlier runs: " in written
    long = html.render(Messages([Message("INFO", RUNTIME, "graph\n" + "x" * 1_000_000)]))
    assert len(long) < 30_000
    assert "characters more: lab.messages" in long


def test_the_levels_are_one_table():
    table = log_levels.table()
    assert list(table.index) == [level.name for level in log_levels.LOG_LEVELS]
    readers = "users and developers of ONNX Runtime"
    assert table.loc["INFO"].tolist() == [readers, "WARNING", "INFO", "on", "on", "off"]
