"""Runs as rows of a table: which columns, in what order, and how each row stands."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

from ortlab.notebook.widgets.record_table import Column, Content, Look
from ortlab.render import units
from ortlab.render.run_pages import LISTED, listed, title

if TYPE_CHECKING:
    from ortlab.records.runs import Run, Step
    from ortlab.render.page import Cell


def run_rows(runs: Sequence[Run], ticked: Collection[int], opened: int | None) -> Content[Run]:
    """List runs, the newest first.

    Parameters
    ----------
    runs
        In the order of the ledger.
    ticked
        Numbers of the runs that are compared.
    opened
        Number of the run whose details are shown; None for none.
    """
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


def _median(part: Callable[[Step], float]) -> Callable[[Run], float]:
    return lambda run: statistics.median(part(step) for step in run.warm_steps)


_VALUES: Final[tuple[Callable[[Run], float | str | None], ...]] = (
    lambda run: run.number,
    lambda run: len(run.steps),
    lambda run: run.step_ms,
    lambda run: run.step_memory_bytes,
    lambda run: run.losses[-1],
    _median(lambda step: step.forward_ms),
    _median(lambda step: step.backward_ms),
    _median(lambda step: step.optimizer_ms),
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
