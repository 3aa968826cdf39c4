"""FLOPs as figures: by module, and with a switch beside without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.render.page import printable
from ortlab.render.plots import COLOURS, INK, dress, new_figure, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.graphs.flops import Flops, FlopSavings

MODULES_SHOWN: Final = 16
_MEGA: Final = 1e6


def flops_plot(flops: Flops) -> Figure:
    """Draw the FLOPs of each module, forward and backward apart, the largest first."""
    names = list(flops.by("module"))[:MODULES_SHOWN]
    figure = new_figure(1.2 + 0.28 * max(len(names), 1))
    axes = figure.add_subplot()
    dress(axes, "FLOPs of a step, by module", "MFLOPs", "")
    if not names:
        say(axes, "No node multiplies matrices.")
        return figure
    left = [0.0] * len(names)
    for backward, colour in ((False, COLOURS[0]), (True, COLOURS[1])):
        widths = [
            sum(node.flops or 0 for node in flops.nodes if node.module == name and node.backward is backward)
            / _MEGA
            for name in names
        ]
        label = "backward" if backward else "forward"
        axes.barh(list(map(_label, names)), widths, left=left, label=label, color=colour, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure


def savings_plot(savings: FlopSavings) -> Figure:
    """Draw the FLOPs of the modules that change, without the switch and with it."""
    names = list(savings.by_module())[:MODULES_SHOWN]
    figure = new_figure(1.4 + 0.4 * max(len(names), 1))
    axes = figure.add_subplot()
    dress(axes, f"FLOPs of a step: {printable(savings.changed)}", "MFLOPs", "")
    if not names:
        say(axes, "No module calculates more or less.")
        return figure
    places = range(len(names))
    for offset, flops, label, colour in (
        (-0.2, savings.without, "without", COLOURS[1]),
        (0.2, savings.having, "with", COLOURS[0]),
    ):
        sums = flops.by("module")
        axes.barh(
            [place + offset for place in places],
            [sums.get(name, 0) / _MEGA for name in names],
            label=label,
            color=colour,
            height=0.36,
        )
    axes.set_yticks(list(places), list(map(_label, names)))
    axes.invert_yaxis()
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure


def _label(name: str) -> str:
    return units.fold(printable(name), 44).replace("$", r"\$") or "the model itself"
