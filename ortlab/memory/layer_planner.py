"""Which layers to recompute, and what to keep inside, so that a step needs least at each cost.

The plans are those of three families, in which the best is found by trying all: the first layers keep only what they
hand on (or, in the second family, also what their first half does), those behind them what linear layers return as
well, the next all products of matrices, and the last ones everything. What an early layer keeps lives around all that
later ones keep, so that of layers that are alike the first ones are to keep least. The backward of the last layers
finds most kept, so in the third family they are made again in halves, which need less while they run. What layers take
off at an instant is added up; the plans that are best so are then simulated as a whole, transients of recomputed
stretches, gradients and the loss included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from ortlab.memory.products import is_product
from ortlab.memory.recompute import with_values
from ortlab.memory.trace import lifetimes
from ortlab.options.switches import HALVES, LINEAR, MATMULS, NESTED_HALVES, LayerRange, read_layers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortlab.memory.trace import Trace

    Floats = NDArray[np.float64]

_Plan = TypeVar("_Plan")

FAMILIES: Final = (("", LINEAR, MATMULS), (HALVES, LINEAR, MATMULS), ("", NESTED_HALVES, HALVES))
"""Ways to recompute a layer, in the order in which a plan may have them: the first layers in the first way."""

_STEPS: Final = 24
"""Into so many steps the layers are cut; those of a deeper model change together."""

_SIMULATED: Final = 32
"""So many of the best plans are simulated as a whole."""


@dataclass(frozen=True)
class LayerPlan:
    """Layers that are recomputed."""

    ranges: tuple[LayerRange, ...]
    peak_bytes: float  # simulated
    cost_ms: float  # time of the nodes that run again

    @property
    def words(self) -> tuple[str, ...]:
        """What the switch `recompute` takes."""
        return tuple(map(str, self.ranges))


class LayerPlanner:
    """The layers of a profiled step in which nothing was recomputed.

    `trace` has its nodes in the order that ORT gives to sessions with plans. `again` says, by what is kept inside of a
    layer, which values the backward makes again, layer by layer; it is empty for a model without repeated layers.
    """

    def __init__(self, trace: Trace, again: Mapping[str, Sequence[frozenset[str]]]) -> None:
        self._trace = trace
        self._products = {name for node in trace.nodes if is_product(node.operator) for name in node.outputs}
        self._again = {
            way: tuple(self._without_kept(names, way) for names in layers) for way, layers in again.items()
        }
        self._count = len(next(iter(again.values()), ()))

    def trace(self, ranges: Iterable[LayerRange]) -> Trace:
        """Return the step with layers recomputed."""
        names = set[str]()
        for one in ranges:
            names.update(*self._again[one.way][one.first : one.end])
        return with_values(self._trace, names)

    def with_words(self, words: Sequence[str], again: frozenset[str]) -> Trace:
        """Return the step with what words of the switch `recompute` say; `again` is what they make again."""
        ranges = [one for one in map(read_layers, words) if one is not None and one.together == 1]
        if len(ranges) == len(words):
            return self.trace(ranges)
        kept = MATMULS if any(word.endswith(MATMULS) for word in words) else ""
        return with_values(self._trace, self._without_kept(again, kept))

    def _without_kept(self, names: frozenset[str], kept: str) -> frozenset[str]:
        # ORT makes one node of a product and its scale, under the name of what is made again.
        return names - self._products if kept == MATMULS else names

    def front(self) -> tuple[LayerPlan, ...]:
        """Return the plans of which none needs less and costs no more, the cheapest first; none without layers."""
        if not self._count:
            return ()
        ends = np.unique(np.linspace(0, self._count, min(self._count, _STEPS) + 1).round().astype(int))
        live = lifetimes(self._trace).live.astype(np.float64)
        alone = {way: self._alone(live, ends, way) for way in self._again}
        found = _undominated(
            (peak, cost, self._ranges(family, ends[list(place)]))
            for family in FAMILIES
            for place, peak, cost in _all_of_family(live, [alone[way] for way in family])
        )
        if len(found) > _SIMULATED:
            chosen = np.unique(np.linspace(0, len(found) - 1, _SIMULATED).round().astype(int))
            found = [found[number] for number in chosen]
        plans = []
        for _, _, ranges in found:
            trace = self.trace(ranges)
            plans.append((float(lifetimes(trace).peak), trace.recomputed_ms, ranges))
        return tuple(LayerPlan(ranges, peak, cost) for peak, cost, ranges in _undominated(plans))

    def _ranges(self, family: Sequence[str], ends: Iterable[int]) -> tuple[LayerRange, ...]:
        bounds = [0, *map(int, ends)]
        return tuple(
            LayerRange.in_way(way, first, None if end == self._count else end)
            for way, (first, end) in zip(family, pairwise(bounds), strict=True)
            if first < end
        )

    def _alone(self, live: Floats, ends: NDArray[np.int64], way: str) -> tuple[Floats, Floats]:
        """Simulate one way to recompute in the first layers, up to each end.

        Return what it takes off at each instant, shape (ends, T), and the ms that it adds, shape (ends,).
        """
        off, costs = [np.zeros_like(live)], [0.0]
        for end in ends[1:]:
            trace = with_values(self._trace, set[str]().union(*self._again[way][:end]))
            off.append(live - live_at_nodes(trace))
            costs.append(max(costs[-1], trace.recomputed_ms))
        return np.stack(off), np.array(costs)


def live_at_nodes(trace: Trace) -> Floats:
    """Return the bytes at each node of the step without plans, those of recomputed nodes before it included."""
    sizes = lifetimes(trace).live
    # By order, not by name: ORT leaves nodes of a gradient graph unnamed (Llama's rotary embedding has some).
    kept = np.array([not node.recomputes for node in trace.nodes])
    # A copy's instants count at the node of the step that comes after it; a copy comes before a node that reads it.
    first = np.concatenate(([0], np.flatnonzero(kept)[:-1] + 1))
    return np.maximum.reduceat(sizes.astype(np.float64), first)


def _all_of_family(
    live: Floats, ways: Sequence[tuple[Floats, Floats]]
) -> Iterable[tuple[tuple[int, int, int], float, float]]:
    """Yield all plans: where each way ends, the peak, and the cost; what layers take off is added up."""
    (one, one_ms), (two, two_ms), (three, three_ms) = ways
    count = len(one_ms)
    for first in range(count):
        for second in range(first, count):
            left = live - one[first] - (two[second] - two[first])
            peaks = (left - (three[second:] - three[second])).max(axis=1)
            costs = one_ms[first] + two_ms[second] - two_ms[first] + three_ms[second:] - three_ms[second]
            for number, (peak, cost) in enumerate(zip(peaks, costs, strict=True)):
                yield (first, second, second + number), float(peak), float(cost)


def _undominated(plans: Iterable[tuple[float, float, _Plan]]) -> list[tuple[float, float, _Plan]]:
    """Return those of (peak, cost, plan) that no other one beats in both, the cheapest first."""
    found: list[tuple[float, float, _Plan]] = []
    for one in sorted(plans, key=lambda plan: (plan[1], plan[0])):
        if not found or one[0] < found[-1][0]:
            found.append(one)
    return found
