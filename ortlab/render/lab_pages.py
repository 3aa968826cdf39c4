"""Pages of a lab: its status, the whole lab, and in words what the next step rebuilds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.lab.following import shown_ranks
from ortlab.options.options import Options
from ortlab.render.execution_words import coverage_blocks, engine_words, extent
from ortlab.render.message_pages import summary
from ortlab.render.option_pages import difference_page
from ortlab.render.page import Block, Mark, Note, Page, Table
from ortlab.render.ranks_pages import rank_blocks
from ortlab.render.run_pages import ledger_page

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.records.status import Rebuild, Status

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
    """Say why the next step rebuilds something, and what that took last time; None if there is nothing to say.

    What is rebuilt stands in the line of the status, above.
    """
    if pending.is_first or pending.stage not in STAGE_NAMES:
        return None
    shown = ", ".join(pending.changed[:_NAMES_SHOWN])
    more = len(pending.changed) - _NAMES_SHOWN
    names = f"{shown} and {more} more" if more > 0 else shown
    sentences = [f"Changed since the last build: {names}."] if names else []
    if pending.last_ms is not None:
        sentences.append(f"Such a rebuild took {_measured(pending)}.")
    return Note(" ".join(sentences), Mark.WARN) if sentences else None


def switch_words(rebuild: Rebuild, pending: Rebuild) -> str:
    """Say what it takes to change one switch now; "" where it takes nothing beyond what is to be built anyway.

    `rebuild` is what a step would rebuild with the switch changed, `pending` what the next step rebuilds as it is.
    """
    if rebuild.is_first:
        return ""
    if rebuild.stage in STAGE_NAMES:
        if rebuild.stage == pending.stage:
            return ""
        took = "" if rebuild.last_ms is None else f", {_measured(rebuild)}"
        return f"rebuilds the {STAGE_NAMES[rebuild.stage]}{took}"
    if pending.stage in STAGE_NAMES:
        return f"saves the rebuild of the {STAGE_NAMES[pending.stage]}"
    return "no rebuild, from the next step on" if rebuild.stage else "no rebuild"


def _measured(rebuild: Rebuild) -> str:
    return f"{units.duration(rebuild.last_ms)} in run {rebuild.run}"
