"""A search as a figure: samples per second, and peak memory with the limit, against the batch; a line per plan set."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.render.page import printable
from ortlab.render.plots import COLOURS, FALLBACK, INK, MIB, dress, new_figure, say
from ortlab.studies.batch_size import plans_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.studies.batch_size import BatchSizePoint, BatchSizeSearch, Plans

_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_HEIGHT: Final = 5.2  # inches
_NAME_WIDTH: Final = 26  # characters


def plot(search: BatchSizeSearch) -> Figure:
    """Draw samples per second (median, quartiles) and memory of the batches, those that do not fit hollow.

    Parameters
    ----------
    search
        A search.

    Returns
    -------
    matplotlib.figure.Figure
        `plot(search).savefig("search.svg")` saves it.
    """
    figure = new_figure(_HEIGHT)
    top, bottom = figure.subplots(2, sharex=True)
    sets = tuple(dict.fromkeys(one.plans for one in search.points))
    for position, plans in enumerate(sets):
        points = sorted((one for one in search.points if one.plans == plans), key=lambda one: one.size)
        colour, marker = COLOURS[position % len(COLOURS)], _MARKERS[position % len(_MARKERS)]
        _draw_pace(top, points, colour, marker)
        _draw_memory(bottom, search, points, colour, marker)
    dress(
        top, f"Samples per second, measured on {search.device} (median; whiskers: quartiles)", "", "samples/s"
    )
    kinds = ", ".join(dict.fromkeys(one.kind for one in search.points if one.kind))
    what = f"Peak of {search.limit_of}" if search.of_device else "Step memory"
    dress(bottom, f"{what} ({kinds or 'not measured'})", "batch", "MiB")
    limit = search.asked_bytes / MIB
    bottom.axhline(limit, color=FALLBACK, linestyle="--", linewidth=1)
    bottom.annotate(
        f"limit: {units.size(search.asked_bytes)}",
        (0.0, limit),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8,
        color=FALLBACK,
    )
    if not any(one.timed for one in search.points):
        say(top, "No batch was timed.")
    _scale(bottom, sorted({one.size for one in search.points}))
    top.set_ylim(bottom=0)
    _name(top, sets)
    return figure


def _draw_pace(axes: Axes, points: list[BatchSizePoint], colour: str, marker: str) -> None:
    timed = [one for one in points if one.timed]
    if not timed:
        return
    medians = [one.samples_per_s for one in timed]
    spread = [
        [max(0.0, median - one.spread[0]) for one, median in zip(timed, medians, strict=True)],
        [max(0.0, one.spread[1] - median) for one, median in zip(timed, medians, strict=True)],
    ]
    axes.errorbar(
        [one.size for one in timed],
        medians,
        yerr=spread,
        color=colour,
        marker=marker,
        markersize=5,
        capsize=3,
        linewidth=1.2,
    )


def _draw_memory(
    axes: Axes, search: BatchSizeSearch, points: list[BatchSizePoint], colour: str, marker: str
) -> None:
    measured = [one for one in points if search.needed(one) is not None]
    axes.plot(
        [one.size for one in measured],
        [(search.needed(one) or 0) / MIB for one in measured],
        color=colour,
        linewidth=1.2,
    )
    for one in points:
        needed = search.needed(one)
        known = needed if needed is not None else one.predicted_bytes
        if known is not None:
            filled = colour if one.fits else "none"
            axes.plot(
                [one.size], [known / MIB], color=colour, marker=marker, markersize=5, markerfacecolor=filled
            )


def _scale(axes: Axes, sizes: list[int]) -> None:
    if not sizes:
        return
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _position: units.count(size)))


def _name(axes: Axes, sets: tuple[Plans, ...]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[position % len(COLOURS)],
            marker=_MARKERS[position % len(_MARKERS)],
            markersize=5,
            linewidth=1.2,
            label=textwrap.fill(units.fold(printable(plans_name(plans)), 4 * _NAME_WIDTH), _NAME_WIDTH),
        )
        for position, plans in enumerate(sets)
    ]
    handles.append(
        Line2D(
            [],
            [],
            linestyle="none",
            marker="o",
            markerfacecolor="none",
            color=INK,
            label=textwrap.fill("hollow: does not fit, or predicted and not run", _NAME_WIDTH),
        )
    )
    axes.legend(
        handles=handles,
        frameon=False,
        labelcolor=INK,
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
