"""Pages of what a lab is and offers: its status, the whole lab, the doctor's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.lab.following import shown_ranks
from ortlab.options.options import Options
from ortlab.render.coverage_words import coverage_blocks, extent
from ortlab.render.message_pages import summary
from ortlab.render.option_pages import difference_page
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row
from ortlab.render.ranks_page import rank_blocks
from ortlab.render.rebuild_words import pending_note
from ortlab.render.run_pages import engine_words, ledger_page

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.records.checks import Report
    from ortlab.records.status import Status

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


def report_page(report: Report) -> Page:
    """Show what the doctor found, and the command that repairs what is wrong."""
    words = {
        "ok": Cell("ok", Mark.GOOD),
        "warn": Cell("WARNING", Mark.WARN),
        "fail": Cell("FAILED", Mark.BAD),
    }
    rows = tuple(row(check.name, words[check.status], check.found) for check in report.checks)
    verdict = Note("This installation can train with ONNX Runtime.", Mark.GOOD)
    if not report.ok:
        verdict = Note("This installation cannot train with ONNX Runtime as it is.", Mark.BAD)
    fixes = [Note(f"{check.name}: {check.fix}", Mark.WARN) for check in report.checks if check.fix]
    table = Table("", (Column("check"), Column("result"), Column("found")), rows)
    return Page("Doctor", (table, verdict, *fixes))
