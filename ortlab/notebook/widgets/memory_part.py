"""The panel's part about memory: the readings of the run that goes on, and of the last one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from ipywidgets.widgets.widget_string import HTMLStyle

from ortlab.lab.following import memory_phases
from ortlab.notebook.widgets import lean
from ortlab.render import html, plots
from ortlab.render.memory_pages import live_page, phases_plot

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.notebook.widgets.base import Looks

_REDRAW_SECONDS: Final = 0.25
"""Shortest time between two drawings while a run goes on: each is a message to the browser."""


class MemoryPart(lean.Html):
    """Memory by phase, empty unless `print_memory_stats` is on."""

    def __init__(self, lab: Lab, looks: Looks) -> None:
        super().__init__(layout=looks.layout, style=looks.style(HTMLStyle))
        self._lab = lab
        self._drawn_at = 0.0

    def follow(self) -> None:
        """Show the latest reading of the run that goes on, at most four times a second."""
        now = time.monotonic()
        if now - self._drawn_at >= _REDRAW_SECONDS and (phases := memory_phases(self._lab)).readings:
            self._drawn_at = now
            self.value = html.fragment(live_page(phases))

    def show(self) -> None:
        """Show the readings of the last run, with a chart that opens."""
        phases = memory_phases(self._lab)
        if not phases.readings:
            self.value = ""
            return
        chart = plots.inline(phases_plot(phases), "Memory at the points of each step")
        self.value = f"{html.fragment(live_page(phases))}\n<details><summary>Chart</summary>{chart}</details>"
