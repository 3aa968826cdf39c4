"""A sweep as a figure: time against memory, one numbered mark per point, and the front that no other point beats."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ortlab.engine_names import engine_kind
from ortlab.render import units
from ortlab.render.page import printable
from ortlab.render.plots import COLOURS, FALLBACK, INK, MIB, dress, new_figure, say
from ortlab.render.run_pages import ENGINE_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.sweeps.outcomes import Outcome
    from ortlab.sweeps.points import Point
    from ortlab.sweeps.sweep import Sweep

_ENGINE_COLOURS = dict(zip(ENGINE_NAMES, COLOURS, strict=False))
_NAMES_SHOWN = 24
"""Points that the key names; a sweep's page names all."""

_NAME_WIDTH = 46  # characters
_INCHES_PER_LINE = 0.17


def plot(sweep: Sweep) -> Figure:
    """Draw step time against peak memory: medians, with quartiles of time and the rounds' range of memory.

    Points on the front, which no other point beats in both, are filled and joined. Where the platform cannot tell
    memory, the points stand in a row by time.

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
    with_memory = all(one.point.peaks for one in outcomes)
    devices = ", ".join(dict.fromkeys(run.device for one in outcomes for run in one.point.runs))
    for position, one in enumerate(outcomes):
        _mark(axes, one, _memory(one.point) if with_memory else (position, position, position))
    if with_memory:
        _join_front(axes, outcomes)
    memory = _memory_words(outcomes) if with_memory else "points, the fastest first"
    heading = (
        f"Step time and memory, measured on {devices} (median; whiskers: quartiles, and range over rounds)"
    )
    dress(axes, heading, memory, "step [ms]")
    axes.margins(0.12)
    _name(axes, sweep, key, len(outcomes))
    return figure


def _mark(axes: Axes, one: Outcome, memory: tuple[float, float, float]) -> None:
    point = one.point
    low, high = _quartiles(point)
    colour = _colour(point)
    left, middle, right = memory
    axes.errorbar(
        [middle],
        [point.step_ms],
        xerr=[[middle - left], [right - middle]],
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
        (middle, point.step_ms),
        xytext=(6, 5),
        textcoords="offset points",
        fontsize=8,
        color=INK,
        fontweight="bold" if one.on_front else "normal",
    )


def _join_front(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    front = sorted((one.point for one in outcomes if one.on_front), key=lambda point: point.peak_bytes)
    axes.plot(
        [point.peak_bytes / MIB for point in front],
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
        Line2D([], [], linestyle="--", marker="o", color=INK, linewidth=1, label="filled: the front")
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
    return textwrap.fill(f"{one.point.number}  {name}{base}", _NAME_WIDTH, subsequent_indent="    ").replace(
        "$", r"\$"
    )


def _colour(point: Point) -> str:
    return FALLBACK if point.fell_back else _ENGINE_COLOURS.get(engine_kind(point.runs[0].engine), INK)


def _memory(point: Point) -> tuple[float, float, float]:
    return min(point.peaks) / MIB, point.peak_bytes / MIB, max(point.peaks) / MIB


def _memory_words(outcomes: Sequence[Outcome]) -> str:
    kinds = dict.fromkeys(
        f"{run.memory.kind} of {run.memory.scope}" for one in outcomes for run in one.point.runs if run.memory
    )
    return f"peak memory [MiB] ({', '.join(kinds)})"


def _quartiles(point: Point) -> tuple[float, float]:
    times = [step.total_ms for step in point.warm_steps]
    if len(times) == 1:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high
