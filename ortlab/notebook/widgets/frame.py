"""The frame of what stands in a cell: its style sheet, its attendant in the browser, its tabs, and its saved form."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import traitlets
from IPython import get_ipython
from IPython.display import display, publish_display_data, update_display

from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.browser import Part, compact, compacted_style
from ortlab.notebook.widgets.record_table import RULES
from ortlab.render import html, text
from ortlab.render.page import Mark, Note, Page

if TYPE_CHECKING:
    import ipywidgets as widgets

    from ortlab.notebook.widgets.controls import Looks


PANEL: Final = "ortlab-panel"
"""Class of the panel's outermost element; every rule of `static/panel.css` stands under it."""

SHEET: Final = compacted_style(html.STYLE + compact("panel.css") + RULES)
"""Style sheet of a panel and of all that stands in it."""


class Attendant(Part):
    """Stands in a panel, brings its style, and looks after its elements; see `static/attendant.js`.

    A screen reader calls the panel by `name`.
    """

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
    """Shows a panel twice, as a widget and as a table that the page hides as long as the widget lives.

    `page` returns what the table shall say now. A table that changes with the lab is `dated`: it says when that was.
    """

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
        """Write the table anew, so that the notebook is saved with what holds now.

        A terminal could only print it once more, so nothing is done there.
        """
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
    """A `bar` of names above the `pages`, of which one is shown.

    They are two widgets, since the style sheet finds the page by what stands before it. While a cell runs, the kernel
    answers nothing, and tabs still turn: the browser knows which name is pressed.
    """

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
