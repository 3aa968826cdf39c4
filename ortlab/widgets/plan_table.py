"""The recompute plans with a tick box each; ticking one sets `memory_plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import ipywidgets as widgets

from ortlab.options import Options
from ortlab.render import html, units
from ortlab.render.page import Folded, Mark, Note, Page
from ortlab.widgets.base import close_tree, prose

if TYPE_CHECKING:
    from ortlab.memory.plan import MemoryPlan, PlanRow

Choose = Callable[[tuple[str, ...]], None]
"""Called with the plans that `memory_plan` should hold."""

PLANS_SHOWN: Final = 20
"""Plans with a tick box: those with the largest predicted savings. `lab.plan().table()` has all."""


class PlanTable(widgets.VBox):
    """Plans of a model, largest predicted saving first; empty until `show_plan`."""

    def __init__(self, on_choose: Choose) -> None:
        self._on_choose = on_choose
        self._plan: MemoryPlan | None = None
        self._options = Options()
        self._showing = False
        self.boxes: dict[str, widgets.Checkbox] = {}
        self._parts: tuple[widgets.Widget, ...] = ()
        super().__init__()

    def show_plan(self, plan: MemoryPlan) -> None:
        """Show another plan; the boxes of the one before are closed."""
        self._plan = plan
        self.boxes = {row.config: _box(row) for row in plan.rows[:PLANS_SHOWN]}
        for config, box in self.boxes.items():
            box.observe(lambda change, config=config: self._ticked(config, on=change["new"]), "value")
        lines = [_line(row, self.boxes[row.config]) for row in plan.rows[:PLANS_SHOWN]]
        notes = widgets.HTML(html.fragment(_notes(plan)))
        before, self._parts = self._parts, (widgets.HTML("<h5>Memory plan</h5>"), *lines, notes)
        self.children = self._parts
        for child in before:
            close_tree(child)
        self.show(self._options)

    def show(self, options: Options) -> None:
        """Tick the plans that `options` apply, without sending them back."""
        self._options = options
        if self._plan is None:
            return
        self._showing = True
        try:
            for config, box in self.boxes.items():
                box.value = set(config.split(",")) <= set(options.memory_plan)
                box.disabled = options.memory_level > 0
        finally:
            self._showing = False

    def _ticked(self, config: str, *, on: bool) -> None:
        """Add or take out one plan; a cluster is recomputed in one way only, so its other plans go."""
        if self._showing:
            return
        parts = tuple(config.split(","))
        clusters = {part.split(":")[0] for part in parts}
        kept = tuple(plan for plan in self._options.memory_plan if plan.split(":")[0] not in clusters)
        self._on_choose(kept + parts if on else kept)


def _box(row: PlanRow) -> widgets.Checkbox:
    return widgets.Checkbox(description=units.fold(row.config), indent=False, tooltip=row.sentence)


def _line(row: PlanRow, box: widgets.Checkbox) -> widgets.Box:
    saving = f'<span class="ortlab-saving">{units.size(row.saving_bytes)}</span>'
    sentence = widgets.HTML(f'<div class="ortlab-help">{saving}{prose(units.fold(row.sentence, 400))}</div>')
    line = widgets.Box([box, sentence])
    line.add_class("ortlab-plan")
    return line


def _notes(plan: MemoryPlan) -> Page:
    sizes = ", ".join(f"{name} = {size:,}" for name, size in plan.symbols.items())
    notes = [
        Note(
            f"Savings are predicted by ORT for the first batch ({sizes}), not measured: rerun and compare.",
            Mark.QUIET,
        )
    ]
    if not plan.rows:
        notes = [Note("ORT offers no recompute plan for this model.", Mark.QUIET)]
    if plan.memory_level:
        notes.append(
            Note(f"memory_level={plan.memory_level} chooses the plans; set it to 0 to tick your own.")
        )
    if len(plan.rows) > PLANS_SHOWN:
        hidden = units.count(len(plan.rows) - PLANS_SHOWN)
        notes.append(Note(f"{hidden} plans that save less: lab.plan().table() has them.", Mark.QUIET))
    report = (Folded("ORT's own report", plan.report),) if plan.report else ()
    return Page("", (*notes, *report))
