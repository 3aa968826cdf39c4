"""The frame of what stands in a cell: style sheet, attendant in the browser, tabs, saved form, and a panel's head."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

import traitlets
from IPython import get_ipython
from IPython.display import display, publish_display_data, update_display
from ipywidgets.widgets.widget_int import ProgressStyle

from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.browser import Part, compact, compacted_style
from ortlab.notebook.widgets.controls import ErrorBox, Looks
from ortlab.notebook.widgets.record_table import RULES
from ortlab.options.configuration import engine_kind
from ortlab.render import html, text
from ortlab.render.execution_words import badge, coverage_blocks
from ortlab.render.lab_pages import pending_note, status_note
from ortlab.render.page import Mark, Note, Page
from ortlab.render.run_pages import last_run_note

if TYPE_CHECKING:
    import ipywidgets as widgets

    from ortlab.lab.lab import Lab
    from ortlab.notebook.widgets.controls import Looks
    from ortlab.records.status import Status


PANEL: Final = "ortlab-panel"
"""Class of the panel's outermost element; every rule of `static/panel.css` stands under it."""

SHEET: Final = compacted_style(html.STYLE + compact("panel.css") + RULES)
"""Style sheet of a panel and of all that stands in it."""


class Attendant(Part):
    """Stands in a panel, brings its style, and looks after its elements; see `static/attendant.js`."""

    # A screen reader calls the panel by `name`.

    name = traitlets.Unicode().tag(sync=True)

    def __init__(self, name: str, looks: Looks) -> None:
        super().__init__("attendant.js", looks.script("attendant.js", SHEET), name=name, layout=looks.layout)
        self.on_msg(self._asked)

    def _asked(self, _widget: object, message: Any, _buffers: object) -> None:
        """Answer the browser: everything that it sent before is done now."""
        self.send({"answered": message["asked"]})

    def __repr__(self) -> str:
        return f"Attendant({self.name!r})"


_STYLE = """\
<style>
.jp-OutputArea:has(.ortlab-panel.ortlab-KEY:not(.jupyter-widgets-disconnected))
  > .jp-OutputArea-child:has(.ortlab-saved.ortlab-KEY) { display: none; }
.jp-OutputArea-child:has(> .jp-OutputArea-output:not([data-mime-type])):not(:has(.ortlab-panel)):has(
  + .jp-OutputArea-child .ortlab-saved) { display: none; }
</style>
"""
"""Hides the saved form beside the living panel, and JupyterLab's line that there is no panel beside the saved form.

JupyterLab does not turn to another form of an output when the widget in it cannot be shown, so the saved form has to be
an output of its own.
"""


def forms(page: Page) -> dict[str, str]:
    """Return a page in the forms that need no widget, by MIME type."""
    return {"text/plain": text.render(page), "text/html": html.render(page)}


class SavedForm:
    """Shows a panel twice, as a widget and as a table that the page hides as long as the widget lives."""

    # `page` returns what the table shall say now. A table that changes with the lab is `dated`: it says when that was.

    def __init__(self, panel: widgets.DOMWidget, page: Callable[[], Page], *, dated: bool = True) -> None:
        self._panel = panel
        self._page = page
        self._dated = dated
        self._key = f"ortlab-{panel.model_id}"
        self._displayed = False
        panel.add_class(self._key)

    def display(self, view: dict[str, Any]) -> None:
        """Show both forms; `view` is the output that holds the widget."""
        # nbconvert warns of an output if it knows none of its forms, so there is one that shows nothing.
        publish_display_data({**view, "text/html": ""})
        display(self._bundle(), raw=True, display_id=self._key)
        self._displayed = True

    def renew(self) -> None:
        """Write the table anew, so that the notebook is saved with what holds now."""
        # A terminal could only print it once more, so nothing is done there.
        if self._displayed and hasattr(get_ipython(), "kernel"):
            update_display(self._bundle(), raw=True, display_id=self._key)

    def _bundle(self) -> dict[str, str]:
        page = self._page()
        now = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d at %H:%M:%S")
        dated = Note(f"The panel as it was on {now} UTC.", Mark.QUIET)
        whole = Page(page.title, (dated, *page.blocks)) if self._dated else page
        found = forms(whole)
        style = _STYLE.replace("ortlab-KEY", self._key)
        saved = f'{style}<div class="ortlab-saved {self._key}">{found["text/html"]}</div>'
        return {**found, "text/html": saved}


@dataclass
class Tab:
    """One tab: its name, its page, and what is called when it is opened, which draws what is expensive."""

    name: str
    page: widgets.Widget
    on_open: Callable[[], None] = lambda: None
    count: str = ""  # stands behind the name


class Tabs:
    """A `bar` of names above the `pages`, of which one is shown."""

    # They are two widgets, since the style sheet finds the page by what stands before it. While a cell runs, the kernel
    # answers nothing, and tabs still turn: the browser knows which name is pressed.

    def __init__(self, tabs: list[Tab], looks: Looks) -> None:
        self._tabs = tabs
        self.bar = controls.ToggleButtons(options=self._names(), layout=looks.layout)
        self.bar.add_class("ortlab-tabbar")
        self.pages = controls.Box([tab.page for tab in tabs], layout=looks.layout)
        self.pages.add_class("ortlab-pages")
        self.bar.observe(self._chosen, "value")

    @property
    def chosen(self) -> str:
        """Name of the tab that is shown."""
        return str(self.bar.value)

    def open(self, name: str) -> None:
        """Show a tab; if it is shown already, its page is drawn anew."""
        if self.chosen == name:
            self._tab(name).on_open()
        else:
            self.bar.value = name

    def add(self, tab: Tab) -> None:
        """Put another tab behind the last."""
        self._tabs.append(tab)
        self.pages.children = (*self.pages.children, tab.page)
        self._name()

    def count(self, name: str, words: str) -> None:
        """Write a few words behind a name; empty words take that back."""
        tab = self._tab(name)
        if tab.count != words:
            tab.count = words
            self._name()

    def _name(self) -> None:
        self.bar.rename(self._names())

    def _names(self) -> list[tuple[str, str]]:
        return [(f"{tab.name} ({tab.count})" if tab.count else tab.name, tab.name) for tab in self._tabs]

    def _tab(self, name: str) -> Tab:
        return next(tab for tab in self._tabs if tab.name == name)

    def _chosen(self, change: Any) -> None:
        if change["new"] is not None:
            self._tab(change["new"]).on_open()


# ---- the head of a panel -------------------------------------------------------------------------------------------


_BADGES: Final = {"ort": "ORT", "eager": "EAGER", "checkpoint": "CHECKPOINT", "compile": "COMPILE"}


class Header(controls.Column):
    """Name, badge, state, pending builds and the last run, in lines that screen readers follow."""

    # `about` holds the parts of the model that are wrapped, and the notes of the lab: it stands where there is room.

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
        """Add a button, to a row that stands elsewhere or else to the one here; an error of `act` is shown."""
        # `missing` says what has to be done before, empty if nothing; until then the button is greyed out, with that as
        # its tooltip.
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
