"""Less memory, in the panel: a slider over what was predicted, what is kept then, and the button that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import traitlets

from ortlab.memory.saved_activations import kept_with
from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.browser import Part, packed
from ortlab.notebook.widgets.controls import Layout
from ortlab.render import html
from ortlab.render.budget_page import answer_notes
from ortlab.render.budget_states import applied_page, budget_states
from ortlab.render.page import Mark, Note, Page

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.memory.saved_activations import SavedActivations
    from ortlab.notebook.widgets.controls import Looks

KEPT: Final = 70
"""Percent of step memory that the slider stands at first."""

_FIRST: Final = (
    "How much less memory, and at what cost? Predict runs the last step a few times and changes nothing; then the "
    "slider shows what each share costs."
)


class Shares(Part):
    """A slider from all of step memory to the least that was predicted, with cost and bars; see `static/budget.js`."""

    states = traitlets.Dict().tag(sync=True, to_json=packed)
    keep = traitlets.Int(KEPT).tag(sync=True)  # percent of step memory

    def __init__(self, looks: Looks) -> None:
        super().__init__("budget.js", looks.script("budget.js"), layout=Layout())

    def __repr__(self) -> str:
        return "Shares()"


class BudgetPart(controls.Column):
    """Predicts what less memory costs, shows it for each share, and applies the share that the slider stands at."""

    def __init__(self, lab: Lab, looks: Looks) -> None:
        self._lab = lab
        self._before: SavedActivations | None = None  # what is kept without plans; None until `predict`
        self.row = looks.row()
        self.shares = Shares(looks)
        self.result = looks.html(_note(_FIRST))
        super().__init__([self.row, self.shares, self.result], layout=looks.layout)
        self.add_class("ortlab-budget")

    def why_not(self) -> str:
        """Say why nothing can be applied yet; empty if it can."""
        return (
            ""
            if self.shares.states
            else "Press Predict first: it shows what a share costs before you run it."
        )

    def predict(self) -> None:
        """Predict costs for every share, without running any plan."""
        found = self._lab.budget(f"{KEPT}%", verify=False, apply=False, progress=False)
        kept = self._lab.activations(plans=True, progress=False)
        places = {row.config: row.frequency for row in self._lab.plan().rows}
        self._before = kept_with(kept, (), places)
        states = budget_states(found, kept, places)
        self.shares.states = states
        if states:
            self.shares.keep = max(self.shares.keep, states["low"])
        notes = [] if states else answer_notes(found)
        self.result.value = html.fragment(Page("", tuple(notes))) if notes else ""

    def apply(self) -> None:
        """Choose plans for the share, run and time them, and say what came out and what changed."""
        before = self._before if self._before is not None else self._lab.activations()
        found = self._lab.budget(f"{self.shares.keep}%", curve=False, progress=False)
        self.result.value = html.fragment(applied_page(found, before, self._lab.activations()))


def _note(words: str) -> str:
    return html.fragment(Page("", (Note(words, Mark.QUIET),)))
