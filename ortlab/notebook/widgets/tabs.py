"""Tabs: a bar of names, and the page of the one that is chosen; the style sheet shows it without asking the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlab.notebook.widgets import controls

if TYPE_CHECKING:
    import ipywidgets as widgets

    from ortlab.notebook.widgets.controls import Looks


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
        self._naming = False
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
        chosen = self.bar.value
        self._naming = True  # new names choose the first tab, for a moment
        try:
            with self.bar.hold_sync():
                self.bar.options = self._names()
                self.bar.value = chosen
        finally:
            self._naming = False

    def _names(self) -> list[tuple[str, str]]:
        return [(f"{tab.name} ({tab.count})" if tab.count else tab.name, tab.name) for tab in self._tabs]

    def _tab(self, name: str) -> Tab:
        return next(tab for tab in self._tabs if tab.name == name)

    def _chosen(self, change: Any) -> None:
        if not self._naming and change["new"] is not None:
            self._tab(change["new"]).on_open()
