"""The panel: a lab's engine, status and last run, and below them tabs: overview, memory, graph, switches, messages."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from ortlab.lab.following import note_shown, observe, shown_ranks
from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.activations_explorer import ActivationsExplorer
from ortlab.notebook.widgets.browser import compact, compacted_style, living
from ortlab.notebook.widgets.budget_part import BudgetPart
from ortlab.notebook.widgets.controls import Looks, close_tree
from ortlab.notebook.widgets.frame import (
    PANEL,
    SHEET,
    Actions,
    Attendant,
    Header,
    SavedForm,
    Tab,
    Tabs,
    forms,
)
from ortlab.notebook.widgets.graph_display import GraphPart, highlight, highlight_plans
from ortlab.notebook.widgets.message_list import MessageList
from ortlab.notebook.widgets.plan_table import PlanTable
from ortlab.notebook.widgets.ranks_part import RanksPart
from ortlab.notebook.widgets.runs_part import MemoryPart, RunsPart
from ortlab.notebook.widgets.switches import SwitchList
from ortlab.options.options import Options
from ortlab.render import html
from ortlab.render.execution_words import ENGINE_NAMES, engine_words
from ortlab.render.lab_pages import lab_page, switch_words, warnings_text

if TYPE_CHECKING:
    import ipywidgets as widgets

    from ortlab.lab.lab import Lab
    from ortlab.options.switches import Value
    from ortlab.render.page import Page

OVERVIEW: Final = "Overview"
MEMORY: Final = "Memory"
GRAPH: Final = "Graph"
SWITCHES: Final = "Switches"
MESSAGES: Final = "Messages"
RANKS: Final = "Ranks"

_FILES: Final = {
    "attendant.js": SHEET,
    **dict.fromkeys(("record_table.js", "picture.js", "scatter.js", "budget.js"), ""),
    "graph_map.js": compacted_style(compact("graph_map.css")),
}
"""Scripts of a panel, and their styles."""

_RUN_A_STEP: Final = "Run a step first: %%ort_step -n 20, or lab.step(fn, n=20)."

_panels: weakref.WeakKeyDictionary[Lab, weakref.ref[Panel]] = weakref.WeakKeyDictionary()


class Panel(controls.Column):
    """A lab in tabs under a head that always shows; it computes nothing, and every button is a method of the lab."""

    # It is at most 700 pixels high: a tab scrolls inside itself. Several panels of one lab stay in step.

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.closed = False
        self._showing = False
        self._built_for = ""
        self._looks = looks = Looks(_FILES)
        self.header = Header(lab, looks)
        self.engine = controls.ToggleButtons(
            options=_engines(lab.engine), value=lab.engine, description="Engine", layout=looks.layout
        )
        self.actions = Actions(looks)
        self.errors = self.actions.errors
        self.runs = RunsPart(lab, looks)
        self._overview_row, self._memory_row = looks.row(), looks.row()
        self._past: list[tuple[str, Options]] = []  # engine and switches before each change, for `undo`
        self._held = (lab.engine, lab.options)
        self.budget = BudgetPart(lab, looks)
        self._add_buttons()
        self._memory = MemoryPart(lab, looks)
        self._measured = looks.html()
        self._plans: PlanTable | None = None
        self._explorer: ActivationsExplorer | None = None
        self._ranks: RanksPart | None = None
        self._asked_for = controls.Column([self._measured], layout=looks.layout)
        self.switches = SwitchList(lab.have, self._switch_chosen, self._cost_of, lab.from_environment, looks)
        self.graph = GraphPart(lab, self.errors, looks)
        self.messages = MessageList(lambda: self.lab.messages, looks)
        overview = [self._overview_row, self.runs, self.header.about]
        memory = [self.budget, self._memory_row, self._asked_for, self._memory]
        self.tabs = Tabs(
            [
                Tab(OVERVIEW, controls.Column(overview, layout=looks.layout)),
                Tab(MEMORY, controls.Column(memory, layout=looks.layout), self._open_memory),
                Tab(GRAPH, self.graph, self.graph.opened),
                Tab(SWITCHES, self.switches),
                Tab(MESSAGES, self.messages, self.messages.opened),
            ],
            looks,
        )
        control = looks.row(self.engine, self.actions)
        control.add_class("ortlab-control")
        super().__init__(
            [
                Attendant(lab.name, looks),
                self.header,
                control,
                self.errors,
                self.tabs.bar,
                self.tabs.pages,
            ],
            layout=looks.layout,
        )
        self.add_class(PANEL)
        self.add_class("ortlab-tabbed")
        self._saved = SavedForm(self, self.page)
        self.engine.observe(self._engine_chosen, "value")
        self.switches.reset.on_click(lambda _: self._reset())
        self._unsubscribe = observe(lab, self._on_event)
        self._show_options()
        self._show_status()
        self._show_runs()

    @property
    def plans(self) -> PlanTable:
        """Table of the recompute plans, empty until `plan` is pressed; made when it is first asked for."""
        if self._plans is None:
            self._plans = PlanTable(self._plans_chosen, self._looks)
            self._plans.show(self.lab.options)
            self._ask(self._plans)
        return self._plans

    @property
    def explorer(self) -> ActivationsExplorer:
        """What is kept for the backward pass, empty until `activations` is pressed; made when it is first asked for."""
        if self._explorer is None:
            self._explorer = ActivationsExplorer(self._looks)
            self._explorer.pointed = lambda nodes: highlight(self.lab, nodes)
            self._ask(self._explorer)
        return self._explorer

    @property
    def ranks(self) -> RanksPart:
        """What other ranks have measured, in a tab of its own; made when it is first asked for."""
        if self._ranks is None:
            self._ranks = RanksPart(self._looks)
            self.tabs.add(Tab(RANKS, self._ranks))
        return self._ranks

    def _add_buttons(self) -> None:
        add = self.actions.add
        self.rerun = add(
            "Rerun",
            "Go back to the start of the last step call and do it again, as switched now",
            self._rerun,
            self._no_step,
        )
        self.rerun.button_style = "primary"
        self.undo = add(
            "Undo",
            "Take the last change of engine and switches back",
            self._undo,
            lambda: "" if self._past else "No switch was changed in this panel's time.",
        )
        self.compare = add(
            "Compare",
            "Hold the ticked runs, or all, against the first: time, memory, loss",
            self.runs.compare,
            lambda: "" if self.runs.can_compare else "There have to be two runs: press Rerun, or run a step.",
            self._overview_row,
        )
        self.settle = add(
            "Measure in turns",
            "Run the first run's switches and the last one's again, in turns from one start, to tell which is faster",
            self.runs.settle,
            self.runs.why_not_settle,
            self._overview_row,
        )
        self.predict = add(
            "Predict what less memory costs",
            "Profile the last step, and predict memory and time for the plans that cost least; nothing is switched on",
            self.budget.predict,
            lambda: self._no_step() or self.budget.why_not_predict(),
            self.budget.row,
        )
        self.apply = add(
            "Apply and verify",
            "Choose the plans for this share, run, measure and time them, and switch them on if they hold: %ort_budget",
            self.budget.apply,
            lambda: self._no_step() or self.budget.why_not(),
            self.budget.row,
        )
        self.plan = add(
            "Memory plan",
            "List what could be recomputed instead of kept for the backward pass",
            self._show_plan,
            self._no_graph,
            self._memory_row,
        )
        self.activations = add(
            "Saved activations",
            "List what the forward keeps for the backward pass",
            self._show_activations,
            self._no_graph,
            self._memory_row,
        )
        self.measure = add(
            "Measure memory",
            "Run the last step again and measure what each phase needs; a minute or less",
            self._show_measurement,
            self._no_step,
            self._memory_row,
        )

    def _no_step(self) -> str:
        return "" if self.lab.status.can_repeat else _RUN_A_STEP

    def _no_graph(self) -> str:
        return "" if self.lab.status.executed_by else self._no_step()

    # ---- from the lab -----------------------------------------------------------------------------------------

    def _on_event(self, event: str) -> None:
        """Follow the lab; an error in here must not reach the step that the lab is running."""
        kind, _, rest = event.partition(":")
        try:
            if kind == "progress":
                self._show_progress(*rest.rpartition(":")[::2])
                return
            if kind != "status":  # something has succeeded since
                self.errors.clear()
            {"options": self._show_options, "status": self._show_status, "runs": self._show_runs}[kind]()
            if kind == "options":
                # What `lab.set(...)` returns at the end of a cell is no reason for another panel.
                note_shown(self.lab)
            if kind != "status":
                self._saved.renew()
        except Exception as error:  # noqa: BLE001 - shown under the buttons
            self.errors.show(error)

    def _show_options(self) -> None:
        self.header.show_status()  # first, since it is what a click is answered with
        self._note_change()
        self._showing = True
        try:
            if tuple(self.engine.options) != (options := tuple(_engines(self.lab.engine))):
                self.engine.options = options
            self.engine.value = self.lab.engine
        finally:
            self._showing = False
        self._show_costs()
        changed = len(self.lab.options.changed(Options()))
        self.tabs.count(SWITCHES, f"{changed} changed" if changed else "")
        if self._plans is not None:
            self._plans.show(self.lab.options)
        self.graph.follow()
        self._follow_memory()

    def _show_costs(self) -> None:
        """Show what a change of each switch takes now; that changes with what is built and what was measured."""
        self._built_for = self.lab.rebuild().stage
        self.header.show_pending()
        self.switches.show(self.lab.options)

    def _cost_of(self, name: str) -> str:
        return switch_words(self.lab.rebuild(name), self.lab.rebuild())

    def _show_status(self) -> None:
        self.header.show_status()
        self.actions.show()
        if self._built_for != self.lab.rebuild().stage:
            self._show_costs()
            self._show_messages()

    def _show_messages(self) -> None:
        self.messages.show()
        self.tabs.count(MESSAGES, warnings_text(self.lab.messages))

    def _show_runs(self) -> None:
        self.header.show_result()
        self.runs.show()
        ranks = shown_ranks(self.lab)
        if ranks is not None and (self._ranks is None or self._ranks.ranks is not ranks):
            self.ranks.show(ranks)
        self._memory.show()
        self.actions.show()
        self._show_costs()
        self._show_messages()
        if self.tabs.chosen == GRAPH:
            self.graph.opened()
        else:
            self.graph.follow()
        self._follow_memory()

    def _open_memory(self) -> None:
        with self.errors.watching():
            self.budget.opened()

    def _follow_memory(self) -> None:
        if self.tabs.chosen == MEMORY:
            self.budget.opened()
        else:
            self.budget.follow()

    def _show_progress(self, words: str, fraction: str) -> None:
        if self.actions.show_progress(words, float(fraction)) and words:
            self._memory.follow()

    # ---- to the lab -------------------------------------------------------------------------------------------

    def _engine_chosen(self, change: Any) -> None:
        if not self._showing:
            self._set(engine=change["new"])

    def _switch_chosen(self, name: str, value: Value) -> None:
        """Set a switch; a level and plans of one's own exclude each other, so the later choice takes the other out."""
        held = self.lab.options
        changes: dict[str, Any] = {name: value}
        said = ""
        if name == "memory_level" and value and held.memory_plan:
            changes["memory_plan"] = ()
            plans = "plan is" if len(held.memory_plan) == 1 else "plans are"
            said = f"The level chooses its own plans: your {len(held.memory_plan)} ticked {plans} off now."
        elif name == "memory_plan" and value and held.memory_level:
            changes["memory_level"] = 0
            said = f"Your plans are on, so memory_level is 0; it was {held.memory_level}."
        if self._set(**changes):
            self.switches.say(name, said)
        elif self.errors.reason:
            self.switches.say(name, f"Not set. {self.errors.reason}")

    def _reset(self) -> None:
        defaults = Options()
        self._set(**{name: getattr(defaults, name) for name in self.lab.options.changed(defaults)})

    def _undo(self) -> None:
        engine, options = self._past[-1]
        self.lab.set(
            engine=engine, **{name: getattr(options, name) for name in self.lab.options.changed(options)}
        )

    def _note_change(self) -> None:
        """Keep what held before; to come back to what held once, as an analysis does, is no change."""
        now = (self.lab.engine, self.lab.options)
        if now == self._held:
            return
        self._past = self._past[: self._past.index(now)] if now in self._past else [*self._past, self._held]
        self._held = now
        self.actions.show()

    def _plans_chosen(self, plans: tuple[str, ...]) -> None:
        # First, since the places of the plans are those of the present build.
        highlight_plans(self.lab, plans)
        self._set(memory_plan=plans)

    def _set(self, **changes: Any) -> bool:
        """Set switches, and return whether that changed anything."""
        before = (self.lab.engine, self.lab.options)
        with self.errors.watching():
            self.lab.set(**changes)
        if (self.lab.engine, self.lab.options) != before:
            return True
        # Refused: the control still has what the user chose; the lab has what holds.
        self._show_options()
        return False

    def _ask(self, part: widgets.DOMWidget) -> None:
        """Put what a button of the memory tab has asked for right below it, above what was asked for before."""
        others = [one for one in self._asked_for.children if one is not part]
        self._asked_for.children = (part, *others)

    def _show_measurement(self) -> None:
        self._measured.value = html.fragment(self.lab.memory())
        self._ask(self._measured)

    def _show_plan(self) -> None:
        self.plans.show_plan(self.lab.plan())
        self._ask(self.plans)

    def _rerun(self) -> None:
        self.lab.rerun()
        if self.lab.engine != "ort" or self.lab.status.state != "ready":
            return
        if self._plans is not None and self._plans.plan is not None:  # what ORT applies of them is known now
            self._plans.show_plan(self.lab.plan())
        if self._explorer is not None and self._explorer.activations is not None:
            self._read_activations()

    def _show_activations(self) -> None:
        self._read_activations()
        self._ask(self.explorer)

    def _read_activations(self) -> None:
        self.explorer.show(self.lab.activations(), lambda: self.lab.activations(plans=True))

    # ---- other forms and the end ------------------------------------------------------------------------------

    def page(self) -> Page:
        """Say what the panel shows, for front ends without widgets."""
        return lab_page(self.lab)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = super()._repr_mimebundle_(**kwargs) or {}
        return {**bundle, **forms(self.page())}

    def _ipython_display_(self) -> None:
        self._saved.display(living(super()._repr_mimebundle_() or {}))

    def __repr__(self) -> str:
        return f"Panel({self.lab!r})"

    def close(self) -> None:
        """End the panel: it follows the lab no more, and all its widgets go from kernel and browser."""
        self.closed = True
        self._unsubscribe()
        self.graph.let_go()
        close_tree(self)
        self._looks.close()


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


def _engines(present: str) -> list[tuple[str, str]]:
    """Return words and name of each engine that can be chosen; also the present one, if it has settings of its own."""
    known = [(words, name) for name, words in ENGINE_NAMES.items()]
    return known if present in ENGINE_NAMES else [*known, (engine_words(present), present)]
