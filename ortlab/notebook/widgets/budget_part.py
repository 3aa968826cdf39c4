"""Less memory, in the panel: a slider over what was predicted, what is kept then, and the button that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import traitlets

from ortlab.errors import BuildError
from ortlab.memory.saved_activations import kept_with
from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.browser import Part, packed
from ortlab.notebook.widgets.graph_display import is_built
from ortlab.render import html
from ortlab.render.budget_page import answer_notes
from ortlab.render.budget_states import applied_page, budget_states, kept_states
from ortlab.render.page import Mark, Note, Page

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.memory.saved_activations import SavedActivations
    from ortlab.notebook.widgets.controls import Looks
    from ortlab.records.runs import Run

_CHOSEN: Final = frozenset({"memory_plan", "memory_level", "recompute", "chunked_loss"})
"""Switches that a budget chooses itself."""

KEPT: Final = 70
"""Percent of step memory that the slider stands at first."""

_FIRST: Final = (
    "How much less memory, and at what cost? Predict runs the last step a few times and changes nothing; then a slider "
    "stands here, shows what each share costs, and shrinks the bars."
)

_NO_STEP: Final = (
    "Next: run a training step, %%ort_step -n 20 or lab.step(fn, n=20). Then the bars here show what it keeps for the "
    "backward, and Predict says what less of it costs."
)

_NO_TRAINING: Final = "The last step trained nothing. Run a training step: model.train(), then %%ort_step."

_AGAIN: Final = "Press Predict again."


class Shares(Part):
    """A slider from all of step memory to the least that was predicted, with cost and bars; see `static/budget.js`."""

    states = traitlets.Dict().tag(sync=True, to_json=packed)
    keep = traitlets.Int(KEPT).tag(sync=True)  # percent of step memory

    def __init__(self, looks: Looks) -> None:
        super().__init__("budget.js", looks.script("budget.js"), layout=looks.layout)

    def __repr__(self) -> str:
        return "Shares()"


class BudgetPart(controls.Column):
    """Predicts what less memory costs, shows it for each share, and applies the share that the slider stands at."""

    def __init__(self, lab: Lab, looks: Looks) -> None:
        self._lab = lab
        self._before: SavedActivations | None = None  # what is kept without plans; None until `predict`
        self._options = lab.options  # as they were at `predict`, and so the last run
        self._of: Run | None = None
        self.row = looks.row()
        self._old = looks.html()
        self.shares = Shares(looks)
        self.result = looks.html(_note(_NO_STEP))
        super().__init__([self.row, self._old, self.shares, self.result], layout=looks.layout)
        self.add_class("ortlab-budget")

    def opened(self) -> None:
        """Show what is kept now, or whether the prediction is still of that; nothing runs for it."""
        if self._before is None:
            self.result.value, self.shares.states = self._unpredicted()
            return
        last = self._last()
        if changed := sorted(set(self._lab.options.changed(self._options)) - _CHOSEN):
            self._old.value = _note(f"{', '.join(changed)} changed since. {_AGAIN}", Mark.WARN)
        elif last is not None and self._of is not None and last.data_digest != self._of.data_digest:
            runs = f"Of the data of run #{self._of.number}; run #{last.number} had other data."
            self._old.value = _note(f"{runs} If its sizes differ: {_AGAIN}")
        else:
            self._old.value = ""

    def follow(self) -> None:
        """Say the next step, before the tab is opened: while the kernel is busy, what stands there is what is read."""
        if self._before is None:
            self.result.value = self._next_step()

    def _next_step(self) -> str:
        words = self.why_not_predict() or _FIRST if self._lab.status.can_repeat else _NO_STEP
        return _note(words)

    def _unpredicted(self) -> tuple[str, dict[str, Any]]:
        """Return what stands here before anything is predicted: the next step, and what a step keeps."""
        states: dict[str, Any] = {}
        if is_built(self._lab):
            try:
                states = kept_states(self._lab.activations(progress=False))
            except BuildError as error:  # as after a call without gradients
                return _note(f"{error.what} {error.fix}"), states
        return self._next_step(), states

    def _last(self) -> Run | None:
        return next((run for run in reversed(self._lab.runs) if not run.sweep), None)

    def why_not_predict(self) -> str:
        """Say why nothing can be predicted; empty if it can."""
        several = len(self._lab.status.coverage.parts) > 1
        if several:
            return "A budget is for a model that is wrapped as a whole, or for one part of it."
        last = self._last()
        return _NO_TRAINING if last is not None and last.mode == "evaluation" else ""

    def why_not(self) -> str:
        """Say why nothing can be applied yet; empty if it can."""
        if self._before is None:
            return "Press Predict first: it shows what a share costs before you run it."
        return "" if self.shares.states else "Nothing that was predicted needs less memory."

    def predict(self) -> None:
        """Predict costs for every share, without running any plan."""
        found = self._lab.budget(f"{KEPT}%", verify=False, apply=False, progress=False)
        kept = self._lab.activations(plans=True, progress=False)
        places = {row.config: row.frequency for row in self._lab.plan().rows}
        self._before = kept_with(kept, (), places)
        self._options, self._of = self._lab.options, self._last()
        self._old.value = ""
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


def _note(words: str, mark: Mark = Mark.QUIET) -> str:
    return html.fragment(Page("", (Note(words, mark),)))
