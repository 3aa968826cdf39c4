"""The recompute plans as a table; ticking one sets `memory_plan`."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from operator import attrgetter
from typing import TYPE_CHECKING

from ortlab import units
from ortlab.errors import OptionError
from ortlab.memory.plan import Choice
from ortlab.memory.symbolic_sizes import arguments, free_sizes
from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.controls import Fold, Looks
from ortlab.notebook.widgets.record_table import Column, Content, Intents, Look, RecordTable, Slider
from ortlab.options.options import Options
from ortlab.render import html
from ortlab.render.page import Mark, Note, Page
from ortlab.render.plan_pages import (
    NO_OPPORTUNITY,
    WHERE_KNOWN,
    level_text,
    missing_notes,
    per_ms,
    recomputed_table,
    sizes_text,
    state_notes,
)

if TYPE_CHECKING:
    from ortlab.memory.plan import MemoryPlan, PlanRow

Choose = Callable[[tuple[str, ...]], None]
"""Called with the plans that `memory_plan` should hold."""


class PlanTable(controls.Column):
    """Plans of a model, largest predicted saving first; empty until `show_plan`."""

    # `report` folds what ORT itself says of the plans. A table without `looks` stands alone.

    def __init__(self, on_choose: Choose, looks: Looks | None = None) -> None:
        hosted, looks = looks, looks or Looks()
        self._on_choose = on_choose
        self.plan: MemoryPlan | None = None  # for the sizes of the sliders; None until `show_plan`
        self._as_read: MemoryPlan | None = None
        self._sizes: dict[str, int] = {}
        self._refused = ""
        self._options = Options()
        self._notes = looks.html()
        self.table: RecordTable[PlanRow] = RecordTable(
            "Recompute plans", Intents(tick=self.tick, count=self.set_count, slide=self.set_size), hosted
        )
        self._report = looks.html()
        self.report = Fold(
            "ORT's own report", self._report, self._draw_report, looks, layout=controls.hidden()
        )
        parts = [looks.html("<h5>Memory plan</h5>"), self.table, self._notes, self.report]
        super().__init__(parts, layout=controls.hidden())
        self.add_class("ortlab-plans")

    def show_plan(self, plan: MemoryPlan) -> None:
        """Show another plan; order and filter stay, and so do the sliders if the plan is for the same sizes."""
        before, self._as_read = self._as_read, plan
        if before is None or before.symbols != plan.symbols:
            self._sizes = {}
        self.plan = plan.at(**arguments(self._sizes)) if self._sizes else plan  # type: ignore[arg-type]
        self._refused = ""
        controls.show(self)
        self._draw()

    def show(self, options: Options) -> None:
        """Show which plans `options` apply."""
        before, self._options = self._options, options
        # Other switches change nothing in here, and with thousands of plans drawing takes longer than all else.
        if (before.memory_plan, before.memory_level) != (options.memory_plan, options.memory_level):
            self._draw()

    def _draw(self) -> None:
        if self.plan is None:
            return
        self.table.show(self._content(self.plan))
        controls.show(self.table, on=bool(self.plan.rows))
        self._notes.value = html.fragment(self._said(self.plan))
        controls.show(self.report, on=bool(self.plan.report))
        self._draw_report()

    def tick(self, config: str, on: bool) -> None:  # noqa: FBT001 - what a box says
        """Add a plan in all its places, or take it out; plans that cannot act beside it are taken out."""
        self._on_choose(self._choice.adding(config) if on else self._choice.removing(config))

    def set_count(self, config: str, count: int) -> None:
        """Choose a plan in some of its places, in the order of the graph."""
        self._on_choose(self._choice.adding(config, count))

    def set_size(self, key: str, value: int) -> None:
        """Evaluate the plans for another batch; nothing is built. See `ortlab.memory.symbolic_sizes` for the keys."""
        if self._as_read is None:
            return
        sizes = {**self._sizes, key: value}
        try:
            self.plan = self._as_read.at(**arguments(sizes))  # type: ignore[arg-type]
        except OptionError as error:
            self._refused = str(error)
        else:
            self._refused, self._sizes = "", sizes
        self._draw()

    @property
    def _choice(self) -> Choice:
        if self.plan is None:
            raise RuntimeError("no plan is shown yet")
        level = self._options.memory_level
        if not level:
            return Choice(self.plan, self._options.memory_plan)
        # What the level chooses is known for the level that the plans were read with.
        chosen = self.plan.enabled if self.plan.memory_level == level else ()
        return Choice(self.plan, tuple(part for config in chosen for part in config.split(",")))

    def _content(self, plan: MemoryPlan) -> Content[PlanRow]:
        choice = self._choice
        return Content(
            records=[choice.as_chosen(row) for row in plan.rows],
            columns=_columns(plan),
            key=lambda row: row.config,
            look=lambda row: self._look(choice, row),
            noun=("plan", "plans"),
            search=lambda row: f"{row.config} {' '.join(row.parts)}",
            totals=lambda _: _totals(choice),  # a ticked row counts, filtered out or not
            sliders=self._sliders(),
            count_column=_PLACES,
        )

    def _sliders(self) -> list[Slider]:
        plan = self._as_read
        if plan is None:
            return []
        parts = plan.of_parts.values() or (plan,)
        formulas = [row.saving_symbolic for part in parts for row in part.rows]
        return [
            Slider(size.key, size.label, self._sizes.get(size.key, size.value), size.low, size.high)
            for size in free_sizes(plan.symbols, formulas, plan.label_totals)
        ]

    def _look(self, choice: Choice, row: PlanRow) -> Look:
        level = self._options.memory_level
        count = choice.count(row)
        partly = count and row.frequency > 1 and "," not in row.config and not level
        return Look(
            name=row.config,
            code=units.fold(row.config),
            ticked=bool(count),
            locked=_level_text(level) if level else "",
            count=(count, row.frequency) if partly else None,
            mark=_mark(row, count) if count else "",
        )

    def _said(self, plan: MemoryPlan) -> Page:
        """Write what stands under the table."""
        notes = [Note(NO_OPPORTUNITY, Mark.QUIET)]
        if plan.rows:
            notes = [Note(f"What is saved is predicted for {sizes_text(plan)}, not measured.", Mark.QUIET)]
            notes += _counting_notes(self._choice)
        if self._refused:
            notes.append(Note(self._refused, Mark.BAD))
        level = self._options.memory_level
        if level:
            notes.append(Note(f"{level_text(plan, level)} Set it to 0 to tick your own."))
            if plan.memory_level != level:
                notes.append(Note('Press "Memory plan" again to see what it chooses.'))
        asked = (*plan.asked, *plan.absent)
        if set(asked) == set(self._options.memory_plan):  # what ORT has done with them is known
            notes += state_notes(plan)
        notes += missing_notes(plan)
        priced = any(one.cost_ms is not None for one in plan.recomputed)  # else the slider says more
        return Page("", (*notes, *(recomputed_table(plan) if priced else ())))

    def _draw_report(self) -> None:
        """Write the report while it is open: it is longer than all else in a panel, and a saved notebook holds it."""
        words = self.plan.report if self.plan is not None and self.report.is_open else ""
        self._report.value = f'<pre class="ortlab-report">{escape(words)}</pre>' if words else ""


_PLACES = "places"


def _columns(plan: MemoryPlan) -> list[Column[PlanRow]]:
    known = [shown for shown in WHERE_KNOWN if any(getattr(row, shown[0]) is not None for row in plan.rows)]
    return [
        Column("plan", lambda row: row.sentence, lambda row: units.fold(row.sentence, 400)),
        Column(
            _PLACES,
            lambda row: row.frequency,
            lambda row: units.count(row.frequency),
            numeric=True,
            meaning="reported by ORT: occurrences in the graph; a ticked plan can be taken in some of them",
        ),
        Column(
            "saves",
            lambda row: row.saving_bytes,
            lambda row: units.size(row.saving_bytes),
            numeric=True,
            meaning="predicted by ORT, not measured: what is not kept",
        ),
        *(
            Column(column.name, attrgetter(name), words, numeric=True, meaning=column.meaning)
            for name, (column, words) in known
        ),
    ]


def _totals(choice: Choice) -> dict[str, str]:
    """Write the sums of the ticked rows; measured numbers have none, since nobody has measured the set."""
    totals = choice.totals
    if not totals.plans:
        return {}
    sums = {
        "peak_saving_bytes": units.size(totals.peak_saving_bytes),
        "cost_ms": units.duration(totals.cost_ms),
        "bytes_per_ms": per_ms(totals.bytes_per_ms),
    }
    return {
        "plan": f"ticked: {units.count(totals.plans)}",
        "saves": units.size(totals.saving_bytes),
        **{column.name: sums[name] for name, (column, _) in WHERE_KNOWN if name in sums},
    }


def _mark(row: PlanRow, count: int) -> str:
    """Say where ORT has not done what is asked for."""
    if row.applied is None or row.requested is None:
        return ""
    wanted = row.frequency if row.requested < 0 else row.requested
    if wanted != count or wanted == row.applied:  # another count is asked for since ORT was asked
        return ""
    return f"applied {units.count(row.applied)} of {units.count(wanted)}"


def _level_text(level: int) -> str:
    return f"memory_level={level} chooses the plans; set it to 0 to tick your own."


def _counting_notes(choice: Choice) -> list[Note]:
    """Say what the line of totals leaves out or takes for granted."""
    notes = []
    totals = choice.totals
    if totals.plans > 1:
        overlap = "Savings overlap where plans share operators: their sum is the most they can save."
        notes.append(Note(overlap, Mark.QUIET))
    if any(0 < choice.count(row) < row.frequency for row in choice.plan.rows):
        partly = "A plan in some of its places is counted in proportion, as if all were alike."
        notes.append(Note(partly, Mark.QUIET))
    if totals.unknown:
        notes.append(Note(f"Not in every sum, for want of a number: {', '.join(totals.unknown)}."))
    return notes
