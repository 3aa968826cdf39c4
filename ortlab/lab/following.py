"""What the panel and views need of a lab, and its users do not: news, readings, where plans act, who has shown it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, ref

from ortlab.records.memory_phases import MemoryPhases

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.memory.recompute import RecomputePlaces
    from ortlab.ranks.ledgers import Ranks
    from ortlab.runs.bench import Observer


def observe(lab: Lab, callback: Observer) -> Callable[[], None]:
    """Call back after each change of a lab; return a function that ends that."""
    lab._bench.observers.append(callback)

    def stop() -> None:
        if callback in lab._bench.observers:
            lab._bench.observers.remove(callback)

    return stop


def memory_phases(lab: Lab) -> MemoryPhases:
    """Return what `print_memory_stats` has read, in the run that goes on or else in the last one."""
    from ortlab.runs.recording import Recording  # brings torch along

    if isinstance(lab._bench.recording, Recording):
        return lab._bench.recording.memory_phases
    return lab.runs[-1].memory_phases if len(lab.runs) else MemoryPhases(())


def show_ranks(lab: Lab, ranks: Ranks | None) -> None:
    """Keep what ranks have measured beside a lab's own runs, and show it in the lab's panel."""
    lab._ranks = ranks
    lab._bench.notify("runs")


def shown_ranks(lab: Lab) -> Ranks | None:
    """Return what `show_ranks` took over last."""
    return lab._ranks


def recompute_places(lab: Lab, part: str | None = None) -> RecomputePlaces:
    """Return every place where a plan recomputes, as ORT tells it for the present graph of a lab, or of a part."""
    from ortlab.analyses.builds import builds, engine_of  # brings torch along

    engine_of(lab._bench, part, "plans")
    with builds(lab._bench, part) as found:
        return found.only[1].recompute_places()


_Cell: TypeAlias = tuple[int, ReferenceType[object] | None]
"""A cell: its execution count, and the result of the one before. That may hold the lab, so it is not kept alive."""

_shown: Final[WeakKeyDictionary[Lab, _Cell]] = WeakKeyDictionary()
"""By lab: the cell in which it was shown last, or said what it was set to."""


def note_shown(lab: Lab) -> None:
    """Have the lab show itself as one line for the rest of the cell that runs."""
    if (cell := _cell()) is not None:
        _shown[lab] = cell


def was_shown(lab: Lab) -> bool:
    """Tell whether the cell that runs has shown the lab already."""
    cell = _cell()
    return cell is not None and cell == _shown.get(lab)


def _cell() -> _Cell | None:
    """Tell cells apart: front ends that keep no history run all under one count, each after another result."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return None
    result = shell.last_execution_result
    return shell.execution_count, None if result is None else ref(result)
