"""A comparison of two runs as a figure: distances over the depth of the model, and over the steps, with the floor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from ortlab.parity.parity import (
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    PARAMETER_GRADIENT,
    UPDATED_PARAMETER,
)
from ortlab.render.plots import COLOURS, FALLBACK, INK, dress, new_figure, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.parity.parity import Divergence, Parity, TensorPair

_HEIGHT: Final = 7.0  # inches
_LEAST: Final = 1e-9
"""Where a distance of zero is drawn: a logarithmic axis has none."""

_MOST: Final = 1e3
_PHASES: Final = (
    ("Forward: what modules return, in the order of the calls", (OUTPUT,), "forward"),
    (
        "Backward: gradients, in the order in which they arrive",
        (OUTPUT_GRADIENT, INPUT_GRADIENT, PARAMETER_GRADIENT),
        "backward",
    ),
)


def parity_plot(parity: Parity) -> Figure:
    """Draw the distance of each tensor of the first step over the depth, and the largest of each step.

    Parameters
    ----------
    parity
        The comparison.

    Returns
    -------
    matplotlib.figure.Figure
        `parity_plot(parity).savefig("parity.svg")` saves it.
    """
    figure = new_figure(_HEIGHT)
    forward, backward, over_steps = figure.subplots(3)
    step = parity.first.pair.site.step if parity.first else 1
    for axes, (title, kinds, phase) in zip((forward, backward), _PHASES, strict=True):
        pairs = [
            one for one in parity.pairs if one.site.step == step and one.site.kind in kinds and one.distance
        ]
        _over_depth(axes, pairs, getattr(parity, phase), f"{title}; step {step}")
    _over_steps(over_steps, parity)
    return figure


def _over_depth(axes: Axes, pairs: Sequence[TensorPair], first: Divergence | None, title: str) -> None:
    dress(axes, title, "tensor", "relative distance")
    if not pairs:
        say(axes, "Nothing was compared.")
        return
    places = range(1, len(pairs) + 1)
    axes.plot(
        places, [_drawn(pair.limit) for pair in pairs], color=INK, linewidth=0.8, linestyle=":", label="limit"
    )
    axes.plot(places, [_drawn(pair.floor) for pair in pairs], color=COLOURS[1], linewidth=1.0, label="floor")
    axes.scatter(
        places,
        [_drawn(pair.distance.relative) for pair in pairs if pair.distance],
        s=9,
        color=[FALLBACK if pair.verdict == "differs" else COLOURS[0] for pair in pairs],
        label="distance",
        zorder=3,
    )
    if first is not None and first.pair in pairs:
        place = pairs.index(first.pair) + 1
        axes.axvline(place, color=FALLBACK, linewidth=1, linestyle="--")
        left = place > len(pairs) / 2
        axes.annotate(
            first.module or "the model",
            (place, 0.06),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if left else 4, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=8,
            color=FALLBACK,
        )
    axes.set_yscale("log")
    _key(axes)


def _over_steps(axes: Axes, parity: Parity) -> None:
    from matplotlib.ticker import MaxNLocator

    dress(axes, "Median and largest distance of each step, as a share of the limit", "step", "share of limit")
    steps = sorted({pair.site.step for pair in parity.pairs})
    kinds = (
        ("activations", (OUTPUT,)),
        ("gradients", (OUTPUT_GRADIENT, INPUT_GRADIENT, PARAMETER_GRADIENT)),
        ("updated parameters", (UPDATED_PARAMETER,)),
    )
    drawn = False
    for position, (name, wanted) in enumerate(kinds):
        shares = {step: _shares(parity.pairs, step, wanted) for step in steps}
        known = [step for step in steps if shares[step]]
        if not known:
            continue
        drawn = True
        middle = [_drawn(sorted(shares[step])[len(shares[step]) // 2]) for step in known]
        largest = [_drawn(max(shares[step])) for step in known]
        colour = COLOURS[position]
        axes.plot(known, largest, color=colour, marker="o", markersize=4, linewidth=1.2, label=name)
        axes.plot(known, middle, color=colour, marker="_", markersize=7, linewidth=0.8, linestyle=":")
    if not drawn:
        say(axes, "Nothing was compared.")
        return
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _key(axes)


def _shares(pairs: Sequence[TensorPair], step: int, kinds: Sequence[str]) -> list[float]:
    return [
        pair.distance.relative / pair.limit
        for pair in pairs
        if pair.site.step == step and pair.site.kind in kinds and pair.distance and pair.limit
    ]


def _drawn(value: float) -> float:
    return _MOST if math.isinf(value) or math.isnan(value) else min(_MOST, max(_LEAST, value))


def _key(axes: Axes) -> None:
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
