"""The panel's row of buttons, and how far what they started has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Final

from ipywidgets.widgets.widget_int import ProgressStyle

from ortlab.notebook.widgets import lean
from ortlab.notebook.widgets.base import ErrorBox, Looks

if TYPE_CHECKING:
    import ipywidgets as widgets

_REDRAW_SECONDS: Final = 0.1
"""Shortest time between two drawings of the progress bar: a message per step would slow short steps down."""


class Actions(lean.Column):
    """Buttons that are greyed out while one of them acts, a bar for the build or the steps, and the last error."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._buttons: list[widgets.Button] = []
        self._needs: dict[widgets.Button, tuple[str, Callable[[], str]]] = {}
        self._drawn_at = 0.0
        self.errors = ErrorBox(looks)
        self.progress = lean.FloatProgress(max=1.0, layout=lean.hidden(), style=looks.style(ProgressStyle))
        self._words = looks.html()
        self._row = looks.row()
        way = lean.Box([self.progress, self._words], layout=looks.layout)
        way.add_class("ortlab-progress")
        super().__init__([self._row, way, self.errors], layout=looks.layout)
        self.add_class("ortlab-actions")

    def add(
        self, label: str, tooltip: str, act: Callable[[], object], missing: Callable[[], str] = lambda: ""
    ) -> widgets.Button:
        """Add a button; an error of `act` is shown.

        `missing` says what has to be done before, empty if nothing; until then the button is greyed out, with that as
        its tooltip.
        """
        button = self._looks.button(label, tooltip)
        button.on_click(lambda _: self._do(act))
        self._buttons.append(button)
        self._needs[button] = tooltip, missing
        self._row.children = tuple(self._buttons)
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
        lean.show(self.progress, on=bool(words))
        self._words.value = f"<div>{escape(words)}</div>" if words else ""
        return True

    def _do(self, act: Callable[[], object]) -> None:
        with self._busy(), self.errors.watching():
            act()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Disable the buttons: clicks made while the kernel works would queue and be done afterwards."""
        for button in self._buttons:
            button.disabled = True
        try:
            yield
        finally:
            self.show()
