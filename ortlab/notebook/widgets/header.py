"""The panel's head: whose model it is, who executes it, the last result, and buttons with their progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Final

from ipywidgets.widgets.widget_int import ProgressStyle

from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.controls import ErrorBox, Looks
from ortlab.options.configuration import engine_kind
from ortlab.render import html
from ortlab.render.execution_words import badge, coverage_blocks
from ortlab.render.lab_pages import pending_note, status_note
from ortlab.render.page import Mark, Note, Page
from ortlab.render.run_pages import last_run_note

if TYPE_CHECKING:
    import ipywidgets as widgets

    from ortlab.lab.lab import Lab
    from ortlab.records.status import Status


_BADGES: Final = {"ort": "ORT", "eager": "EAGER", "checkpoint": "CHECKPOINT", "compile": "COMPILE"}


class Header(controls.Column):
    """Name, badge, state, pending builds and the last run, in lines that screen readers follow.

    `about` holds the parts of the model that are wrapped, and the notes of the lab: it stands where there is room.
    """

    def __init__(self, lab: Lab, looks: Looks) -> None:
        self._lab = lab
        self.line = looks.html()
        self.pending = looks.html()
        self.result = looks.html()
        self.about = looks.html()
        for part in (self.line, self.pending, self.result):
            part.add_class("ortlab-live")
        super().__init__([self.line, self.pending, self.result], layout=looks.layout)
        self.add_class("ortlab-head")

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
        notes = [Note(text, Mark.QUIET) for text in self._lab.notes]
        blocks = (*coverage_blocks(status.coverage), *notes)
        self.about.value = html.fragment(Page("", blocks)) if blocks else ""

    def show_pending(self) -> None:
        """Show what the next call redoes with the present switches."""
        note = pending_note(self._lab.rebuild())
        self.pending.value = html.fragment(Page("", (note,))) if note else ""

    def show_result(self) -> None:
        """Show the last run in a line; the points of a sweep are shown by the sweep."""
        runs = [run for run in self._lab.runs if not run.sweep] or self._lab.runs
        self.result.value = html.fragment(Page("", (last_run_note(runs[-1]),))) if len(runs) else ""


def _badge(status: Status) -> str:
    if status.state == "fallback":
        return "PYTORCH (fallback)"
    return badge(status.coverage) if status.coverage else _BADGES[engine_kind(status.engine)]


_REDRAW_SECONDS: Final = 0.1
"""Shortest time between two drawings of the progress bar: a message per step would slow short steps down."""


class Actions(controls.Column):
    """Buttons that are greyed out while one of them acts, a bar for the build or the steps, and the last error."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._needs: dict[widgets.Button, tuple[str, Callable[[], str]]] = {}
        self._drawn_at = 0.0
        self.errors = ErrorBox(looks)
        self.progress = controls.FloatProgress(
            max=1.0, layout=controls.hidden(), style=looks.style(ProgressStyle)
        )
        self._words = looks.html()
        self._row = looks.row()
        way = controls.Box([self.progress, self._words], layout=looks.layout)
        way.add_class("ortlab-progress")
        super().__init__([self._row, way], layout=looks.layout)
        self.add_class("ortlab-actions")

    def add(
        self,
        label: str,
        tooltip: str,
        act: Callable[[], object],
        missing: Callable[[], str] = lambda: "",
        row: widgets.Box | None = None,
    ) -> widgets.Button:
        """Add a button, to a row that stands elsewhere or else to the one here; an error of `act` is shown.

        `missing` says what has to be done before, empty if nothing; until then the button is greyed out, with that as
        its tooltip.
        """
        button = self._looks.button(label, tooltip)
        button.on_click(lambda _: self._do(act))
        self._needs[button] = tooltip, missing
        row = self._row if row is None else row
        row.children = (*row.children, button)
        return button

    def show(self) -> None:
        """Grey out the buttons that cannot act yet, each with the reason."""
        for button, (tooltip, missing) in self._needs.items():
            reason = missing()
            button.disabled, button.tooltip = bool(reason), reason or tooltip

    def show_progress(self, words: str, fraction: float) -> bool:
        """Show how far a build or the steps have come, and return whether that was drawn; empty words hide the bar."""
        now = time.monotonic()
        if words and now - self._drawn_at < _REDRAW_SECONDS and fraction < 1.0:
            return False
        self._drawn_at = now
        self.progress.value = fraction
        controls.show(self.progress, on=bool(words))
        self._words.value = f"<div>{escape(words)}</div>" if words else ""
        return True

    def _do(self, act: Callable[[], object]) -> None:
        for button in self._needs:  # clicks made while the kernel works would queue and be done afterwards
            button.disabled = True
        try:
            with self.errors.watching():
                act()
        finally:
            self.show()
