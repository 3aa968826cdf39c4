"""Ranks in a table that is sorted in the browser, in a panel or by itself: a row for each, and the run to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.browser import living
from ortlab.notebook.widgets.controls import Looks
from ortlab.notebook.widgets.frame import PANEL, Attendant
from ortlab.notebook.widgets.record_table import Column, Content, Intents, Look, Picker, RecordTable
from ortlab.render import html
from ortlab.render.page import Note, Page
from ortlab.render.ranks_pages import rank_cells, rank_columns, ranks_page

if TYPE_CHECKING:
    from ortlab.ranks.ledgers import RankRun, Ranks

_VALUES: Final[dict[str, Callable[[RankRun], float | str | None]]] = {
    "rank": lambda one: one.rank,
    "machine": lambda one: one.ledger.host,
    "executed by": lambda one: one.run.executed_by,
    "steps": lambda one: len(one.run.steps),
    "step": lambda one: one.step_ms,
    "computing": lambda one: one.computing_ms,
    "exchange": lambda one: one.exchange_ms,
    "peak memory": lambda one: one.peak_bytes,
    "tokens": lambda one: one.tokens,
    "last loss": lambda one: one.run.losses[-1],
}
"""What each column is sorted by."""


class RanksPart(controls.Column):
    """What ranks have measured, one row for each; empty until `show`."""

    # If it is `framed`, it stands alone and carries the frame and the style sheet that the panel would.

    def __init__(self, looks: Looks | None = None, *, framed: bool = False) -> None:
        looks = looks or Looks()
        self.ranks: Ranks | None = None
        self.table: RecordTable[RankRun] = RecordTable("Ranks", Intents(pick=self.pick), looks)
        self._notes = looks.html()
        children: list[Any] = [looks.html("<h5>Ranks</h5>"), self.table, self._notes]
        if framed:
            children.insert(0, Attendant("ranks", looks))
        super().__init__(children, layout=controls.hidden())
        self.add_class("ortlab-ranks")
        if framed:
            self.add_class(PANEL)
        self.show(None)

    def show(self, ranks: Ranks | None) -> None:
        """Show the ranks of a record, or nothing."""
        self.ranks = ranks
        controls.show(self, on=ranks is not None)
        if ranks is None:
            return
        rows = ranks.rows()
        controls.show(self.table, on=bool(rows))
        self.table.show(
            Content(
                records=rows,
                columns=_columns(ranks),
                key=lambda one: str(one.rank),
                look=lambda one: Look(name=f"rank {one.rank}", mark="fallback" if one.run.fell_back else ""),
                noun=("rank", "ranks"),
                picker=_picker(ranks),
            )
        )
        notes = tuple(block for block in ranks_page(ranks).blocks if isinstance(block, Note))
        self._notes.value = html.fragment(Page("", notes))

    def pick(self, number: str) -> None:
        """Show another run."""
        if self.ranks is not None:
            self.show(self.ranks.of(int(number)))


def bundle_of(ranks: Ranks) -> dict[str, Any]:
    """Return what shows a record in a table of its own, beside its text and HTML; nothing if it has no rows."""
    if not ranks.rows():
        return {}
    part = RanksPart(framed=True)
    part.show(ranks)
    return living(part._repr_mimebundle_())


def _picker(ranks: Ranks) -> Picker | None:
    numbers = ranks.numbers
    if len(numbers) <= 1:
        return None
    return Picker("run", tuple((str(number), f"run {number}") for number in numbers), str(ranks.shown))


def _columns(ranks: Ranks) -> list[Column[RankRun]]:
    def words(position: int) -> Callable[[RankRun], str]:
        return lambda one: rank_cells(ranks, one)[position].text

    return [
        Column(shown.name, _VALUES[shown.name], words(position), numeric=shown.numeric, meaning=shown.meaning)
        for position, shown in enumerate(rank_columns(ranks))
    ]
