"""Which plans to choose for a budget, as a problem over the instants of one step; a profiled step makes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from ortlab.memory.layer_planner import live_at_nodes
from ortlab.memory.recompute import with_places
from ortlab.memory.trace import Lifetimes, lifetimes
from ortlab.studies.budget import Obstacle, Setting

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortlab.memory.layer_planner import LayerPlanner
    from ortlab.memory.recompute import RecomputePlace, RecomputePlaces
    from ortlab.memory.trace import Trace

    Floats = NDArray[np.float64]

TOLERANCE: Final = 1.0
"""Bytes by which a peak may miss a budget and still fit: solvers calculate with floating-point numbers."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One plan, in its places; a count of k switches on the first k of them, as ONNX Runtime does."""

    config: str  # without its count: "Gelu+:1"
    # Shape (k, T): bytes that each place takes off at each instant; negative where what is recomputed lives, or inputs
    # are kept for longer.
    savings: Floats
    cost_ms: Floats  # shape (k,): what each place adds to a step

    @property
    def places(self) -> int:
        """In how many places it can be switched on."""
        return len(self.cost_ms)


@dataclass(frozen=True, eq=False)
class Problem:
    """The memory of a step over time, and the plans that can lower it."""

    # What places save is taken to add up. Where it does not, the solution is simulated as a whole and the budget
    # tightened (see `ortlab.studies.budget_search`).

    live: Floats  # shape (T,): bytes at each instant of the step without plans
    choices: tuple[Choice, ...]
    # Positions in `choices`, in groups of which at most one can be on: ways to recompute the same activations.
    exclusive: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a wrong shape, a value that is not finite, or a negative cost."""
        for choice in self.choices:
            if choice.savings.shape != (choice.places, len(self.live)):
                message = f"{choice.config}: savings of shape {choice.savings.shape}"
                raise ValueError(message)
            if not (np.isfinite(choice.savings).all() and (choice.cost_ms >= 0).all()):
                message = f"{choice.config}: a saving that is not finite, or a cost below zero"
                raise ValueError(message)
        if not (len(self.live) and np.isfinite(self.live).all()):
            raise ValueError("a problem needs the bytes of an instant at least, and finite ones")

    @property
    def nothing(self) -> tuple[int, ...]:
        """Counts with which no plan is on."""
        return (0,) * len(self.choices)

    @cached_property
    def totals(self) -> tuple[Floats, ...]:
        """By choice, shape (k + 1, T): bytes that the first 0, 1, ..., k places take off."""
        return tuple(
            np.vstack([np.zeros((1, len(self.live))), np.cumsum(choice.savings, axis=0)])
            for choice in self.choices
        )

    @cached_property
    def costs(self) -> tuple[Floats, ...]:
        """By choice, shape (k + 1,): ms that the first 0, 1, ..., k places add."""
        return tuple(np.concatenate([[0.0], np.cumsum(choice.cost_ms)]) for choice in self.choices)

    @cached_property
    def rise(self) -> Floats:
        """The most bytes that a single place adds at each instant, shape (T,)."""
        rise: Floats = -self._stacked().min(axis=0, initial=0.0)
        return rise

    def live_with(self, counts: Sequence[int]) -> Floats:
        """Return the bytes at each instant, shape (T,), with the first places of each choice switched on."""
        live = self.live.copy()
        for total, count in zip(self.totals, counts, strict=True):
            if count:
                live -= total[count]
        return live

    def peak(self, counts: Sequence[int]) -> float:
        """Return the most bytes at any instant."""
        return float(self.live_with(counts).max())

    def cost_ms(self, counts: Sequence[int]) -> float:
        """Return what the places add to a step, in ms."""
        return float(sum(cost[count] for cost, count in zip(self.costs, counts, strict=True)))

    def allowed(self, counts: Sequence[int]) -> bool:
        """Say whether at most one choice of each group is on."""
        return all(sum(counts[choice] > 0 for choice in group) <= 1 for group in self.exclusive)

    def fits(self, counts: Sequence[int], limit: float) -> bool:
        """Say whether the peak is within a limit in bytes."""
        return self.peak(counts) <= limit + TOLERANCE

    def reduced(self, limit: float) -> Problem:
        """Leave out instants that decide nothing: those that cannot exceed the limit, and those that others cover."""
        # An instant covers another if it holds no less, and no place takes more off it. Each is held against the last
        # that was kept: buffers come and go one by one, so what covers an instant is mostly beside it. The limit is in
        # bytes; minus infinity keeps every instant that any limit may meet.
        savings = self._stacked()
        worst = self.live - np.minimum(savings, 0.0).sum(axis=0)
        kept: list[int] = []
        for instant in map(int, np.flatnonzero(worst > limit)):
            while kept and _covers(self.live, savings, instant, kept[-1]):
                kept.pop()
            if not (kept and _covers(self.live, savings, kept[-1], instant)):
                kept.append(instant)
        # Where nothing can exceed the limit, one instant is left: the highest, so that peaks stay what they are.
        chosen = kept or [int(self.live.argmax())]
        choices = tuple(
            Choice(choice.config, choice.savings[:, chosen], choice.cost_ms) for choice in self.choices
        )
        return Problem(self.live[chosen], choices, self.exclusive)

    def _stacked(self) -> Floats:
        if not self.choices:
            return np.zeros((0, len(self.live)))
        return np.vstack([choice.savings for choice in self.choices])


def _covers(live: Floats, savings: Floats, one: int, other: int) -> bool:
    return bool(live[one] >= live[other] and (savings[:, one] <= savings[:, other]).all())


@dataclass(frozen=True)
class Solution:
    """What a solver chose."""

    counts: tuple[int, ...]  # by choice: how many of its first places are on
    cost_ms: float
    peak_bytes: float  # where what places save is added up
    limit_bytes: float
    method: str  # "exact" or "greedy"
    bound_ms: float  # no allowed counts within the limit cost less; nan where the solver does not know
    proven: bool  # that nothing is cheaper or, where it does not fit, that nothing has a lower peak
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit; otherwise these counts come closest."""
        return self.peak_bytes <= self.limit_bytes + TOLERANCE

    @property
    def gap(self) -> float:
        """Share of the cost that a better solution could at most save; nan where nobody knows."""
        if self.cost_ms <= self.bound_ms:
            return 0.0
        return (self.cost_ms - self.bound_ms) / self.cost_ms if self.cost_ms else math.nan


def solution(
    problem: Problem,
    counts: Sequence[int],
    limit: float,
    method: str,
    *,
    bound_ms: float,
    proven: bool,
    seconds: float,
) -> Solution:
    """Return counts with what they cost and the peak that they leave."""
    return Solution(
        tuple(int(count) for count in counts),
        problem.cost_ms(counts),
        problem.peak(counts),
        limit,
        method,
        bound_ms,
        proven,
        seconds,
    )


_LEAST_SHARE: Final = 1e-4
_LEAST_BYTES: Final = 64 * 1024
"""What a plan must take off at some instant, of the peak and in bytes: a measurement does not show less."""

_LEVELS: Final = (1, 2)
"""Memory levels: all plans of transformer layers, without and with compromise."""


class SimulatedStep:
    """One profiled step without plans, which can be simulated with any."""

    # The trace has its nodes in the order that ORT gives to sessions with plans. `plain_bytes` is the simulated peak
    # without plans in the order that a session without plans has; by default the trace's. `together` names plans that
    # act only together, as ORT offers them: "A+:1,B+:1"; these are one choice more of `problem`. The instants of
    # `problem` are the trace's nodes; what is recomputed counts at the node that follows. Plans that take next to
    # nothing off at any instant are left out. `settings` holds the peak in bytes and the added ms, simulated, of memory
    # levels and of layers that the switch `recompute` names; a level that recomputes what the one below does is left
    # out.

    def __init__(
        self,
        trace: Trace,
        places: RecomputePlaces,
        plain_bytes: float | None = None,
        together: Iterable[str] = (),
        layers: LayerPlanner | None = None,
    ) -> None:
        self.trace = trace
        self._places = places
        live = lifetimes(trace).live.astype(np.float64)
        least = max(_LEAST_SHARE * live.max(), _LEAST_BYTES)
        names = _names(places)
        taken = {name: live - live_at_nodes(with_places(trace, places.of(name))) for name in names}
        worth = [name for name in names if taken[name].max() > least]
        both = [
            choice for choice in (self._pair(pair, live) for pair in together) if choice.savings.max() > least
        ]
        choices = (*(self._choice(name, live) for name in worth), *both)
        self.problem = Problem(live, choices, self._exclusive([choice.config for choice in choices]))
        plain = float(live.max()) if plain_bytes is None else plain_bytes
        self._peaks: dict[tuple[int, ...], float] = {self.problem.nothing: plain}
        sets = dict.fromkeys(places.at_level(level) for level in _LEVELS)
        self.settings: dict[Setting, tuple[float, float]] = {
            Setting(level): self._level(chosen) for level, chosen in enumerate(sets, start=1) if chosen
        }
        self._layers = layers
        self._ranges = {}
        for plan in () if layers is None else layers.front():
            if plan.ranges:
                setting = Setting(recompute=plan.words)
                self._ranges[setting] = plan.ranges
                self.settings[setting] = (plan.peak_bytes, plan.cost_ms)
        self._in_blocks: SimulatedStep | None = None
        self.held_less = 0  # bytes of what the step holds to its end, and not with its loss in blocks
        self.no_blocks = ""  # why a loss in blocks of rows is not offered

    def offer(self, in_blocks: SimulatedStep) -> None:
        """Offer settings of the same step with its loss in blocks of rows."""
        # What that adds is the time of the nodes that it has, less that of the nodes in whose place they are; times of
        # nodes in both steps differ by what the machine did meanwhile.
        self._in_blocks = in_blocks
        self.held_less = max(_held(self.trace) - _held(in_blocks.trace), 0)
        ours, theirs = ({node.name: node.ms for node in step.trace.nodes} for step in (self, in_blocks))
        added_ms = sum(ms for name, ms in theirs.items() if name not in ours)
        added_ms = max(added_ms - sum(ms for name, ms in ours.items() if name not in theirs), 0.0)
        alone = {Setting(): (in_blocks.peak(in_blocks.problem.nothing), 0.0)}
        self.settings |= {
            replace(setting, chunked_loss=True): (peak, cost_ms + added_ms)
            for setting, (peak, cost_ms) in (alone | in_blocks.settings).items()
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
        trace = with_places(self.trace, places)
        return float(lifetimes(trace).peak), trace.recomputed_ms

    def obstacle(self, counts: Sequence[int], setting: Setting | None = None) -> Obstacle:
        """Return the highest instant with these plans or a setting, and what lives there; bytes as simulated."""
        if setting is not None and setting.chunked_loss and self._in_blocks is not None:
            step, inner = self._in_blocks, replace(setting, chunked_loss=False)
            return step.obstacle(step.problem.nothing, inner if inner in step.settings else None)
        if setting is not None:
            trace = (
                self._layers.trace(self._ranges[setting])
                if self._layers is not None and setting.recompute
                else with_places(self.trace, self._places.at_level(setting.memory_level))
            )
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
        trace = with_places(self.trace, chosen)
        return trace, lifetimes(trace)

    def _some_of(self, config: str, count: int) -> list[RecomputePlace]:
        """Return the first places of a plan; of plans that act together all or none."""
        places = self._all_of(config)
        return places if "," in config and count else places[:count]

    def _all_of(self, config: str) -> list[RecomputePlace]:
        return [place for name in config.split(",") for place in self._places.of(name)]

    def _pair(self, config: str, live: Floats) -> Choice:
        trace = with_places(self.trace, self._all_of(config))
        saved = live - live_at_nodes(trace)
        return Choice(config, saved[None, :], np.array([trace.recomputed_ms]))

    def _choice(self, name: str, live: Floats) -> Choice:
        """Simulate a plan in one place, in two, and so on: what each further place takes off and adds."""
        places = self._places.of(name)
        lives, costs = [live], [0.0]
        for count in range(1, len(places) + 1):
            trace = with_places(self.trace, places[:count])
            lives.append(live_at_nodes(trace))
            costs.append(trace.recomputed_ms)
        added = np.maximum(np.diff(costs), 0.0)
        return Choice(name, -np.diff(np.stack(lives), axis=0), added)

    def _exclusive(self, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Pair plans that recompute the same node: one of them at most acts there."""
        nodes = [{place.node for place in self._all_of(name)} for name in names]
        return tuple(pair for pair in combinations(range(len(names)), 2) if nodes[pair[0]] & nodes[pair[1]])


def _held(trace: Trace) -> int:
    return sum(trace.sizes.get(name, 0) for name in trace.held)


def _names(places: RecomputePlaces) -> list[str]:
    return list(dict.fromkeys(f"{place.cluster}:{place.strategy}" for place in places.places))
