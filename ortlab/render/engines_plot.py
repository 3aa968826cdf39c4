"""Engines as a figure: step time against the memory that a step needs, one named mark for each."""

from __future__ import annotations

import math
import statistics
import textwrap
from typing import TYPE_CHECKING

from ortlab import units
from ortlab.options.configuration import engine_kind
from ortlab.render.engines_page import candidate_words
from ortlab.render.page import printable
from ortlab.render.plots import COLOURS, FALLBACK, INK, MIB, dress, new_figure, say
from ortlab.render.run_pages import ENGINE_NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.studies.engine_comparison import Candidate, EngineComparison

_ENGINE_COLOURS = dict(zip(ENGINE_NAMES, COLOURS, strict=False))
_MARKERS = {"ort": "o", "eager": "s", "checkpoint": "^", "compile": "D"}
_NAME_WIDTH = 44  # characters


def engines_plot(candidates: EngineComparison) -> Figure:
    """Draw the median step time, with quartiles, against step memory.

    Where step memory is not known, the candidates stand in a row.

    Parameters
    ----------
    candidates
        EngineComparison; those that were not measured are left out.

    Returns
    -------
    matplotlib.figure.Figure
        `ortlab.plot(candidates).savefig("candidates.svg")` saves it.
    """
    shown = [candidate for candidate in candidates if candidate.outcome is not None]
    figure = new_figure(max(3.4, 1.4 + 0.34 * len(shown)))
    axes = figure.add_subplot()
    if not shown:
        dress(axes, "Step time against memory", "", "step [ms]")
        say(axes, "No candidate was measured.")
        return figure
    devices = ", ".join(dict.fromkeys(run.device for candidate in shown for run in candidate.point.runs))
    memory, words = _memory(shown)
    for number, (candidate, place) in enumerate(zip(shown, memory, strict=True), start=1):
        low, high = _quartiles(candidate)
        colour = (
            FALLBACK if candidate.point.fell_back else _ENGINE_COLOURS.get(engine_kind(candidate.engine), INK)
        )
        name = textwrap.fill(
            units.fold(printable(f"{number}  {candidate_words(candidate)}"), 2 * _NAME_WIDTH),
            _NAME_WIDTH,
            subsequent_indent="    ",
        )
        axes.errorbar(
            [place],
            [candidate.point.step_ms],
            yerr=[[candidate.point.step_ms - low], [high - candidate.point.step_ms]],
            color=colour,
            marker=_MARKERS.get(engine_kind(candidate.engine), "o"),
            markersize=7,
            capsize=3,
            linewidth=1,
            linestyle="none",
            label=name.replace("$", r"\$"),
        )
        axes.annotate(
            str(number),
            (place, candidate.point.step_ms),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )
    dress(
        axes, f"Step time and memory, measured on {devices} (median; whiskers: quartiles)", words, "step [ms]"
    )
    axes.margins(0.14)
    axes.set_ylim(bottom=0)
    axes.legend(
        frameon=False,
        labelcolor=INK,
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
        handlelength=1.2,
    )
    return figure


def _memory(shown: list[Candidate]) -> tuple[list[float], str]:
    """Return where each candidate stands, and what that is: step memory, or places in a row."""
    sizes = [candidate.rise_bytes / MIB for candidate in shown]
    if not any(map(math.isnan, sizes)):
        return sizes, "step memory [MiB]"
    return [float(number) for number in range(1, len(shown) + 1)], "candidates"


def _quartiles(candidate: Candidate) -> tuple[float, float]:
    times = [step.total_ms for step in candidate.point.warm_steps]
    if len(times) == 1:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high
