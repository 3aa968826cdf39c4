"""The panel: a lab's switches, status, runs and buttons in one column."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Final

import ipywidgets as widgets

from ortlab.render import html, plots, text
from ortlab.render.lab_pages import lab_page, status_note
from ortlab.render.run_pages import ENGINE_NAMES, ledger_page
from ortlab.widgets.base import ErrorBox, close_tree
from ortlab.widgets.plan_table import PlanTable
from ortlab.widgets.style import PANEL, SHEET
from ortlab.widgets.switches import SwitchList

if TYPE_CHECKING:
    from ortlab.lab import Lab
    from ortlab.render.page import Page
    from ortlab.switches import Value

RUNS_SHOWN: Final = 6
"""Runs in the panel's table: the latest. `lab.runs` shows more."""

_REDRAW_SECONDS: Final = 0.1
"""Shortest time between two drawings of the progress bar: a message per step would slow short steps down."""

_panels: weakref.WeakKeyDictionary[Lab, weakref.ref[Panel]] = weakref.WeakKeyDictionary()

_BADGES: Final = {"ort": "ORT", "eager": "EAGER", "compile": "COMPILE"}


class Panel(widgets.VBox):
    """A lab in one column; the widget computes nothing, and every button is a method of the lab.

    Parameters
    ----------
    lab
        The lab. Several panels of one lab stay in step.

    Attributes
    ----------
    lab
        The lab.
    errors
        What went wrong last, shown under the buttons.
    engine
        Who executes the model: `lab.set(engine=...)`.
    switches
        One control per switch: `lab.set(...)`.
    plans
        Tick boxes of the recompute plans, once `plan` has been asked for.
    rerun, compare, plan
        The buttons: `lab.rerun()`, `lab.compare()`, `lab.plan()`.
    progress
        Bar of the build or the steps under way.
    closed
        Whether `close` has been called.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.errors = ErrorBox()
        self._header = widgets.HTML()
        self.engine = widgets.ToggleButtons(
            options=[(name, key) for key, name in ENGINE_NAMES.items()],
            value=lab.engine,
            description="Engine",
        )
        self.rerun = _button(
            "Rerun", "Go back to the start of the last step call and do it again, as switched now"
        )
        self.rerun.button_style = "primary"
        self.compare = _button("Compare", "Hold all runs against the first: time, memory, loss")
        self.plan = _button(
            "Memory plan", "List what could be recomputed instead of kept for the backward pass"
        )
        self.progress = widgets.FloatProgress(
            max=1.0, layout=widgets.Layout(width="240px", visibility="hidden")
        )
        self._progress_text = widgets.HTML()
        self._runs = widgets.HTML()
        self._result = widgets.HTML()
        self.plans = PlanTable(lambda chosen: self._set(memory_plan=chosen))
        self.switches = SwitchList(lab.have, self._switch_chosen)
        self.closed = False
        self._showing = False
        self._drawn_at = 0.0
        buttons = widgets.Box([self.rerun, self.compare, self.plan, self.progress, self._progress_text])
        buttons.add_class("ortlab-row")
        super().__init__(
            [
                widgets.HTML(SHEET, layout=widgets.Layout(display="none")),
                self._header,
                self.engine,
                buttons,
                self.errors,
                self._runs,
                self._result,
                self.plans,
                self.switches,
            ]
        )
        self.add_class(PANEL)
        self.engine.observe(self._engine_chosen, "value")
        self.rerun.on_click(lambda _: self._do(self.lab.rerun))
        self.compare.on_click(lambda _: self._do(self._show_comparison))
        self.plan.on_click(lambda _: self._do(lambda: self.plans.show_plan(self.lab.plan())))
        self._unsubscribe = lab.observe(self._on_event)
        self._show_options()
        self._show_status()
        self._show_runs()

    # ---- from the lab -----------------------------------------------------------------------------------------

    def _on_event(self, event: str) -> None:
        """Follow the lab; an error in here must not reach the step that the lab is running."""
        kind, _, rest = event.partition(":")
        try:
            if kind == "progress":
                self._show_progress(*rest.rpartition(":")[::2])
            else:
                {"options": self._show_options, "status": self._show_status, "runs": self._show_runs}[kind]()
        except Exception as error:  # noqa: BLE001 - shown under the buttons
            self.errors.show(error)

    def _show_options(self) -> None:
        self._showing = True
        try:
            self.engine.value = self.lab.engine
        finally:
            self._showing = False
        self.switches.show(self.lab.options)
        self.plans.show(self.lab.options)

    def _show_status(self) -> None:
        status = self.lab.status
        note = status_note(status)
        name = "PYTORCH (fallback)" if status.state == "fallback" else _BADGES[status.engine]
        self._header.value = (
            f'<div class="ortlab ortlab-header" role="status">'
            f"<span><code>{escape(self.lab.name)}</code> {escape(type(self.lab.module).__name__)}</span>"
            f'<span class="ortlab-badge ortlab-{note.mark.value}">{name}</span>'
            f'<span class="ortlab-state ortlab-{note.mark.value}">{escape(note.text)}</span></div>'
        )

    def _show_runs(self) -> None:
        self._runs.value = html.fragment(ledger_page(self.lab.runs, RUNS_SHOWN))

    def _show_progress(self, words: str, fraction: str) -> None:
        now = time.monotonic()
        if words and now - self._drawn_at < _REDRAW_SECONDS and float(fraction) < 1.0:
            return
        self._drawn_at = now
        self.progress.value = float(fraction)
        self.progress.layout.visibility = "visible" if words else "hidden"
        self._progress_text.value = f'<div role="status">{escape(words)}</div>'

    # ---- to the lab -------------------------------------------------------------------------------------------

    def _engine_chosen(self, change: Any) -> None:
        if not self._showing:
            self._set(engine=change["new"])

    def _switch_chosen(self, name: str, value: Value) -> None:
        self._set(**{name: value})

    def _set(self, **changes: Any) -> None:
        with self.errors.watching():
            self.lab.set(**changes)
        # After a refusal the control still has what the user chose; the lab has what holds.
        self._show_options()

    def _show_comparison(self) -> None:
        comparison = self.lab.compare()
        runs = [comparison.baseline, *(contrast.run for contrast in comparison.contrasts)]
        figure = plots.svg(
            plots.overview(runs), "Loss, step time and peak memory of the runs in the table above"
        )
        self._result.value = (
            f"{html.fragment(comparison)}\n<details open><summary>Charts</summary>{figure}</details>"
        )

    def _do(self, act: Callable[[], object]) -> None:
        with self._busy(), self.errors.watching():
            act()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Disable the buttons: clicks made while the kernel works would queue and be done afterwards."""
        buttons = (self.rerun, self.compare, self.plan)
        for button in buttons:
            button.disabled = True
        try:
            yield
        finally:
            for button in buttons:
                button.disabled = False

    # ---- other forms and the end ------------------------------------------------------------------------------

    def page(self) -> Page:
        """Say what the panel shows, for front ends without widgets."""
        return lab_page(self.lab)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = super()._repr_mimebundle_(**kwargs) or {}
        page = self.page()
        return {**bundle, "text/plain": text.render(page), "text/html": html.render(page)}

    def __repr__(self) -> str:
        """Name the lab, without an address that would change from run to run."""
        return f"Panel({self.lab!r})"

    def close(self) -> None:
        """End the panel: it follows the lab no more, and all its widgets go from kernel and browser."""
        self.closed = True
        self._unsubscribe()
        for row in self.switches.all_rows:  # those of other groups are nobody's children now
            close_tree(row)
        close_tree(self)


def panel(lab: Lab) -> Panel:
    """Return the panel of a lab, and make it at the first call.

    Running a cell again shows the same panel, and leaves no second one behind that follows the lab. `Panel(lab)`
    makes another.

    Parameters
    ----------
    lab
        The lab.
    """
    shown = _panels.get(lab)
    known = shown() if shown is not None else None
    if known is None or known.closed:
        known = Panel(lab)
        _panels[lab] = weakref.ref(known)
    return known


def _button(label: str, tooltip: str) -> widgets.Button:
    return widgets.Button(description=label, tooltip=tooltip)
