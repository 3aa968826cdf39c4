"""The result of a run against a baseline as a card: memory, time and loss in large figures, and why one is missing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Final

from ortlab import units
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
from ortlab.render.page import Mark

if TYPE_CHECKING:
    from ortlab.records.comparison import Comparison, Contrast

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
