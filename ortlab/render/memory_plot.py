"""Measured memory as figures: the phases of one step, and the points of many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.records.memory_phases import PHASES
from ortlab.render.plots import COLOURS, INK, MIB, dress, new_figure, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.records.memory_phases import MemoryPhases

_LEVEL, _PEAK = COLOURS[4], COLOURS[5]
_MARKS: Final = ("o", "s", "D", "^")


def measurement_plot(measured: MemoryMeasurement) -> Figure:
    """Draw what each phase of a step takes above the start of the step: its level at the end, and its peak.

    Parameters
    ----------
    measured
        A measurement; the step with the highest rise is drawn.

    Returns
    -------
    matplotlib.figure.Figure
        `measurement_plot(measured).savefig("memory.svg")` saves it.
    """
    phases = measured.step.phases
    start = measured.start_bytes
    figure = new_figure(1.2 + 0.34 * len(phases))
    axes = figure.add_subplot()
    names = [phase.phase for phase in phases]
    peaks = [(phase.peak_bytes - start) / MIB for phase in phases]
    levels = [(phase.after_bytes - start) / MIB for phase in phases]
    axes.barh(names, peaks, height=0.6, color=_PEAK, label="peak in the phase")
    axes.barh(names, levels, height=0.28, color=_LEVEL, label="level at its end")
    for name, peak in zip(names, peaks, strict=True):
        axes.annotate(
            units.size(peak * MIB),
            (max(peak, 0.0), name),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.axvline(0.0, color=INK, linewidth=0.8)
    dress(axes, f"Above the start of the step, measured ({measured.label})", "MiB", "")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    _key(axes)
    return figure


def phases_plot(phases: MemoryPhases) -> Figure:
    """Draw memory at the points of each step, and the highest so far.

    Parameters
    ----------
    phases
        The readings of a run, or of a log.

    Returns
    -------
    matplotlib.figure.Figure
        `phases_plot(phases).savefig("memory.svg")` saves it.
    """
    figure = new_figure(2.8)
    axes = figure.add_subplot()
    if not phases.readings:
        dress(axes, "Memory by phase", "step", "MiB")
        say(axes, "Nothing was read.")
        return figure
    now = next((name for name in phases.names if not name.startswith("max ")), phases.names[0])
    places = {step: place for place, step in enumerate(phases.steps)}
    for point, colour, mark in zip(PHASES, COLOURS, _MARKS, strict=False):
        taken = [reading for reading in phases.at(point) if now in reading.sizes]
        axes.plot(
            [places[reading.step] for reading in taken],
            [reading.sizes[now] / MIB for reading in taken],
            label=point.replace("_", " "),
            color=colour,
            # Two points of a step are often at one level; open marks of two kinds let both be seen.
            marker=mark,
            markerfacecolor="none",
            linestyle=("-", "--", "-.", ":")[PHASES.index(point)],
            linewidth=1.5,
        )
    highest = f"max {now}"
    taken = [reading for reading in phases.at(PHASES[-1]) if highest in reading.sizes]
    if taken:
        axes.plot(
            [places[reading.step] for reading in taken],
            [reading.sizes[highest] / MIB for reading in taken],
            label=highest,
            color=INK,
            linewidth=1,
            drawstyle="steps-post",
        )
    axes.set_xticks(list(places.values()), [str(step) for step in places])
    dress(axes, f"Memory at the points of a step, measured ({now})", "step", "MiB")
    _key(axes)
    return figure


def _key(axes: Axes) -> None:
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
