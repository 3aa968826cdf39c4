"""What is kept for backward, as tables that are sorted, filtered and grouped, and which plan removes what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from ortlab import units
from ortlab.memory.saved_activations import KINDS
from ortlab.memory.symbolic_sizes import arguments, free_sizes
from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.activations_rows import (
    activation_rows,
    effect_rows,
    group_rows,
    key_of,
    name_of,
)
from ortlab.notebook.widgets.browser import living
from ortlab.notebook.widgets.controls import ErrorBox, Looks, close_tree
from ortlab.notebook.widgets.frame import PANEL, Attendant, forms
from ortlab.notebook.widgets.graph_display import highlight
from ortlab.notebook.widgets.record_table import Intents, Picker, RecordTable, Slider
from ortlab.render import html
from ortlab.render.activations_page import activations_notes, activations_page, total_sentence
from ortlab.render.page import Folded, Mark, Note, Page

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.memory.saved_activations import Kind, PlanEffect, SavedActivation, SavedActivations


_EACH: Final = ""
"""Key of the view that lists each activation."""

_WITHIN: Final = "within"
"""Key of the view that lists those of one group."""


class ActivationsExplorer(controls.Column):
    """The saved activations in a table, and below it the plans that take something out of it; empty until `show`."""

    # If it is `framed`, it stands alone and carries the frame and the style sheet that the panel would.

    def __init__(self, looks: Looks | None = None, *, framed: bool = False) -> None:
        self._looks = looks = looks or Looks()
        self.activations: SavedActivations | None = None  # for the sizes of the sliders; None until `show`
        # Gets the nodes of the chosen rows: what makes an activation, then what reads it in the backward.
        self.pointed: Callable[[Sequence[str]], None] = lambda _: None
        self.closed = False
        self.as_read: SavedActivations | None = None  # as `show` was given it, before any slider
        self._read_plans: Callable[[], SavedActivations] | None = None
        self._sizes: dict[str, int] = {}
        self._view = _EACH
        self._within: tuple[Kind, str] | None = None
        self._row = ""
        self._plan = ""
        self.errors = ErrorBox(looks)
        self.table: RecordTable[Any] = RecordTable(
            "Activations kept for backward",
            Intents(choose=self.choose, slide=self.set_size, pick=self.view),
            looks,
        )
        self.plans: RecordTable[PlanEffect] = RecordTable(
            "Plans and what they remove", Intents(choose=self.choose_plan), looks
        )
        self.look = looks.button(
            "Which plan removes what",
            "Applies each recompute plan alone, in a session that never runs: some tenths of a second each",
        )
        self.look.layout = controls.Layout()  # its own, since it is not always shown
        self.look.on_click(lambda _: self._look_for_plans())
        buttons = looks.row(self.look)
        self._notes = looks.html()
        self._details = looks.html()
        children = [
            looks.html("<h5>Kept for backward</h5>"),
            self.errors,
            self.table,
            self._details,
            buttons,
            self.plans,
            self._notes,
        ]
        if framed:
            children.insert(0, Attendant("activations", looks))
        super().__init__(children, layout=controls.hidden())
        if framed:
            self.add_class(PANEL)

    def show(
        self, activations: SavedActivations, read_plans: Callable[[], SavedActivations] | None = None
    ) -> None:
        """Show saved activations."""
        # `read_plans` returns the same with what each plan removes, and makes a session for each; None where that
        # cannot be asked.
        self.activations = self.as_read = activations
        self._read_plans = read_plans
        self._sizes = {}
        self._within = None
        self._view = activations.shown_by
        controls.show(self)
        self._draw()

    # ---- what the user wants ----------------------------------------------------------------------------------

    def view(self, key: str) -> None:
        """Show each activation (""), or the groups of one kind ("layer", "operator" or "module")."""
        if key != _WITHIN:
            self._view, self._within = key, None
        self._draw()

    def choose(self, key: str) -> None:
        """Open a group, or show which plans remove an activation; the same again takes that back."""
        kind = self._kind
        if kind is not None:
            self._within, self._view = (kind, key), _WITHIN
        else:
            self._row, self._plan = ("" if self._row == key else key), ""
        self._draw()
        self._point()

    def choose_plan(self, config: str) -> None:
        """Mark the activations that a plan removes; the same again takes that back."""
        self._plan, self._row = ("" if self._plan == config else config), ""
        if self._plan and self._kind is not None:
            self._view = _EACH
        self._draw()
        self._point()

    def _point(self) -> None:
        """Tell which nodes of the graph the chosen rows are about."""
        chosen = self._chosen
        if self._plan:
            nodes = [row.node for row in self._rows if self._plan in (row.plans or ())]
        elif chosen is not None and self._kind is None:
            nodes = [chosen.node, *chosen.kept_by]
        elif self._view == _WITHIN and self._within is not None and self.activations is not None:
            kind, name = self._within
            nodes = [row.node for row in self._rows if self.activations.group_of(row, kind) == name]
        else:
            nodes = []
        self.pointed(nodes)

    def set_size(self, key: str, value: int) -> None:
        """Evaluate the bytes for another batch; nothing is built. See `ortlab.memory.symbolic_sizes` for the keys."""
        if self.as_read is None:
            return
        sizes = {**self._sizes, key: value}
        with self.errors.watching():
            self.activations = self.as_read.at(**arguments(sizes))  # type: ignore[arg-type]
            self._sizes = sizes
        self._draw()

    def _look_for_plans(self) -> None:
        read = self._read_plans
        if read is None:
            return
        self.look.disabled = True
        try:
            with self.errors.watching():
                sizes, view, within = self._sizes, self._view, self._within
                self.show(read(), read)
                self._view, self._within = view, within
                for key, value in sizes.items():
                    self.set_size(key, value)
        finally:
            self.look.disabled = False
        self._draw()

    # ---- what is drawn ----------------------------------------------------------------------------------------

    @property
    def _kind(self) -> Kind | None:
        """What the rows are grouped by; None where each activation is a row."""
        return next((kind for kind in KINDS if kind == self._view), None)

    def _draw(self) -> None:
        activations = self.activations
        if activations is None:
            return
        kind = self._kind
        content = (
            group_rows(activations, kind)
            if kind
            else activation_rows(activations, self._within, self._plan, self._row)
        )
        self.table.show(replace(content, sliders=self._sliders(), picker=self._picker()))
        self.plans.show(
            effect_rows(activations, self._plan, () if self._chosen is None else self._chosen.plans or ())
        )
        controls.show(self.plans, on=bool(activations.effects))
        controls.show(self.look, on=not activations.effects and self._read_plans is not None)
        self._details.value = html.fragment(Page("", self._detail_notes(activations)))
        self._notes.value = html.fragment(
            Page("", (Note(total_sentence(activations)), *activations_notes(activations)))
        )

    @property
    def _rows(self) -> Sequence[SavedActivation]:
        return self.activations.rows if self.activations is not None else ()

    @property
    def _chosen(self) -> SavedActivation | None:
        """The activation whose details are shown."""
        return next((row for row in self._rows if key_of(row) == self._row), None)

    def _sliders(self) -> list[Slider]:
        activations = self.as_read
        if activations is None:
            return []
        formulas = {size for row in activations.rows for size in row.shape or () if isinstance(size, str)}
        return [
            Slider(size.key, size.label, self._sizes.get(size.key, size.value), size.low, size.high)
            for size in free_sizes(activations.symbols, formulas)
        ]

    def _picker(self) -> Picker:
        options = [(_EACH, "each activation"), *((kind, f"by {kind}") for kind in KINDS)]
        if self._within is not None:
            kind, name = self._within
            options.append((_WITHIN, f"{kind}: {units.fold(name, 60)}"))
        return Picker("Show", tuple(options), self._view)

    def _detail_notes(self, activations: SavedActivations) -> tuple[Note | Folded, ...]:
        """Say what is chosen, in words: a mark in a table is not enough for users who cannot see it."""
        if self._plan:
            removed = [row for row in activations.rows if self._plan in (row.plans or ())]
            what = "1 activation" if len(removed) == 1 else f"{units.count(len(removed))} activations"
            size = units.size(sum(row.bytes or 0 for row in removed))
            return (Note(f"{self._plan} removes {what}, {size}. They are marked, and come first."),)
        row = self._chosen
        if row is None or self._kind is not None:
            return ()
        facts = {
            "node": row.node,
            "module": row.module,
            "line": row.source,
            "shape": " x ".join(map(str, row.shape or ())),
            "bytes": row.bytes_symbolic,
            "views": ", ".join(row.views),
            "read by": ", ".join(row.kept_by),
        }
        lines = [f"{name}: {fact}" for name, fact in facts.items() if fact]
        said = Note(_removed_by(row), Mark.GOOD if row.plans else Mark.PLAIN)
        return (Note(f"{name_of(row)} ({row.value})"), said, Folded("Details", "\n".join(lines)))

    # ---- other forms and the end ------------------------------------------------------------------------------

    def page(self) -> Page:
        """Say what is shown, for front ends without widgets."""
        return (
            Page("Saved activations", ()) if self.activations is None else activations_page(self.activations)
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = super()._repr_mimebundle_(**kwargs) or {}
        return {**bundle, **forms(self.page())}

    def __repr__(self) -> str:
        return f"ActivationsExplorer({'empty' if self.activations is None else total_sentence(self.activations)})"

    def close(self) -> None:
        """End the explorer: all its widgets go from kernel and browser."""
        self.closed = True
        close_tree(self)
        self._looks.close()


def _removed_by(row: SavedActivation) -> str:
    if row.plans is None:
        return "Which plans remove it, nobody has looked yet."
    if not row.plans:
        return "No recompute plan removes it."
    return f"Removed by {' or by '.join(row.plans)}."


_explorers: WeakKeyDictionary[Lab, list[ref[ActivationsExplorer]]] = WeakKeyDictionary()


def activations_explorer(lab: Lab, activations: SavedActivations) -> ActivationsExplorer:
    """Return the explorer that shows saved activations of a lab, filled."""
    # Running a cell again, which reads the same, shows the same explorer and leaves no second one behind. What differs,
    # by the batch, the part or the plans, gets an explorer of its own: the cell above still shows what it was asked
    # for.
    living = [one for one in (known() for known in _explorers.get(lab, ())) if one and not one.closed]
    explorer = next((one for one in living if one.as_read == activations), None)
    if explorer is None:
        explorer = ActivationsExplorer(framed=True)
        living.append(explorer)
    _explorers[lab] = [ref(one) for one in living]
    of_lab, part = ref(lab), activations.source.part

    def with_plans() -> SavedActivations:
        there = of_lab()
        return activations if there is None else there.activations(part, plans=True)

    def point(nodes: Sequence[str]) -> None:
        there = of_lab()
        if there is not None:
            highlight(there, nodes)

    explorer.pointed = point
    explorer.show(activations, with_plans)
    return explorer


def bundle_of(activations: SavedActivations) -> dict[str, Any]:
    """Return the MIME bundle of an explorer of saved activations; empty if its lab is gone, or nothing is kept."""
    lab = activations.source.lab
    if lab is None or not activations.rows:
        return {}
    return living(activations_explorer(lab, activations)._repr_mimebundle_())
