"""How far apart two engines may be at a site: what rounding and repetition explain there."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Final

from ortlab.parity.pairs import FORWARD, OUTPUT_GRADIENT, Site

if TYPE_CHECKING:
    from ortlab.parity.comparing import Compared, Reference

FACTOR: Final = 4.0
"""A distance counts as a difference from this multiple of the measured floor on.

The floor is made by moving each number that a module returns by at most `steady.UNITS` = 4 units of rounding, evenly
spread: 4 / sqrt(3) = 2.3 units in the mean of squares, which is what 64 roundings in a row come to, since each is off
by half a unit at most, 0.29 in the mean of squares. Four floors are 1,000 roundings in a row. Where engines agree,
hardly a tensor is more than one floor apart: ``bench/fault_finding.py`` states how near its clean pairs come.
"""

LEAST: Final = 16.0
MOST: Final = 256.0
"""Bounds of the units of rounding that every limit allows; between them it is the root of the length of sums."""


def limits(
    reference: Reference, rounded: Compared, repeated: Iterable[Compared], own_use: Collection[Site] = ()
) -> dict[Site, tuple[float, float]]:
    """Return the floor and the limit of each site, both relative distances.

    Two orders of a sum of n numbers differ by sqrt(n) units with a probability near one, since each of the two is off
    by up to sqrt(n) / 2 (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). How long
    the sums of a step are is told by the largest of its tensors: at most as long as its last dimension, or as the
    others together.

    `rounded` is the run with other rounding; what the `repeated` runs differ by is chance. `own_use` has the sites of
    outputs that their modules have used, too: there the run with other rounding moves only what others get, a part of
    the gradient.
    """
    in_part = {replace(site, kind=OUTPUT_GRADIENT) for site in own_use}
    chances = [one.distances for one in repeated]
    by_call = _by_call(rounded)
    units = min(MOST, max(LEAST, math.sqrt(reference.longest)))
    found = {}
    for site, epsilon in reference.epsilon.items():
        known = None if site in in_part else rounded.distances.get(site)
        floor = by_call.get(_call(site), 0.0) if known is None else known.relative
        floor = max([floor, *(one[site].relative for one in chances if site in one)])
        found[site] = (floor, max(FACTOR * floor, units * epsilon))
    return found


def _by_call(rounded: Compared) -> Mapping[tuple[object, ...], float]:
    """Return the middle floor of each call's forward and backward.

    It serves tensors that the run with other rounding does not have. The gradient of what a module returns and has used
    itself before, such as the probabilities of an attention, is one: what is moved is the tensor that is returned.
    """
    found: dict[tuple[object, ...], list[float]] = {}
    for site, distance in rounded.distances.items():
        found.setdefault(_call(site), []).append(distance.relative)
    return {call: median(floors) for call, floors in found.items()}


def _call(site: Site) -> tuple[object, ...]:
    return site.step, site.module, site.call, site.kind in FORWARD
