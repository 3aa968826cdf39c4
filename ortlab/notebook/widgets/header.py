"""The panel's head: whose model it is, who executes it, and what the next call will redo."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from ortlab.notebook.widgets import lean
from ortlab.options.configuration import engine_kind
from ortlab.render import html
from ortlab.render.coverage_words import badge, coverage_blocks
from ortlab.render.lab_pages import status_note
from ortlab.render.page import Mark, Note, Page
from ortlab.render.rebuild_words import pending_note

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.notebook.widgets.base import Looks
    from ortlab.records.status import Status

_BADGES: Final = {"ort": "ORT", "eager": "EAGER", "checkpoint": "CHECKPOINT", "compile": "COMPILE"}


class Header(lean.Column):
    """Name, badge and state in a line that screen readers follow; below it parts, pending builds and notes."""

    def __init__(self, lab: Lab, looks: Looks) -> None:
        self._lab = lab
        self.line = looks.html()
        self._parts = looks.html()
        self.pending = looks.html()
        for part in (self.line, self.pending):
            part.add_class("ortlab-live")
        super().__init__([self.line, self._parts, self.pending], layout=looks.layout)

    def show_status(self) -> None:
        """Show who executes the model now."""
        status = self._lab.status
        note = status_note(status)
        self.line.value = (
            f'<div class="ortlab ortlab-header">'
            f"<span><code>{escape(self._lab.name)}</code> {escape(type(self._lab.module).__name__)}</span>"
            f'<span class="ortlab-badge ortlab-{note.mark.value}">{_badge(status)}</span>'
            f'<span class="ortlab-state ortlab-{note.mark.value}">{escape(note.text)}</span></div>'
        )
        self._parts.value = html.fragment(Page("", coverage_blocks(status.coverage)))

    def show_pending(self) -> None:
        """Show what the next call redoes with the present switches."""
        note = pending_note(self._lab.rebuild())
        notes = [Note(text, Mark.QUIET) for text in self._lab.notes]
        self.pending.value = html.fragment(Page("", (*([note] if note else []), *notes)))


def _badge(status: Status) -> str:
    if status.state == "fallback":
        return "PYTORCH (fallback)"
    return badge(status.coverage) if status.coverage else _BADGES[engine_kind(status.engine)]
