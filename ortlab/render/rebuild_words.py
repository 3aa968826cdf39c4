"""What a call redoes, in words: for the line above the switches, and for the chip beside each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab.render import units
from ortlab.render.page import Mark, Note

if TYPE_CHECKING:
    from ortlab.status import Rebuild

STAGE_NAMES: Final = {"export": "export", "graph": "gradient graph", "session": "session"}
"""What is redone first; what comes after it is redone with it."""

_REDONE: Final = {
    "export": "the export, the gradient graph and the session",
    "graph": "the gradient graph and the session",
    "session": "the session",
}

_NAMES_SHOWN: Final = 4


def pending_note(pending: Rebuild) -> Note | None:
    """Say what the next call redoes, why, and what that took when it was last measured; None if it redoes nothing."""
    if pending.is_first or pending.stage not in _REDONE:
        return None
    shown = ", ".join(pending.changed[:_NAMES_SHOWN])
    more = len(pending.changed) - _NAMES_SHOWN
    names = f"{shown} and {more} more" if more > 0 else shown
    why = f" ({names} changed)" if names else ""
    return Note(f"Next call redoes: {_REDONE[pending.stage]}{why}{_measured(pending)}.", Mark.WARN)


def switch_words(rebuild: Rebuild, pending: Rebuild) -> str:
    """Say what it takes to change one switch now.

    Parameters
    ----------
    rebuild
        What a call would redo with the switch changed.
    pending
        What it redoes anyway.
    """
    if rebuild.is_first:
        return "a change now costs nothing more: nothing is built yet"
    if rebuild.stage in STAGE_NAMES and rebuild.stage == pending.stage:
        return (
            f"a change now costs nothing more: the next call redoes the {STAGE_NAMES[rebuild.stage]} anyway"
        )
    if rebuild.stage in STAGE_NAMES:
        return f"a change redoes: {STAGE_NAMES[rebuild.stage]}{_measured(rebuild)}"
    if pending.stage in STAGE_NAMES:
        return f"a change back: the {STAGE_NAMES[pending.stage]} need not be redone"
    return "a change redoes nothing: it acts in the next step" if rebuild.stage else "a change redoes nothing"


def _measured(rebuild: Rebuild) -> str:
    if rebuild.last_ms is None:
        return ""
    return f", {units.duration(rebuild.last_ms)} as measured in run {rebuild.run}"
