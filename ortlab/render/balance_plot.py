"""A load balance as a figure: tokens of each rank over the steps, without balancing above and with it below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.render.plots import COLOURS, INK, dress, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.ranks.balancing import Balance

STEPS_SHOWN: Final = 40
"""Steps of the first epoch that are drawn: more marks cannot be told apart."""

RANKS_NAMED: Final = 12
"""Ranks that the key names: marks and colours repeat, and a long key would leave the axes no room."""


def balance_plot(record: Balance) -> Figure:
    """Draw the first epoch: one mark for each rank and step, a line from the least to the most, and the mean."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(4.6)
    both = figure.subplots(2, sharex=True, sharey=True)
    for axes, epochs, name in zip(
        both, (record.without, record.having), ("As they come", "Balanced by length"), strict=True
    ):
        steps = record.tokens(epochs[0])[:STEPS_SHOWN]
        numbers = range(1, len(steps) + 1)
        axes.vlines(numbers, [min(one) for one in steps], [max(one) for one in steps], color=INK, linewidth=1)
        for rank in range(record.ranks):
            axes.plot(
                numbers,
                [one[rank] for one in steps],
                linestyle="none",
                marker=("o", "s", "^", "D", "v", "P")[rank % 6],
                markersize=4,
                color=COLOURS[rank % len(COLOURS)],
                label=_label(rank, record.ranks),
            )
        ratio = units.ratio(record.imbalance(epochs))
        dress(axes, f"{name}: the fullest rank has {ratio} the mean", "", "tokens")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    both[1].set_xlabel("step of the first epoch", fontsize=8, color=INK)
    both[0].legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _label(rank: int, ranks: int) -> str:
    """Name a rank in the key; a name that begins with an underscore is left out of it."""
    if rank == RANKS_NAMED < ranks:
        return f"and {ranks - RANKS_NAMED} more"
    return f"rank {rank}" if rank < RANKS_NAMED else "_"
