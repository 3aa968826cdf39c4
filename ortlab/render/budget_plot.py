"""A budget as a figure: predicted peaks and costs of all budgets, and what was measured, in one plane."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ortlab.render.plots import COLOURS, INK, MIB, dress, new_figure, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.budgets.budget import Budget

_PREDICTED, _MEASURED, _OTHER = COLOURS[0], COLOURS[5], COLOURS[2]
_HEIGHT = 3.8  # inches


def plot(budget: Budget) -> Figure:
    """Draw what plans add to a step against its peak: predicted as a line, measured as marks.

    A measured peak of plans stands at their predicted cost and is joined with its prediction, so that the length of the
    line is the error. Peers stand where both were measured, against ONNX Runtime as it was set.

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
    heading = (
        f"What recompute plans cost on {budget.device} (line, costs: predicted; filled marks: measured peaks)"
    )
    dress(axes, heading, f"peak memory [MiB] ({budget.kind})", "added to a step [ms]")
    if math.isnan(budget.without.peak_bytes):
        say(axes, "Nothing was measured.")
        return figure
    _draw_curve(axes, budget)
    _draw_measured(axes, budget)
    axes.axvline(
        budget.limit_bytes / MIB, color=INK, linestyle="--", linewidth=1, label="the budget", zorder=0
    )
    axes.margins(0.1)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.02))
    return figure


def _draw_curve(axes: Axes, budget: Budget) -> None:
    points = sorted((one.peak_bytes / MIB, one.cost_ms) for one in budget.curve or (budget.prediction,))
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


def _draw_measured(axes: Axes, budget: Budget) -> None:
    """Draw measured peaks: of plans at their predicted cost, of other ways at the time that they took more."""
    axes.plot(
        [budget.without.peak_bytes / MIB],
        [0.0],
        "s",
        color=_MEASURED,
        markersize=7,
        linestyle="none",
        label="without plans, measured",
    )
    for number, trial in enumerate(budget.trials, start=1):
        told = trial.prediction
        label = "plans, peak measured" if number == 1 else None
        peaks = [told.peak_bytes / MIB, trial.peak_bytes / MIB]
        axes.plot(peaks, [told.cost_ms] * 2, color=_MEASURED, linewidth=0.8)
        axes.plot(
            peaks[1:], [told.cost_ms], "o", color=_MEASURED, markersize=7, linestyle="none", label=label
        )
        _name(axes, str(number), peaks[1], told.cost_ms)
    base = budget.compared[0].step_ms if budget.compared else None
    for position, one in enumerate(budget.compared):
        if one.step_ms is None or base is None:
            continue
        label = "peers, both measured" if position == 0 else None
        x, added = one.peak_bytes / MIB, one.step_ms - base
        axes.plot([x], [added], "D", color=_OTHER, markersize=6, linestyle="none", label=label)
        _name(axes, one.name.replace("$", r"\$"), x, added)


def _name(axes: Axes, name: str, x: float, y: float) -> None:
    axes.annotate(name, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=8, color=INK)
