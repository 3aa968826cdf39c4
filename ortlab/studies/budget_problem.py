"""Which plans to choose for a budget, as a problem over the instants of one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    """The memory of a step over time, and the plans that can lower it.

    What places save is taken to add up. Where it does not, the solution is simulated as a whole and the budget
    tightened (see `ortlab.studies.budget_search`).
    """

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
        """Leave out instants that decide nothing: those that cannot exceed the limit, and those that others cover.

        An instant covers another if it holds no less, and no place takes more off it. Each is held against the last
        that was kept: buffers come and go one by one, so what covers an instant is mostly beside it. The limit is in
        bytes; minus infinity keeps every instant that any limit may meet.
        """
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
