"""Where runs stand: time of a step against step memory, one point a run, as fractions of a frame with its ticks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ortlab import units
from ortlab.options.configuration import engine_kind
from ortlab.render.execution_words import ENGINE_NAMES, title

if TYPE_CHECKING:
    from collections.abc import Callable

    from ortlab.records.runs import Run

POINTS: Final = 60
"""Runs that are drawn: the first, and the latest."""

_ROOM: Final = 0.12
"""Share of an axis that stays empty at either end."""

_LEAST: Final = 0.1
"""Least extent of an axis, as a share of what is shown: noise shall not look like a difference."""

_TICKS: Final = 4
_QUARTERS: Final = 4


@dataclass(frozen=True)
class Point:
    """One run; places are fractions of the frame, from its lower left corner."""

    key: str  # number of the run
    kind: str  # "ort", "eager", "checkpoint", "compile" or "fallback": shape and colour
    x: float
    low: float  # ends of the whisker: the middle half of the warm steps
    high: float
    y: float
    name: str
    said: str
    last: bool
    base: bool


def scatter(runs: Sequence[Run]) -> dict[str, Any]:
    """Place runs in a frame; empty where no run has step memory.

    The result has plain JSON types: `points`, of each axis `title` and `ticks`, `kinds` for a legend, and `left_out`.
    """
    drawn = [*runs[:1], *runs[1:][-POINTS + 1 :]]
    known = [run for run in drawn if run.step_memory_bytes is not None]
    if not known:
        return {}
    spans = {run.number: _quartiles(run) for run in known}
    times = _Axis([time for span in spans.values() for time in span], units.duration, _tick_of_time)
    sizes = _Axis([float(run.step_memory_bytes or 0) for run in known], units.size, _tick_of_size)
    points = [
        Point(
            key=str(run.number),
            kind="fallback" if run.fell_back else engine_kind(run.engine),
            x=times.place(run.step_ms),
            low=times.place(spans[run.number][0]),
            high=times.place(spans[run.number][1]),
            y=sizes.place(float(run.step_memory_bytes or 0)),
            name=title(run),
            said=_said(run, spans[run.number]),
            last=run is runs[-1],
            base=run is runs[0],
        )
        for run in known
    ]
    kinds = dict.fromkeys(point.kind for point in points)
    return {
        "points": [asdict(point) for point in points],
        "x": {"title": "time of a step", "ticks": times.ticks},
        "y": {"title": "step memory", "ticks": sizes.ticks},
        "kinds": [
            [kind, {"fallback": "PyTorch (fallback)", **ENGINE_NAMES}.get(kind, kind)] for kind in kinds
        ],
        "left_out": _left_out(runs, drawn, known),
    }


def _quartiles(run: Run) -> tuple[float, float]:
    times = [step.total_ms for step in run.warm_steps]
    if len(times) < _QUARTERS:
        return min(times), max(times)
    low, _, high = statistics.quantiles(times, n=_QUARTERS, method="inclusive")
    return low, high


def _said(run: Run, span: tuple[float, float]) -> str:
    low, high = map(units.duration, span)
    return f"{units.duration(run.step_ms)} a step (half of them {low} to {high}), {units.size(run.step_memory_bytes)}"


def _left_out(runs: Sequence[Run], drawn: Sequence[Run], known: Sequence[Run]) -> str:
    words = []
    if len(drawn) < len(runs):
        words.append(f"The first run and the latest {len(drawn) - 1} of {units.count(len(runs))}.")
    if unknown := len(drawn) - len(known):
        words.append(f"{units.many(unknown, 'run')} without a reading of step memory left out.")
    return " ".join(words)


class _Axis:
    """Turns values into places between 0 and 1, and round values into ticks."""

    def __init__(
        self, values: Sequence[float], words: Callable[[float], str], steps: Callable[[float], float]
    ) -> None:
        low, high = min(values), max(values)
        extent = max(high - low, _LEAST * high) or 1.0
        middle = (low + high) / 2
        self.low = max(0.0, middle - extent * (0.5 + _ROOM))
        self.high = middle + extent * (0.5 + _ROOM)
        step = steps((self.high - self.low) / _TICKS)
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step)
        self.ticks = [[self.place(at * step), words(at * step)] for at in range(first, last + 1)]

    def place(self, value: float) -> float:
        return round((value - self.low) / (self.high - self.low), 4)


def _tick_of_time(rough: float) -> float:
    """Return a round distance in ms: one, two or five times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(one * power for one in (1, 2, 5, 10) if one * power >= rough)


def _tick_of_size(rough: float) -> float:
    """Return a round distance in bytes, round in the unit that it is written in."""
    unit = 1024.0 ** max(0, math.floor(math.log(max(rough, 1.0), 1024)))
    return _tick_of_time(rough / unit) * unit
