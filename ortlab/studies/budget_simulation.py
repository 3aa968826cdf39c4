"""A profiled step as a problem: what each place of each plan takes off, instant by instant, by simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from ortlab.memory.recompute import with_places
from ortlab.memory.trace import Lifetimes, lifetimes
from ortlab.studies.budget import Obstacle
from ortlab.studies.budget_problem import Choice, Problem

if TYPE_CHECKING:
    from ortlab.memory.recompute import RecomputePlace, RecomputePlaces
    from ortlab.memory.trace import Trace
    from ortlab.studies.budget_problem import Floats

_LEAST_SHARE: Final = 1e-4
_LEAST_BYTES: Final = 64 * 1024
"""What a plan must take off at some instant, of the peak and in bytes: a measurement does not show less."""

_LEVELS: Final = (1, 2)
"""Memory levels: all plans of transformer layers, without and with compromise."""


class SimulatedStep:
    """One profiled step without plans, which can be simulated with any.

    The trace has its nodes in the order that ORT gives to sessions with plans. `plain_bytes` is the simulated peak
    without plans in the order that a session without plans has; by default the trace's. `together` names plans that act
    only together, as ORT offers them: "A+:1,B+:1"; these are one choice more of `problem`.

    The instants of `problem` are the trace's nodes; what is recomputed counts at the node that follows. Plans that take
    next to nothing off at any instant are left out. `levels` holds, by memory level, the peak in bytes and the added
    ms, simulated; a level that recomputes what the one below does is left out.
    """

    def __init__(
        self,
        trace: Trace,
        places: RecomputePlaces,
        plain_bytes: float | None = None,
        together: Iterable[str] = (),
    ) -> None:
        self._trace = trace
        self._places = places
        live = lifetimes(trace).live.astype(np.float64)
        least = max(_LEAST_SHARE * live.max(), _LEAST_BYTES)
        names = _names(places)
        taken = {name: live - self._at_nodes(with_places(trace, places.of(name))) for name in names}
        worth = [name for name in names if taken[name].max() > least]
        both = [
            choice for choice in (self._pair(pair, live) for pair in together) if choice.savings.max() > least
        ]
        choices = (*(self._choice(name, live) for name in worth), *both)
        self.problem = Problem(live, choices, self._exclusive([choice.config for choice in choices]))
        plain = float(live.max()) if plain_bytes is None else plain_bytes
        self._peaks: dict[tuple[int, ...], float] = {self.problem.nothing: plain}
        sets = dict.fromkeys(places.at_level(level) for level in _LEVELS)
        self.levels: Mapping[int, tuple[float, float]] = {
            level: self._level(chosen) for level, chosen in enumerate(sets, start=1) if chosen
        }

    def peak(self, counts: Sequence[int]) -> float:
        """Return the highest bytes of the step, simulated with all the places together; known ones at once."""
        key = tuple(counts)
        if key not in self._peaks:
            self._peaks[key] = float(self._lifetimes(key)[1].peak)
        return self._peaks[key]

    def with_plans(self, plans: Iterable[str]) -> tuple[float, float]:
        """Return the peak in bytes and the added ms of plans as options take them, "Gelu+:1:3"."""
        chosen: dict[RecomputePlace, None] = {}
        for plan in plans:
            name, count = plan.rsplit(":", 1)
            places = self._places.of(name)
            chosen |= dict.fromkeys(places if int(count) < 0 else places[: int(count)])
        return self._level(chosen)

    def _level(self, places: Iterable[RecomputePlace]) -> tuple[float, float]:
        trace = with_places(self._trace, places)
        return float(lifetimes(trace).peak), trace.recomputed_ms

    def obstacle(self, counts: Sequence[int], level: int = 0) -> Obstacle:
        """Return the highest instant with these plans or a memory level, and what lives there; bytes as simulated."""
        if level:
            trace = with_places(self._trace, self._places.at_level(level))
            found = lifetimes(trace)
        else:
            trace, found = self._lifetimes(counts)
        at = found.peak_at
        node = trace.nodes[at]
        phase = "the backward" if node.backward else "the forward"
        what = f"{node.operator} ({node.name})" if node.name else node.operator
        live = tuple((buffer.value, buffer.size) for buffer in found.at(at) if buffer.size)
        return Obstacle(f"{phase}, where {what} runs", float(found.peak), live)

    def _lifetimes(self, counts: Sequence[int]) -> tuple[Trace, Lifetimes]:
        chosen = {
            place: None  # plans that act together may name a place that another names as well
            for choice, count in zip(self.problem.choices, counts, strict=True)
            for place in self._some_of(choice.config, count)
        }
        trace = with_places(self._trace, chosen)
        return trace, lifetimes(trace)

    def _some_of(self, config: str, count: int) -> list[RecomputePlace]:
        """Return the first places of a plan; of plans that act together all or none."""
        places = self._all_of(config)
        return places if "," in config and count else places[:count]

    def _all_of(self, config: str) -> list[RecomputePlace]:
        return [place for name in config.split(",") for place in self._places.of(name)]

    def _pair(self, config: str, live: Floats) -> Choice:
        trace = with_places(self._trace, self._all_of(config))
        saved = live - self._at_nodes(trace)
        return Choice(config, saved[None, :], np.array([trace.recomputed_ms]))

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
        nodes = [{place.node for place in self._all_of(name)} for name in names]
        return tuple(pair for pair in combinations(range(len(names)), 2) if nodes[pair[0]] & nodes[pair[1]])


def _names(places: RecomputePlaces) -> list[str]:
    return list(dict.fromkeys(f"{place.cluster}:{place.strategy}" for place in places.places))
