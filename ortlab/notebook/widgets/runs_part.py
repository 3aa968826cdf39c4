"""The panel's parts about runs: the last result as a card, charts, a table, the comparison, and readings of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import traitlets
from ipywidgets.widgets.widget_string import HTMLStyle

from ortlab import units
from ortlab.lab.following import memory_phases
from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.browser import Part, packed
from ortlab.notebook.widgets.controls import Fold
from ortlab.notebook.widgets.record_table import Column, Content, Intents, Look, RecordTable
from ortlab.records.runs import step_parts
from ortlab.render import html, plots
from ortlab.render.execution_words import title
from ortlab.render.memory_pages import live_page, phases_plot
from ortlab.render.page import Folded, Mark, Note, Page
from ortlab.render.pages import compose
from ortlab.render.result_card import card_html, is_settled, result_card, scatter
from ortlab.render.run_pages import LISTED, ledger_page, listed, run_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.lab.lab import Lab
    from ortlab.notebook.widgets.controls import Looks
    from ortlab.records.comparison import Comparison
    from ortlab.records.runs import Run
    from ortlab.render.page import Cell


NOTES_SHOWN: Final = 50
"""Runs whose cautions stand under the table: the latest."""

COMPARED: Final = 12
"""Runs that are compared unless some are ticked: an interval takes some hundredths of a second."""


class RunsPart(controls.Column):
    """What was measured; the next step in words until there is a run."""

    # The card holds the last run against the first, or the first ticked. Each run is a point by time and step memory,
    # and a row; a click on either opens it. A tick takes a run into comparison and curves.

    def __init__(self, lab: Lab, looks: Looks) -> None:
        self._lab = lab
        self.ticked: list[int] = []  # in the order of the ticks: the others are compared with the first
        self._opened: int | None = None
        self._held: dict[tuple[int, int], Comparison] = {}  # by baseline and run: what the card shows
        self._notes = looks.html()
        self.card = looks.html()
        self._details = looks.html()
        self._details.add_class("ortlab-details")
        self._comparison = looks.html()
        self._compared_as = ""  # the comparison as HTML, and the last run that there was then
        self._compared = 0
        self.table: RecordTable[Run] = RecordTable(
            "Runs", Intents(tick=self.tick, choose=self.open_run), looks
        )
        self.scatter = Scatter(self.open_run, looks)
        beside = controls.Box([self.scatter, self._details], layout=looks.layout)
        beside.add_class("ortlab-beside")
        self.picture = Picture("runs", looks)
        self.chart = Fold(
            "Loss and time of each step", self.picture, self._draw_chart, looks, layout=controls.hidden()
        )
        parts = [self._comparison, self.card, beside, self.table, self._notes, self.chart]
        super().__init__(parts, layout=looks.layout)
        self.add_class("ortlab-runs")
        self.show()

    def show(self) -> None:
        """Show the runs as they are now."""
        runs = self._lab.runs
        for part in (self.table, self.chart):
            controls.show(part, on=bool(len(runs)))
        self.table.show(run_rows(runs, self.ticked, self._opened))
        blocks = ledger_page(runs, NOTES_SHOWN).blocks if len(runs) else ()
        notes = [block for block in blocks if isinstance(block, Note)]
        self._notes.value = html.fragment(Page("", tuple(notes)))
        self._show_card()
        self.scatter.show(self._single, self._opened)
        self._show_details()
        self._say_stale()
        if self.chart.is_open:
            self._draw_chart()

    @property
    def _single(self) -> list[Run]:
        """The runs that stand by themselves, and are no points of a sweep."""
        return [run for run in self._lab.runs if not run.sweep]

    @property
    def can_compare(self) -> bool:
        """Whether there are two runs that stand by themselves."""
        return len(self._single) > 1

    def _pair(self) -> tuple[int, int] | None:
        """Return the numbers of the baseline and of the last run; None where there is nothing to compare."""
        numbers = [run.number for run in self._single]
        base = next((number for number in self.ticked if number in numbers), numbers[0] if numbers else None)
        if base is None or numbers[-1] == base:
            return None
        return base, numbers[-1]

    def _result(self) -> Comparison | None:
        pair = self._pair()
        if pair is None:
            return None
        if pair not in self._held:
            self._held[pair] = self._lab.compare(pair[1], baseline=pair[0])
        return self._held[pair]

    def _show_card(self) -> None:
        result = self._result()
        if result is not None:
            self.card.value = card_html(result_card(result))
        elif len(self._lab.runs):
            words = "Change a switch or the engine and press Rerun: what that changes then stands here."
            self.card.value = html.fragment(Page("", (Note(words, Mark.QUIET),)))
        else:
            self.card.value = _FIRST

    def why_not_settle(self) -> str:
        """Say why the last run cannot, or need not, be measured in turns with the baseline; empty if it can."""
        result = self._result()
        if result is None:
            return "There have to be two runs: press Rerun, or run a step."
        if not self._lab.status.can_repeat:
            return "There is no step to go back to."
        return "The card holds a verdict already." if is_settled(result) else ""

    def settle(self) -> None:
        """Run baseline and last run again, in turns, and show what that says."""
        pair = self._pair()
        if pair is None:
            return
        result = self._lab.compare(pair[1], baseline=pair[0], rerun=True)
        self._held[pair] = result
        self.show()

    def _show_details(self) -> None:
        if self._opened is not None:
            self._details.value = html.fragment(run_page(self._lab.runs.run(self._opened)))
        elif len(self._lab.runs):
            words = "A click on a point or on the name of a run shows all that is known of it here."
            self._details.value = html.fragment(Page("", (Note(words, Mark.QUIET),)))
        else:
            self._details.value = ""

    def _say_stale(self) -> None:
        since = [run.number for run in self._single if run.number > self._compared]
        if not self._compared or not since:
            self._comparison.value = self._compared_as
            return
        which = f"run {since[0]} was" if len(since) == 1 else f"runs {since[0]} to {since[-1]} were"
        words = f"This comparison is older than the runs: {which} added since. Press Compare again."
        self._comparison.value = html.fragment(Page("", (Note(words, Mark.WARN),))) + self._compared_as

    def tick(self, number: str, on: bool) -> None:  # noqa: FBT001 - what a box says
        """Take a run into the comparison and the chart, or out of them."""
        self.ticked = [one for one in self.ticked if one != int(number)] + ([int(number)] if on else [])
        self.show()

    def open_run(self, number: str) -> None:
        """Show all that is known of a run; the same again takes that back."""
        self._opened = None if self._opened == int(number) else int(number)
        self.show()

    def compare(self) -> None:
        """Compare the ticked runs with the first one ticked, or the latest with the first, and open the chart."""
        numbers = self.ticked or [run.number for run in self._lab.runs if not run.sweep]
        shown = numbers if self.ticked else [*numbers[:1], *numbers[1:][-COMPARED + 1 :]]
        page = compose(self._lab.compare(*shown, baseline=shown[0] if shown else None))
        # What it folds away are the runs, which stand in the table.
        page = Page(page.title, tuple(one for one in page.blocks if not isinstance(one, Folded)))
        if len(shown) < len(numbers):
            hidden = f"The first run and the latest {len(shown) - 1}. Tick runs to compare others."
            page = Page(page.title, (*page.blocks, Note(hidden)))
        self._compared_as = html.fragment(page)
        self._compared = self._lab.runs.next_number - 1
        self._say_stale()
        self.chart.unfold()

    def _draw_chart(self) -> None:
        runs = [self._lab.runs.run(number) for number in self.ticked]
        shown = runs or (self._single or list(self._lab.runs))[-plots.RUNS_SHOWN :]
        words = "Loss, step time and step memory of the ticked runs, or of the latest"
        self.picture.show(plots.overview(shown), words)


_FIRST: Final = """\
<div class="ortlab ortlab-card"><h5>Next: run a training step, in a cell of its own</h5>
<pre>%%ort_step -n 20
loss = model(**batch).loss
loss.backward(); optimizer.step(); optimizer.zero_grad()</pre>
<p>ortlab runs it 20 times, times it, and measures the memory that a step needs. Then change a switch or the engine
and press Rerun: what that saves and what it costs stands here.</p></div>"""
"""What stands in the place of the card before the first run."""


class Picture(Part):
    """A figure as inline SVG in the colours of the theme; nothing until `show`."""

    svg = traitlets.Unicode().tag(sync=True, to_json=packed)
    file = traitlets.Unicode().tag(sync=True)  # name of the saved file, without its suffix

    def __init__(self, file: str, looks: Looks) -> None:
        super().__init__("picture.js", looks.script("picture.js"), file=file, layout=looks.layout)

    def show(self, figure: Figure, description: str) -> None:
        """Show a figure of `ortlab.render.plots`; `description` is for readers who do not see it."""
        self.svg = plots.inline(figure, description)

    def __repr__(self) -> str:
        return f"Picture({self.file!r})"


def run_rows(runs: Sequence[Run], ticked: Collection[int], opened: int | None) -> Content[Run]:
    """List runs, the newest first; `runs` is in the order of the ledger, and `opened` None if no details are shown."""
    return Content(
        records=runs[::-1],
        columns=_columns(),
        key=lambda run: str(run.number),
        look=lambda run: Look(
            name=f"compare {title(run)}",
            ticked=run.number in ticked,
            chosen=run.number == opened,
            mark="fallback" if run.fell_back else "",
            code=f"sweep {units.count(run.sweep)}" if run.sweep else "",
        ),
        noun=("run", "runs"),
        search=lambda run: f"sweep {run.sweep}" if run.sweep else "",
    )


def _part(name: str) -> Callable[[Run], float]:
    return lambda run: step_parts(run.warm_steps, run.step_ms)[name]


_VALUES: Final[tuple[Callable[[Run], float | str | None], ...]] = (
    lambda run: run.number,
    lambda run: len(run.steps),
    lambda run: run.step_ms,
    lambda run: run.step_memory_bytes,
    lambda run: run.losses[-1],
    _part("forward"),
    _part("backward"),
    _part("optimizer"),
    lambda run: run.initialization.total_ms if run.initialization else None,
)
"""What each column of `LISTED` is sorted by."""


def _columns() -> list[Column[Run]]:
    cells: dict[int, tuple[Cell, ...]] = {}  # a row is put into words once, and not once for each column

    def words(position: int) -> Callable[[Run], str]:
        def of(run: Run) -> str:
            if run.number not in cells:
                cells[run.number] = listed(run)
            return cells[run.number][position].text

        return of

    return [
        Column(shown.name, value, words(position), numeric=shown.numeric, meaning=shown.meaning)
        for position, (shown, value) in enumerate(zip(LISTED, _VALUES, strict=True))
    ]


_REDRAW_SECONDS: Final = 0.25
"""Shortest time between two drawings while a run goes on: each is a message to the browser."""


class MemoryPart(controls.Html):
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


# ---- the chart -----------------------------------------------------------------------------------------------------


class Scatter(Part):
    """Runs by time and step memory; `choose` gets the number of the run that is clicked."""

    drawing = traitlets.Dict().tag(sync=True, to_json=packed)

    def __init__(self, choose: Callable[[str], None], looks: Looks) -> None:
        self._choose = choose
        super().__init__("scatter.js", looks.script("scatter.js"), layout=looks.layout)
        self.on_msg(self._told)

    def show(self, runs: Sequence[Run], chosen: int | None) -> None:
        """Draw runs, in the order of the ledger; the details of `chosen` are shown."""
        drawing = scatter(runs) if runs else {}
        self.drawing = {**drawing, "chosen": str(chosen or "")} if drawing else {}

    def _told(self, _widget: object, message: Any, _buffers: object) -> None:
        self._choose(str(message["choose"]))

    def __repr__(self) -> str:
        return "Scatter()"
