"""A sweep as a figure: time against memory, one numbered mark per point, and the front that no other point beats."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ortlab import units
from ortlab.options.configuration import engine_kind
from ortlab.render.page import printable
from ortlab.render.plots import COLOURS, FALLBACK, INK, MIB, dress, new_figure, say
from ortlab.render.run_pages import ENGINE_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.studies.sweep import Sweep
    from ortlab.studies.sweep_outcomes import Outcome
    from ortlab.studies.sweep_points import Point

_ENGINE_COLOURS = dict(zip(ENGINE_NAMES, COLOURS, strict=False))
_NAMES_SHOWN = 24
"""Points that the key names; a sweep's page names all."""

_NAME_WIDTH = 46  # characters
_INCHES_PER_LINE = 0.17


def plot(sweep: Sweep) -> Figure:
    """Draw step time, the median with quartiles, against step memory.

    Points on the front, which no other point beats in both, are filled and joined. Where step memory is
    not known, the points stand in a row by time.

    Parameters
    ----------
    sweep
        A sweep; points that were not measured are left out.

    Returns
    -------
    matplotlib.figure.Figure
        `plot(sweep).savefig("sweep.svg")` saves it.
    """
    outcomes = sweep.outcomes()
    key = sorted(outcomes, key=lambda one: one.point.number)[:_NAMES_SHOWN]
    lines = sum(_label(sweep, one).count("\n") + 1 for one in key)
    figure = new_figure(max(3.6, 1.2 + _INCHES_PER_LINE * lines))
    axes = figure.add_subplot()
    if not outcomes:
        dress(axes, "Step time against memory", "", "step [ms]")
        say(axes, "No point was measured.")
        return figure
    with_memory = not any(math.isnan(one.point.step_memory_bytes) for one in outcomes)
    devices = ", ".join(dict.fromkeys(run.device for one in outcomes for run in one.point.runs))
    for position, one in enumerate(outcomes):
        _mark(axes, one, one.point.step_memory_bytes / MIB if with_memory else position)
    if with_memory:
        _join_front(axes, outcomes)
    memory = "step memory [MiB]" if with_memory else "points, the fastest first"
    heading = f"Step time and step memory, measured on {devices} (median; whiskers: quartiles)"
    dress(axes, heading, memory, "step [ms]")
    axes.margins(0.12)
    _name(axes, sweep, key, len(outcomes))
    return figure


def _mark(axes: Axes, one: Outcome, memory: float) -> None:
    point = one.point
    low, high = _quartiles(point)
    colour = _colour(point)
    axes.errorbar(
        [memory],
        [point.step_ms],
        yerr=[[point.step_ms - low], [high - point.step_ms]],
        color=colour,
        marker="o",
        markersize=7,
        markerfacecolor=colour if one.on_front else "none",
        capsize=3,
        linewidth=1,
    )
    axes.annotate(
        str(point.number),
        (memory, point.step_ms),
        xytext=(6, 5),
        textcoords="offset points",
        fontsize=8,
        color=INK,
        fontweight="bold" if one.on_front else "normal",
    )


def _join_front(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    front = sorted((one.point for one in outcomes if one.on_front), key=lambda point: point.step_memory_bytes)
    axes.plot(
        [point.step_memory_bytes / MIB for point in front],
        [point.step_ms for point in front],
        color=INK,
        linestyle="--",
        linewidth=1,
        zorder=0,
    )


def _name(axes: Axes, sweep: Sweep, key: Sequence[Outcome], total: int) -> None:
    """Write the key beside the axes: number and name of each point, and what the marks mean."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="none", label=_label(sweep, one)) for one in key]
    if total > len(key):
        handles.append(Line2D([], [], linestyle="none", label=f"and {total - len(key)} more"))
    engines = dict.fromkeys(engine_kind(one.point.runs[0].engine) for one in key if not one.fell_back)
    handles += [
        Line2D(
            [],
            [],
            linestyle="none",
            marker="o",
            color=_ENGINE_COLOURS.get(name, INK),
            label=ENGINE_NAMES[name],
        )
        for name in engines
    ]
    if any(one.fell_back for one in key):
        handles.append(
            Line2D([], [], linestyle="none", marker="o", color=FALLBACK, label="PYTORCH (fallback)")
        )
    handles.append(
        Line2D([], [], linestyle="--", marker="o", color=INK, linewidth=1, label="filled: best trade-offs")
    )
    axes.legend(
        handles=handles,
        frameon=False,
        labelcolor=INK,
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
        handlelength=1.2,
    )


def _label(sweep: Sweep, one: Outcome) -> str:
    """Name a point, without a dollar sign, which would start a formula."""
    base = ", baseline" if one.point is sweep.baseline else ""
    name = units.fold(printable(sweep.name(one.point)), 2 * _NAME_WIDTH)
    words = f"{one.point.number}  {name}{base}"
    # A hyphen is the minus of a plan, "Gelu+:1:-1", and no place to break a line at.
    lines = textwrap.fill(words, _NAME_WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return lines.replace("$", r"\$")


def _colour(point: Point) -> str:
    return FALLBACK if point.fell_back else _ENGINE_COLOURS.get(engine_kind(point.runs[0].engine), INK)


def _quartiles(point: Point) -> tuple[float, float]:
    times = [step.total_ms for step in point.warm_steps]
    if len(times) == 1:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high
