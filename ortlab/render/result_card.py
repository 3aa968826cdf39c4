"""What the panel shows first of runs: the result against a baseline as a card, and each run as a point."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any, Final

from ortlab import units
from ortlab.options.configuration import engine_kind
from ortlab.records.comparison import difference, short_name
from ortlab.records.verdicts import (
    FASTER,
    FELL_BACK,
    LESS_MEMORY,
    MINIMUM_STEPS,
    NO_DIFFERENCE,
    NOT_COMPARABLE,
    SLOWER,
    TOO_FEW,
    UNSTEADY,
)
from ortlab.render.comparison_page import slow_notes
from ortlab.render.execution_words import ENGINE_NAMES, title
from ortlab.render.page import Mark

if TYPE_CHECKING:
    from collections.abc import Callable

    from ortlab.records.comparison import Comparison, Contrast
    from ortlab.records.runs import Run

_PYTORCH_RAN: Final = "PyTorch executed steps that ONNX Runtime was asked for"


@dataclass(frozen=True)
class Figure:
    """One large figure of a card."""

    value: str  # "-42 %", or the verdict where no figure may be given
    about: str  # what it is of
    mark: Mark = Mark.PLAIN
    said: str = ""  # how sure it is


@dataclass(frozen=True)
class ResultCard:
    """A run against a baseline, in figures that the verdicts of `ortlab.records.verdicts` permit."""

    title: str
    figures: tuple[Figure, ...]
    reason: str = ""  # why something is not comparable, or slow, in one or two sentences
    remarks: tuple[str, ...] = ()  # what a reader must know before believing the figures

    @property
    def sentence(self) -> str:
        """The card in a line of text."""
        found = [" ".join(filter(None, (one.value, one.about))) for one in self.figures]
        return f"{self.title}: {', '.join(found)}.{f' {self.reason}' if self.reason else ''}"


def result_card(comparison: Comparison) -> ResultCard:
    """Make the card of a comparison's last configuration."""
    contrast = comparison.contrasts[-1]
    run, base = contrast.run, comparison.baseline
    changed = difference(base, run)
    title = f"{_capital(changed)} against {short_name(base)}"
    if not comparison.in_turns:
        title = f"Run {run.number} ({changed}) against run {base.number} ({short_name(base)})"
    figures = (_memory(contrast), _time(contrast), *_loss(contrast))
    reason = _reason(contrast) or " ".join(slow_notes(replace(comparison, contrasts=(contrast,))))
    return ResultCard(title, figures, reason, contrast.remarks)


def is_settled(card_of: Comparison) -> bool:
    """Tell whether more measurement would say nothing more: the time has a verdict."""
    return card_of.contrasts[-1].verdict in (FASTER, SLOWER, NO_DIFFERENCE)


def _memory(contrast: Contrast) -> Figure:
    about = "step memory"
    if contrast.fell_back:
        return Figure("not comparable", about, Mark.BAD)
    if contrast.memory_ratio is None:
        return Figure("not measured", about, Mark.QUIET)
    if not contrast.memory:
        return Figure("same", about)
    mark = Mark.GOOD if contrast.memory == LESS_MEMORY else Mark.WARN
    return Figure(units.change(contrast.memory_ratio), about, mark)


def _time(contrast: Contrast) -> Figure:
    verdict, about = contrast.verdict, "time"
    if verdict in (FASTER, SLOWER):
        mark = Mark.GOOD if verdict == FASTER else Mark.WARN
        return Figure(units.change(contrast.time_ratio), about, mark, _interval(contrast))
    if verdict == NO_DIFFERENCE:
        return Figure("no difference", "in time", said=_interval(contrast))
    shown = {UNSTEADY: "too unsteady to tell", TOO_FEW: "too few steps"}.get(verdict, NOT_COMPARABLE)
    return Figure(shown, "in time", Mark.BAD if verdict == FELL_BACK else Mark.QUIET)


def _loss(contrast: Contrast) -> tuple[Figure, ...]:
    apart = contrast.loss_difference
    if apart is None:
        return ()
    if not apart:
        return (Figure("same", "loss"),)
    if math.isinf(apart):
        return (Figure("not a number", "loss, on one side", Mark.BAD),)
    return (Figure(units.difference(apart), "largest relative difference of the loss"),)


def _interval(contrast: Contrast) -> str:
    if math.isnan(contrast.time_low):
        return ""
    return f"95 % interval {units.change(contrast.time_low)} to {units.change(contrast.time_high)}"


def _reason(contrast: Contrast) -> str:
    if contrast.fell_back:
        return f"Not comparable: {_PYTORCH_RAN}."
    if contrast.verdict == NOT_COMPARABLE:
        return f"The times are not comparable: {contrast.time.reason}. Measure in turns to tell."
    if contrast.verdict == TOO_FEW:
        return f"An interval needs {MINIMUM_STEPS} warm steps: run more, n=20."
    if contrast.verdict == UNSTEADY:
        seems = "" if contrast.time_low <= 1 <= contrast.time_high else "It seems to differ. "
        turns = "More rounds would tell" if contrast.time.in_turns else "Measure in turns to tell"
        return f"{seems}The {_interval(contrast)} is too wide for a verdict. {turns}."
    return ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text.partition("=")[1] == "" else text


def _large(value: str) -> str:
    return " ortlab-figure" if value.endswith("%") else ""


def card_html(card: ResultCard) -> str:
    """Write a card as HTML; the style sheet of the panel lays it out."""
    figures = "".join(
        f'<div><strong class="ortlab-{one.mark.value}{_large(one.value)}">{escape(one.value)}</strong> '
        f"<span>{escape(one.about)}</span>"
        f"{f'<small>{escape(one.said)}</small>' if one.said else ''}</div>"
        for one in card.figures
    )
    notes = [(card.reason, Mark.QUIET), *((f"{one}.", Mark.WARN) for one in card.remarks)]
    said = "".join(
        f'<p class="ortlab-{mark.value}">{escape(_capital(text))}</p>' for text, mark in notes if text
    )
    return (
        f'<div class="ortlab ortlab-card"><h5>{escape(card.title)}</h5>'
        f'<div class="ortlab-figures">{figures}</div>{said}</div>'
    )


# ---- each run as a point -------------------------------------------------------------------------------------------


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
    """Place runs in a frame; empty where no run has step memory."""
    # The result has plain JSON types: `points`, of each axis `title` and `ticks`, `kinds` for a legend, and `left_out`.
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
