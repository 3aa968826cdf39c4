"""Pages of a lab: its status, the whole lab, what the next step rebuilds; its options; its messages, by run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.lab.following import shown_ranks
from ortlab.options.options import Options, declaration, switches
from ortlab.options.switches import Effect, Group, Switch, Value
from ortlab.render.execution_words import coverage_blocks, engine_words, extent
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row
from ortlab.render.ranks_pages import rank_blocks
from ortlab.render.run_pages import ledger_page

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.options.catalogue import OptionList
    from ortlab.records.messages import Message, Messages
    from ortlab.records.status import Rebuild, Status


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
        hidden = units.many(len(runs) - RUNS_SHOWN, "earlier run")
        blocks.append(Note(f"{hidden}: lab.messages.of(run=...) has the messages.", Mark.QUIET))
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
    """Fold messages of one run, or those outside runs if `run` is None, under their count."""
    # It shows `limit` kinds of messages, from position `first` on.
    kinds = messages.kinds
    shown = kinds[first : first + limit]
    left_out = ""
    if len(shown) < len(kinds):
        left_out = (
            f"{units.count(first + 1)} to {units.count(first + len(shown))} of {units.count(len(kinds))}; "
            f"lab.messages.of(run={run or 0}) has all."
        )
    table = Table("", _COLUMNS, tuple(_message_row(one) for one in shown), left_out)
    return Folded(f"{run_title(run)}: {counts_text(messages)}", blocks=(table,))


def _message_row(kind: Sequence[Message]) -> tuple[Cell, ...]:
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


EFFECT_WORDS = {
    Effect.WRAP: "re-export",
    Effect.EXPORT: "re-export",
    Effect.GRAPH: "new graph",
    Effect.SESSION: "new session",
    Effect.STEP: "next step",
}
"""What a change of a switch costs before it acts, in words."""

_NAME = Column("switch", meaning="field of ortlab.Options")
_COST = Column("a change takes", meaning="what is redone before a changed value acts")


def options_page(options: Options) -> Page:
    """List every switch by group; values that differ from the default are marked."""
    defaults = Options()
    changed = options.changed(defaults)
    columns = (_NAME, Column("value"), _COST)
    rows = {group: tuple(_row(one, options, defaults) for one in options_in(group)) for group in Group}
    tables = [Table(group.value.capitalize(), columns, rows[group]) for group in Group]
    summary = f"Changed: {', '.join(changed)}." if changed else "All switches are at their defaults."
    return Page("Options", (Note(summary, Mark.PLAIN if changed else Mark.QUIET), *tables))


def difference_page(before: Options, after: Options, names: tuple[str, str] = ("before", "after")) -> Page:
    """List the switches whose values differ between two records, and what going from one to the other costs."""
    changed = after.changed(before)
    if not changed:
        return Page("Options", (Note("No switch differs.", Mark.QUIET),))
    rows = tuple(
        row(
            name,
            value_text(getattr(before, name)),
            value_text(getattr(after, name)),
            EFFECT_WORDS[declaration(name).effect],
        )
        for name in changed
    )
    stage = after.stage_of_change(before)
    cost = "Nothing has to be rebuilt." if stage is None else f"Going over takes: {EFFECT_WORDS[stage]}."
    table = Table("Switches that differ", (_NAME, Column(names[0]), Column(names[1]), _COST), rows)
    return Page("Options", (table, Note(cost)))


def options_in(group: Group) -> tuple[Switch, ...]:
    """Return the switches of one group, in the order of declaration."""
    return tuple(one for one in switches() if one.group is group)


def value_text(value: Value) -> str:
    """Write a value as a user says it: on, off, 17, INFO, none."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return str(value) if value != "" else "none"


def _row(one: Switch, options: Options, defaults: Options) -> tuple[Cell, ...]:
    value, default = getattr(options, one.name), getattr(defaults, one.name)
    shown = Cell(value_text(value))
    if value != default:
        shown = Cell(f"{value_text(value)} (default {value_text(default)})", Mark.WARN)
    return row(one.name, shown, EFFECT_WORDS[one.effect])


# ---- a list of some -------------------------------------------------------------------------------------------------


_LISTED = (Column("option"), Column("value"), Column("choices"), Column("what it does"))


def option_list_page(chosen: OptionList) -> Page:
    """List the switches with their help, and why one cannot act here; of one alone, say when to change it."""
    rows = []
    reasons: list[Block] = []
    for one in chosen.switches:
        value = getattr(chosen.options, one.name)
        shown = value_text(value)
        if value != one.default:
            shown += f" (default {value_text(one.default)})"
        missing = chosen.missing(one.name)
        mark = Mark.QUIET if missing else Mark.WARN if value != one.default else Mark.PLAIN
        choices = "on, off" if one.type is bool else ", ".join(map(str, one.choices))
        rows.append(row(one.name, Cell(shown, mark), choices, one.help))
        if missing:
            reasons.append(Note(missing, Mark.QUIET))
        if len(chosen.switches) == 1:
            reasons += [Note(sentence) for sentence in one.advice]
    return Page("Options", (Table("", _LISTED, tuple(rows)), *reasons))


_STAGES = {
    "export": "the export, the gradient graph and the session",
    "graph": "the gradient graph and the session",
    "session": "the session",
}


def status_note(status: Status) -> Note:
    """Say in one sentence who executes the model and what the next step will cost."""
    name = engine_words(status.engine)
    if status.state == "unwrapped":
        return Note("Unwrapped: the model runs in PyTorch as it did before.", Mark.QUIET)
    if status.state == "fallback":
        return Note(f"PYTORCH (fallback): {status.reason or 'no reason was recorded'}", Mark.BAD)
    if status.coverage:
        name = f"{name}: {extent(status.coverage)}"
    if status.detail:
        name = f"{name} ({status.detail})"
    if status.state == "ready" and status.coverage and not status.coverage.called:
        return Note("PyTorch: the last call of the model used none of its wrapped parts.", Mark.WARN)
    if status.state == "ready":
        return Note(f"{name}: ready.", Mark.GOOD)
    stage = _STAGES.get(status.pending_stage, status.pending_stage)
    if status.state == "rebuild pending":
        return Note(f"{name}: rebuild pending; the next step rebuilds {stage}.", Mark.WARN)
    return Note(
        f"{name}: not built yet; the next step makes {stage}." if stage else f"{name}: not built yet."
    )


def status_page(status: Status) -> Page:
    """Show the status as its one sentence, and the parts where only parts of the model are wrapped."""
    return Page("", (status_note(status), *coverage_blocks(status.coverage)))


def lab_page(lab: Lab) -> Page:
    """Show a lab as its panel does: status, switches that were changed, runs."""
    defaults = Options()
    blocks: list[Block] = [status_note(status := lab.status)]
    if status.coverage:
        blocks += coverage_blocks(status.coverage)
    if (pending := pending_note(lab.rebuild())) is not None:
        blocks.append(pending)
    blocks += [Note(text, Mark.QUIET) for text in lab.notes]
    if lab.options.changed(defaults):
        changes = difference_page(defaults, lab.options, ("default", "now"))
        blocks += [block for block in changes.blocks if isinstance(block, Table)]
    else:
        blocks.append(Note("All switches are at their defaults.", Mark.QUIET))
    blocks += ledger_page(lab.runs).blocks
    if (ranks := shown_ranks(lab)) is not None:
        blocks += rank_blocks(ranks)
    messages = lab.messages
    if len(messages):
        blocks.append(
            Note(f"Messages: {summary(messages)} %ort_messages, or lab.messages, shows them.", Mark.QUIET)
        )
    return Page(f"{lab.name}: {type(lab.module).__name__}", tuple(blocks))


# ---- what a step rebuilds -------------------------------------------------------------------------------------------


STAGE_NAMES: Final = {"export": "export", "graph": "gradient graph", "session": "session"}
"""What is rebuilt first; what comes after it is rebuilt with it."""

_NAMES_SHOWN: Final = 4


def pending_note(pending: Rebuild) -> Note | None:
    """Say why the next step rebuilds something, and what that took last time; None if there is nothing to say."""
    # What is rebuilt stands in the line of the status, above.
    if pending.is_first or pending.stage not in STAGE_NAMES:
        return None
    shown = ", ".join(pending.changed[:_NAMES_SHOWN])
    more = len(pending.changed) - _NAMES_SHOWN
    names = f"{shown} and {more} more" if more > 0 else shown
    took = "" if pending.last_ms is None else f"; that took {_measured(pending)}"
    if not names:
        again = STAGE_NAMES[pending.stage]
        return Note(
            f"Other switches ran in between: the next step makes the {again} again{took}.", Mark.QUIET
        )
    took = "" if pending.last_ms is None else f" Such a rebuild took {_measured(pending)}."
    return Note(f"Changed since the last build: {names}.{took}", Mark.WARN)


def switch_words(rebuild: Rebuild, pending: Rebuild) -> str:
    """Say what it takes to change one switch now; "" where it takes nothing beyond what is to be built anyway."""
    # `rebuild` is what a step would rebuild with the switch changed, `pending` what the next step rebuilds as it is.
    if rebuild.is_first:
        return ""
    if rebuild.stage in STAGE_NAMES:
        if rebuild.stage == pending.stage:
            return ""
        took = "" if rebuild.last_ms is None else f", {_measured(rebuild)}"
        return f"rebuilds the {STAGE_NAMES[rebuild.stage]}{took}"
    if pending.stage in STAGE_NAMES and pending.changed:
        return "no rebuild if changed back"
    return "no rebuild, from the next step on" if rebuild.stage else "no rebuild"


def _measured(rebuild: Rebuild) -> str:
    return f"{units.duration(rebuild.last_ms)} in run {rebuild.run}"
