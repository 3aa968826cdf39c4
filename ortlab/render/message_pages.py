"""Pages of messages: by run, the newest first, each run folded under the count of its messages by level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.records.messages import Message, Messages

RUNS_SHOWN: Final = 6
"""Runs whose messages a page shows: the newest."""

MESSAGES_SHOWN: Final = 50
"""Kinds of messages of each run that a page shows: the first."""

_LINE: Final = 200
"""Characters of a message that are shown beside its level; all of a longer one is folded under them."""

_WHOLE: Final = 20_000
"""Characters of one message that are shown when it is unfolded."""

_COLUMNS: Final = (
    Column("time (UTC)"),
    Column("level"),
    Column("source"),
    Column("stage", meaning="what was being done: export, gradient graph, session or step"),
    Column("message"),
)

_WARNINGS: Final = ("WARNING", "ERROR", "FATAL")

_MARKS: Final = {
    "FATAL": Mark.BAD,
    "ERROR": Mark.BAD,
    "WARNING": Mark.WARN,
    "INFO": Mark.PLAIN,
    "VERBOSE": Mark.QUIET,
}


def messages_page(messages: Messages) -> Page:
    """Show the messages of the newest runs, the first ones of each."""
    runs = messages.runs
    blocks: list[Block] = [Note(summary(messages), Mark.PLAIN if len(messages) else Mark.QUIET)]
    blocks += [run_fold(messages.of(run=run or 0), run) for run in runs[:RUNS_SHOWN]]
    if len(runs) > RUNS_SHOWN:
        hidden = units.count(len(runs) - RUNS_SHOWN)
        blocks.append(
            Note(f"{hidden} earlier runs: lab.messages.of(run=...) has their messages.", Mark.QUIET)
        )
    if messages.forgotten:
        dropped = units.count(messages.forgotten)
        blocks.append(Note(f"{dropped} earlier messages were dropped: a lab keeps the latest.", Mark.WARN))
    if messages.file is not None:
        blocks.append(Note(where_after_a_crash(messages), Mark.QUIET))
    return Page("Messages", tuple(blocks))


def summary(messages: Messages) -> str:
    """Count the messages by level, in one sentence."""
    if not len(messages):
        return "No messages."
    runs = [run for run in messages.runs if run is not None]
    where = f" in {len(runs)} run{'s' if len(runs) != 1 else ''}" if runs else ""
    where += " and outside runs" if runs and None in messages.runs else ""
    return f"{counts_text(messages)}{where}."


def counts_text(messages: Messages) -> str:
    """Write how many messages there are of each level, the worst first: "2 WARNING, 14 INFO"."""
    return ", ".join(f"{units.count(number)} {level}" for level, number in messages.counts.items()) or "none"


def warnings_text(messages: Messages) -> str:
    """Write how many messages are warnings or worse: "2 warnings"; empty if none is."""
    number = sum(messages.counts.get(level, 0) for level in _WARNINGS)
    return f"{units.count(number)} {'warning' if number == 1 else 'warnings'}" if number else ""


def where_after_a_crash(messages: Messages) -> str:
    """Say where the last lines are if the process dies."""
    return f"Should the process die inside ONNX Runtime, its last lines are in {messages.file}"


def run_title(run: int | None) -> str:
    """Name the messages of a run."""
    return "Outside runs" if run is None else f"Run {run}"


def run_fold(messages: Messages, run: int | None, first: int = 0, limit: int = MESSAGES_SHOWN) -> Folded:
    """Fold messages of one run, or those outside runs if `run` is None, under their count.

    It shows `limit` kinds of messages, from position `first` on.
    """
    kinds = messages.kinds
    shown = kinds[first : first + limit]
    left_out = ""
    if len(shown) < len(kinds):
        left_out = (
            f"{units.count(first + 1)} to {units.count(first + len(shown))} of {units.count(len(kinds))}; "
            f"lab.messages.of(run={run or 0}) has all."
        )
    table = Table("", _COLUMNS, tuple(_row(one) for one in shown), left_out)
    return Folded(f"{run_title(run)}: {counts_text(messages)}", blocks=(table,))


def _row(kind: Sequence[Message]) -> tuple[Cell, ...]:
    """Show messages of one kind in a line; all of them, and why they are harmless, are folded under it."""
    message, text = kind[0], kind[0].text if len(kind) == 1 else kind[0].shape
    mark = _MARKS[message.level]
    first, _, rest = text.strip().partition("\n")
    line = first[:_LINE] + ("…" if len(first) > _LINE else "")
    lines = text.count("\n")
    line += f" (+{units.many(lines, 'line')})" if lines else ""
    line += f" ({units.count(len(kind))} times)" if len(kind) > 1 else ""
    whole = "\n".join(one.text for one in kind) if len(kind) > 1 or rest or len(first) > _LINE else ""
    left = len(whole) - _WHOLE
    whole = whole[:_WHOLE] + (f"\n… {units.count(left)} characters more: lab.messages" if left > 0 else "")
    harmless = f"Nobody has to act on this: {message.harmless}" if message.harmless else ""
    more = "\n\n".join(filter(None, (harmless, whole)))
    return row(
        message.when[11:23],  # ISO 8601: the date, then the time down to ms
        Cell(message.level, mark),
        message.source,
        message.stage,
        Cell(line, mark if mark is not Mark.BAD else Mark.PLAIN, more),
    )
