"""A profiled step as a problem: what each place of each plan takes off, instant by instant, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from ortlab.budgets.budget import Obstacle
from ortlab.budgets.problem import Choice, Problem
from ortlab.memory.lifetimes import Lifetimes, lifetimes
from ortlab.memory.recompute import with_places

if TYPE_CHECKING:
    from ortlab.budgets.problem import Floats
    from ortlab.memory.recompute_places import RecomputePlaces
    from ortlab.memory.trace import Trace

_LEAST_SHARE: Final = 1e-4
_LEAST_BYTES: Final = 64 * 1024
"""What a plan has to take off at some instant, of the peak and in bytes: less cannot be seen when it is measured."""


class SimulatedStep:
    """One step without plans, as profiled, which can be simulated with any.

    Parameters
    ----------
    trace
        The step, its nodes in the order that ORT gives to sessions with plans.
    places
        The places of its plans.

    Attributes
    ----------
    problem
        The choice of plans. Its instants are the trace's nodes; what is recomputed counts at the node that follows.
        Plans that take next to nothing off at any instant are left out.
    """

    def __init__(self, trace: Trace, places: RecomputePlaces) -> None:
        self._trace = trace
        self._places = places
        live = lifetimes(trace).live.astype(np.float64)
        least = max(_LEAST_SHARE * live.max(), _LEAST_BYTES)
        worth = [name for name in _names(places) if self._takes_off(name, live) > least]
        choices = tuple(self._choice(name, live) for name in worth)
        self.problem = Problem(live, choices, self._exclusive(worth))

    def peak(self, counts: Sequence[int]) -> float:
        """Return the highest bytes of the step, simulated with all the places together."""
        return float(self._lifetimes(counts)[1].peak)

    def obstacle(self, counts: Sequence[int]) -> Obstacle:
        """Return the highest instant with these plans, and what lives there; bytes as simulated."""
        trace, found = self._lifetimes(counts)
        at = found.peak_at
        node = trace.nodes[at]
        phase = "the backward" if node.backward else "the forward"
        what = f"{node.operator} ({node.name})" if node.name else node.operator
        live = tuple((buffer.value, buffer.size) for buffer in found.at(at) if buffer.size)
        return Obstacle(f"{phase}, where {what} runs", float(found.peak), live)

    def _lifetimes(self, counts: Sequence[int]) -> tuple[Trace, Lifetimes]:
        chosen = [
            place
            for choice, count in zip(self.problem.choices, counts, strict=True)
            for place in self._places.of(choice.config)[:count]
        ]
        trace = with_places(self._trace, chosen)
        return trace, lifetimes(trace)

    def _takes_off(self, name: str, live: Floats) -> float:
        """Return the most bytes that a plan in all its places takes off at any instant."""
        everywhere = self._at_nodes(with_places(self._trace, self._places.of(name)))
        return float((live - everywhere).max())

    def _choice(self, name: str, live: Floats) -> Choice:
        """Simulate a plan in one place, in two, and so on: what each further place takes off and adds."""
        places = self._places.of(name)
        lives, costs = [live], [0.0]
        for count in range(1, len(places) + 1):
            trace = with_places(self._trace, places[:count])
            lives.append(self._at_nodes(trace))
            costs.append(trace.recomputed_ms)
        added = np.maximum(np.diff(costs), 0.0)
        return Choice(name, -np.diff(np.stack(lives), axis=0), added)

    def _at_nodes(self, trace: Trace) -> Floats:
        """Return the bytes at each node of the step without plans, those of recomputed nodes before it included."""
        sizes = lifetimes(trace).live
        # By order, not by name: ORT leaves nodes of a gradient graph unnamed (Llama's rotary embedding has some).
        kept = np.array([not node.recomputes for node in trace.nodes])
        # A copy's instants count at the node of the step that comes after it; a copy comes before a node that reads it.
        first = np.concatenate(([0], np.flatnonzero(kept)[:-1] + 1))
        return np.maximum.reduceat(sizes.astype(np.float64), first)

    def _exclusive(self, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Pair plans that recompute the same node: one of them at most acts there."""
        nodes = [{place.node for place in self._places.of(name)} for name in names]
        return tuple(pair for pair in combinations(range(len(names)), 2) if nodes[pair[0]] & nodes[pair[1]])


def _names(places: RecomputePlaces) -> list[str]:
    return list(dict.fromkeys(f"{place.cluster}:{place.strategy}" for place in places.places))
