"""What the next step rebuilds, in words: for the line above the switches, and for the chip beside each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.render.page import Mark, Note

if TYPE_CHECKING:
    from ortlab.records.status import Rebuild

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
