"""Densities as a figure: one line for each input, over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.render.page import printable
from ortlab.render.plots import COLOURS, INK, dress, new_figure, say, whole_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.records.density_report import DensityReport


def density_plot(report: DensityReport) -> Figure:
    """Draw which part of each input counts, step by step; the line below which the sparsity optimizers act, too."""
    from matplotlib.ticker import MaxNLocator

    from ortlab.records.density_report import THRESHOLD

    figure = new_figure(2.8)
    axes = figure.add_subplot()
    dress(axes, f"Density of the inputs, counted in {report.source}", "step", "valid [%]")
    inputs = dict.fromkeys((one.kind, one.name) for one in report.rows)
    if not inputs:
        say(axes, "Nothing was counted.")
        return figure
    for position, (kind, name) in enumerate(inputs):
        rows = [one for one in report.rows if (one.kind, one.name) == (kind, name)]
        axes.plot(
            [one.step for one in rows],
            [100 * one.density for one in rows],
            label=f"{kind} {printable(name)}".replace("$", r"\$"),
            color=COLOURS[position % len(COLOURS)],
            marker="o",
            markersize=4,
            linewidth=1.5,
        )
    axes.axhline(100 * THRESHOLD, color=INK, linestyle=":", linewidth=1)
    axes.set_ylim(0, 105)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    whole_steps(axes)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
