"""Ranks as a figure: where the time of each goes in a step, and the memory that it needs."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from ortlab.render.plots import COLOURS, INK, MIB, dress, new_figure, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.ranks.ledgers import RankRun, Ranks

_PARTS = ("forward", "backward", "exchange", "optimizer", "everything else")


def ranks_plot(ranks: Ranks) -> Figure:
    """Draw a bar for each rank of the run shown: the parts of a step on the left, peak memory on the right."""
    rows = ranks.rows()
    figure = new_figure(1.6 + 0.34 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    if not rows:
        dress(left, "Time of a step", "", "")
        say(left, "The ranks have no run in common.")
        return figure
    names = [f"rank {one.rank}" for one in rows]
    start = [0.0] * len(rows)
    parts = [_parts(one) for one in rows]
    for number, name in enumerate(_PARTS):
        values = [one[number] for one in parts]
        left.barh(names, values, left=start, label=name, color=COLOURS[number])
        start = [before + value for before, value in zip(start, values, strict=True)]
    right.barh(names, [(one.peak_bytes or 0) / MIB for one in rows], color=INK)
    device = ", ".join(dict.fromkeys(one.run.device for one in rows))
    dress(left, f"A step of run {ranks.shown}, measured on {device}", "ms, mean of warm steps", "")
    dress(right, "Peak memory", "MiB", "")
    left.invert_yaxis()
    figure.legend(frameon=False, labelcolor=INK, fontsize=8, ncols=len(_PARTS), loc="outside lower left")
    return figure


def _parts(one: RankRun) -> tuple[float, ...]:
    """Return the mean ms of each of `_PARTS` in warm steps; an exchange that is not told apart is in the backward."""
    warm = one.run.warm_steps
    exchange = statistics.mean(step.exchange_ms or 0.0 for step in warm)
    return (
        statistics.mean(step.forward_ms for step in warm),
        statistics.mean(step.backward_ms for step in warm) - exchange,
        exchange,
        statistics.mean(step.optimizer_ms for step in warm),
        statistics.mean(step.other_ms for step in warm),
    )
