"""The saved activations as a figure: one bar for each layer, stacked by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.memory.saved_activations import OUTSIDE
from ortlab.render.page import printable
from ortlab.render.plots import COLOURS, INK, MIB, dress, new_figure, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.memory.saved_activations import SavedActivations

LAYERS_SHOWN: Final = 32
"""Bars: the largest layers, in the model's order."""

_REST: Final = "other operators"
_REST_COLOUR: Final = "#8d8d8d"
_NAME: Final = 36  # characters
_INCHES_PER_BAR: Final = 0.26


def activations_plot(activations: SavedActivations) -> Figure:
    """Draw what each layer keeps for backward, stacked by operator: the six that keep most, and the others.

    Parameters
    ----------
    activations
        Saved activations; activations of unknown size are left out, and the heading says so.

    Returns
    -------
    matplotlib.figure.Figure
        `activations_plot(activations).savefig("activations.svg")` saves it.
    """
    layers = activations.by("layer")
    largest = {group.name for group in sorted(layers, key=lambda group: -group.bytes)[:LAYERS_SHOWN]}
    shown = [group for group in layers if group.name in largest and group.bytes]
    operators = [group.name for group in activations.by("operator")[: len(COLOURS)]]
    kept: dict[str, dict[str, int]] = {name: {} for name in (*operators, _REST)}
    for row in activations.rows:
        bars = kept[row.operator if row.operator in operators else _REST]
        layer = activations.group_of(row, "layer")
        bars[layer] = bars.get(layer, 0) + (row.bytes or 0)
    figure = new_figure(1.3 + _INCHES_PER_BAR * max(len(shown), 4))
    axes = figure.add_subplot()
    unit, per_unit = ("MiB", MIB) if activations.total_bytes >= MIB else ("KiB", 1 << 10)
    heading = f"Kept for backward, worked out from shapes: {units.size(activations.total_bytes)} in all"
    if activations.unknown:
        heading += f", and {units.count(len(activations.unknown))} activations of unknown size"
    if len(shown) < sum(group.bytes > 0 for group in layers):
        heading += f"; the {len(shown)} largest layers"
    dress(axes, heading, unit, "")
    if not shown:
        say(axes, "Nothing is kept for backward.")
        return figure
    rows = [_name(group.name) for group in shown]
    left = [0.0] * len(shown)
    for (operator, bars), colour in zip(
        kept.items(), (*COLOURS[: len(operators)], _REST_COLOUR), strict=True
    ):
        widths = [bars.get(group.name, 0) / per_unit for group in shown]
        if any(widths):
            axes.barh(rows, widths, left=left, label=_name(operator), color=colour, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _name(text: str) -> str:
    """Name a bar, without a dollar sign, which would start a formula."""
    return (text if text == OUTSIDE else units.fold(printable(text), _NAME)).replace("$", r"\$")
