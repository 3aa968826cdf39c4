"""The table of densities in the output of a cell, redrawn while steps run."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Final

from IPython.display import display

from ortlab.lab.following import observe
from ortlab.records.density import Density
from ortlab.records.density_report import DensityReport

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

    from ortlab.lab.lab import Lab

_REDRAW_SECONDS: Final = 0.25
"""Shortest time between two drawings while a run goes on: each is a message to the browser."""


def follow(lab: Lab) -> None:
    """Show what a lab counts in the output of this cell, at most four times a second, and once after each run."""
    if lab not in _followed:
        _followed[lab] = _Redrawing(lab)
        observe(lab, _followed[lab])
    _followed[lab].handle = display(DensityReport(Density(), "no step so far"), display_id=True)


def unfollow(lab: Lab) -> None:
    """Let the table be as it is; does nothing if there is none."""
    if lab in _followed:
        _followed[lab].handle = None


class _Redrawing:
    """Told about each event of a lab, draws what the steps have counted; the lab keeps it, and not the other way."""

    def __init__(self, lab: Lab) -> None:
        self.handle: DisplayHandle | None = None
        self._lab = weakref.ref(lab)
        self._drawn_at = 0.0

    def __call__(self, event: str) -> None:
        """Redraw where a step or a run has ended."""
        lab, handle = self._lab(), self.handle
        if lab is None or handle is None or not lab.options.print_input_density:
            return
        now = time.monotonic()
        is_step = event.startswith("progress:Step ") and now - self._drawn_at >= _REDRAW_SECONDS
        if event == "runs" or is_step:
            self._drawn_at = now
            handle.update(lab.density())


_followed: Final[weakref.WeakKeyDictionary[Lab, _Redrawing]] = weakref.WeakKeyDictionary()
