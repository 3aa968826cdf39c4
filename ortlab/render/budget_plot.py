"""A budget as a figure: what all budgets are predicted to cost, and what was measured, in one plane."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ortlab.render.plots import COLOURS, INK, MIB, dress, new_figure, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.studies.budget import Budget

_PREDICTED, _MEASURED, _OTHER, _TIMED = COLOURS[0], COLOURS[5], COLOURS[2], COLOURS[1]
_HEIGHT = 3.8  # inches


def plot(budget: Budget) -> Figure:
    """Draw what plans add to a step's time against the memory that it needs: the front of what plans can do.

    The line is predicted, and so is the time of every mark but two: the answer's own, with its 95 % interval, and those
    of candidates. Measured memory is filled, and joined with its prediction, so that the length of the line is the
    error.

    Parameters
    ----------
    budget
        A budget.

    Returns
    -------
    matplotlib.figure.Figure
        `plot(budget).savefig("budget.svg")` saves it.
    """
    figure = new_figure(_HEIGHT)
    axes = figure.add_subplot()
    step_ms = budget.without.step_ms
    heading = (
        f"What less memory costs on {budget.device} (hollow and line: predicted; filled: memory measured)"
    )
    time = "added to a step [%]" if step_ms else "added to a step [ms]"
    dress(axes, heading, f"step memory [MiB] ({budget.kind})", time)
    if math.isnan(budget.without.step_memory_bytes):
        say(axes, "Nothing was measured.")
        return figure
    unit = step_ms / 100 if step_ms else 1.0
    _draw_curve(axes, budget, unit)
    _draw_measured(axes, budget, unit)
    if budget.limit_bytes > 0:
        where = budget.limit_bytes / MIB
        if (
            where < 2 * budget.without.step_memory_bytes / MIB
        ):  # a limit far above would press the rest together
            axes.axvline(where, color=INK, linestyle="--", linewidth=1, label="asked for", zorder=0)
    if budget.solver.plans:
        floor = budget.floor_bytes / MIB
        axes.axvline(
            floor, color=INK, linestyle=":", linewidth=1, label="floor: plans reach no lower", zorder=0
        )
    axes.margins(0.1)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.02))
    return figure


def _draw_curve(axes: Axes, budget: Budget, unit: float) -> None:
    points = sorted(
        (one.step_memory_bytes / MIB, one.cost_ms / unit) for one in budget.curve or (budget.prediction,)
    )
    x, y = zip(*points, strict=True)
    axes.plot(
        x,
        y,
        color=_PREDICTED,
        marker="o",
        markersize=5,
        markerfacecolor="none",
        linewidth=1.2,
        drawstyle="steps-post",
        label="plans, predicted",
    )


def _draw_measured(axes: Axes, budget: Budget, unit: float) -> None:
    """Draw what was measured: plans at their predicted time, the answer also at its measured one, and other ways."""
    axes.plot(
        [budget.without.step_memory_bytes / MIB],
        [0.0],
        "s",
        color=_MEASURED,
        markersize=7,
        linestyle="none",
        label="without plans",
    )
    for number, trial in enumerate(budget.trials, start=1):
        told = trial.prediction
        label = "plans, memory measured" if number == 1 else None
        sizes = [told.step_memory_bytes / MIB, trial.step_memory_bytes / MIB]
        added = told.cost_ms / unit
        axes.plot(sizes, [added] * 2, color=_MEASURED, linewidth=0.8)
        axes.plot(sizes[1:], [added], "o", color=_MEASURED, markersize=7, linestyle="none", label=label)
        _name(axes, "answer" if trial is budget.best else str(number), sizes[1], added)
    _draw_timing(axes, budget)
    base = budget.compared[0].step_ms if budget.compared else None
    for position, one in enumerate(budget.compared):
        if one.step_ms is None or base is None:
            continue
        label = "candidates, both measured" if position == 0 else None
        x, added = one.step_memory_bytes / MIB, (one.step_ms - base) / unit
        axes.plot([x], [added], "D", color=_OTHER, markersize=6, linestyle="none", label=label)
        _name(axes, one.name.replace("$", r"\$"), x, added)


def _draw_timing(axes: Axes, budget: Budget) -> None:
    """Draw the answer where its time was measured, with the interval; not where the machine was not steady."""
    timing, best = budget.timing, budget.best
    if timing is None or best is None or not timing.holds or math.isnan(timing.low):
        return
    middle = 100 * (timing.ratio - 1)
    ends = [[max(0.0, middle - 100 * (timing.low - 1))], [max(0.0, 100 * (timing.high - 1) - middle)]]
    axes.errorbar(
        [best.step_memory_bytes / MIB],
        [middle],
        yerr=ends,
        fmt="^",
        color=_TIMED,
        markersize=7,
        capsize=3,
        linewidth=1.2,
        label="answer, time measured as well",
    )


def _name(axes: Axes, name: str, x: float, y: float) -> None:
    axes.annotate(name, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=8, color=INK)
