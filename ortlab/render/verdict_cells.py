"""A verdict in a cell: its words and its colour, the same wherever configurations are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab.records.cautions import FELL_BACK
from ortlab.records.verdicts import FASTER, LESS_MEMORY, MORE_MEMORY, NO_DIFFERENCE, NOT_COMPARABLE, SLOWER
from ortlab.render.page import Block, Cell, Mark, Note

if TYPE_CHECKING:
    from collections.abc import Iterable

_GOOD: Final = {FASTER, LESS_MEMORY}
_WORSE: Final = {SLOWER, MORE_MEMORY}

BASELINE: Final = Cell("baseline", Mark.QUIET)

MEMORY_MEASURED: Final = (
    "Step memory: measured, how far a step rises above its start; of two rounds the lower reading."
)


def verdict_cell(time: str, memory: str = "") -> Cell:
    """Say what holds of time and of memory; what is not comparable has no colour, and neither has a trade.

    `time` is an `ortlab.records.verdicts.TimeRatio.verdict` or `FELL_BACK`, `memory` a `memory_verdict` of that module.
    """
    if time == FELL_BACK:
        return Cell(time, Mark.BAD)
    said = [words for words in (time, memory) if words and (words != NO_DIFFERENCE or not memory)]
    good, worse = _GOOD & {*said}, _WORSE & {*said}
    traded = (good and worse) or (memory and time == NOT_COMPARABLE)
    mark = Mark.PLAIN if traded else Mark.GOOD if good else Mark.WARN if worse else Mark.QUIET
    return Cell(", ".join(said), mark)


def reasons(found: Iterable[tuple[str, str]], call: str) -> list[Block]:
    """Say why times are not comparable, each reason once, and the call that would tell.

    `found` has names of what was compared, each with its reason, empty where there is none.
    """
    names: dict[str, list[str]] = {}
    for name, reason in found:
        if reason:
            names.setdefault(reason, []).append(name)
    return [
        Note(f"Times are not comparable ({', '.join(who)}): {reason}. To tell: {call}.", Mark.WARN)
        for reason, who in names.items()
    ]
