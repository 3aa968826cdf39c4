"""From a request to a budget: plans are chosen by simulation, run, and chosen again if what was measured misses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from ortlab.budgets.budget import Budget, Compared, Obstacle, PlanTrial, Prediction, Solver
from ortlab.budgets.request import counted
from ortlab.budgets.search import Simulated, choose

if TYPE_CHECKING:
    from ortlab.budgets.request import Request
    from ortlab.budgets.search import Choice

TRIALS: Final = 3
"""How often plans are run before a budget counts as missed."""

CURVE_POINTS: Final = 12
"""Budgets that are predicted between none and the floor."""

_MARGIN: Final = 0.002
"""Share of the peak that is kept free: a process's level differs by a MiB or two between measurements."""

_CURVE_TIME_S: Final = 0.25
"""Seconds for the solver at each point of the curve."""


class Explained(Simulated, Protocol):
    """A simulated step that can say what its peak is made of."""

    def obstacle(self, counts: Sequence[int]) -> Obstacle:
        """Return the highest instant with these plans, and what lives there; bytes as simulated."""


@dataclass(frozen=True)
class Ground:
    """What is known of a step before plans are chosen.

    Attributes
    ----------
    model
        What the lab calls the model.
    step
        What can be simulated.
    without
        The step without plans, as measured.
    within_bytes
        Measured peak of the phases that plans can lower, forward and backward.
    beyond_bytes
        Measured peak of the others, such as the optimizer's step: no plan gets below.
    kind, device
        What the bytes are of, and where.
    order_bytes
        How much higher the simulated peak without plans is in the order that ORT gives to sessions with plans.
    """

    model: str
    step: Explained
    without: Compared
    within_bytes: float
    beyond_bytes: float
    kind: str
    device: str
    order_bytes: float = 0.0

    @property
    def simulated_bytes(self) -> float:
        """The simulated peak without plans, in the order that a session without plans has."""
        return float(self.step.problem.live.max()) - self.order_bytes

    def predicted(self, simulated_bytes: float) -> float:
        """Return the peak of the process, in bytes, for a simulated one."""
        return max(self.within_bytes - self.simulated_bytes + simulated_bytes, self.beyond_bytes)

    def to_simulate(self, limit: float) -> float:
        """Return what may be simulated at most for a limit of the process, in bytes."""
        return limit - self.within_bytes + self.simulated_bytes

    def prediction(self, choice: Choice) -> Prediction:
        """Write down plans as options take them."""
        problem = self.step.problem
        plans = counted(
            [one.config for one in problem.choices], choice.counts, [one.places for one in problem.choices]
        )
        return Prediction(plans, self.predicted(choice.peak_bytes), choice.cost_ms)


def answer(
    ground: Ground,
    request: Request,
    run: Callable[[tuple[str, ...]], Compared] | None,
    tell: Callable[[str], None],
    *,
    curve: bool = True,
) -> Budget:
    """Find the plans for a request and verify them.

    Parameters
    ----------
    ground
        What is known of the step.
    request
        What was asked for.
    run
        Runs the step with plans and returns what was measured; None to predict only.
    tell
        Told what is going on.
    curve
        Whether to predict other budgets as well.

    Returns
    -------
    Budget
        With `applied` False.
    """
    limit = request.limit(ground.without.peak_bytes)
    tell("Choosing plans")
    chosen = _chosen(ground, limit)
    first = ground.prediction(chosen)
    lowest = _lowest(ground, chosen)
    trials: list[PlanTrial] = []
    if run is not None and first.plans and limit < ground.without.peak_bytes:
        trials = _verified(ground, limit, first, run, tell)
    met = limit >= ground.without.peak_bytes or any(trial.peak_bytes <= limit for trial in trials)
    return Budget(
        model=ground.model,
        asked=request.asked,
        limit_bytes=limit,
        kind=ground.kind,
        without=ground.without,
        prediction=first,
        floor=ground.prediction(lowest),
        solver=_solver(ground, chosen),
        trials=tuple(trials),
        obstacle=None if met or first.peak_bytes <= limit else _obstacle(ground, lowest),
        curve=_curve(ground, lowest, tell) if curve else (),
        device=ground.device,
    )


def _chosen(ground: Ground, limit: float) -> Choice:
    """Choose for a little less than the limit, for all of it where less cannot be had, and nothing if all fits."""
    if limit >= ground.without.peak_bytes:
        return choose(ground.step, max(ground.to_simulate(limit), ground.simulated_bytes))
    careful = choose(ground.step, ground.to_simulate(limit - _MARGIN * ground.without.peak_bytes))
    return careful if careful.fits else choose(ground.step, ground.to_simulate(limit))


def _verified(
    ground: Ground,
    limit: int,
    prediction: Prediction,
    run: Callable[[tuple[str, ...]], Compared],
    tell: Callable[[str], None],
) -> list[PlanTrial]:
    """Run the plans; where the measured peak misses, ask for as much less as the prediction was too low."""
    trials: list[PlanTrial] = []
    too_low = 0.0
    while len(trials) < TRIALS:
        tell(f"Verifying, trial {len(trials) + 1} of at most {TRIALS}")
        measured = run(prediction.plans)
        trials.append(PlanTrial(prediction, measured.peak_bytes))
        too_low = max(too_low, measured.peak_bytes - prediction.peak_bytes)
        if measured.peak_bytes <= limit:
            break
        tell("Choosing plans that take more off")
        prediction = ground.prediction(_chosen(ground, limit - too_low))
        if any(trial.prediction.plans == prediction.plans for trial in trials):
            break
    return trials


def _lowest(ground: Ground, chosen: Choice) -> Choice:
    """Find the plans with the lowest simulated peak."""
    tightest = chosen if not chosen.fits else choose(ground.step, 0.0)
    return min(chosen, tightest, key=lambda one: one.peak_bytes)


def _obstacle(ground: Ground, lowest: Choice) -> Obstacle:
    """Say what keeps the peak up: what lives at the simulated peak, or a phase that plans cannot lower."""
    if ground.predicted(lowest.peak_bytes) <= ground.beyond_bytes:
        return Obstacle("the optimizer's step or another phase that no plan acts on", ground.beyond_bytes)
    found = ground.step.obstacle(lowest.counts)
    return Obstacle(found.where, ground.predicted(found.bytes), found.live)


def _curve(ground: Ground, lowest: Choice, tell: Callable[[str], None]) -> tuple[Prediction, ...]:
    """Predict budgets between none and the floor, each point once."""
    tell("Predicting other budgets")
    top, floor = ground.simulated_bytes, lowest.peak_bytes
    points: dict[tuple[str, ...], Prediction] = {(): Prediction((), ground.predicted(top), 0.0)}
    for limit in np.linspace(top, floor, CURVE_POINTS + 1)[1:-1]:
        found = ground.prediction(choose(ground.step, float(limit), time_limit_s=_CURVE_TIME_S))
        points.setdefault(found.plans, found)
    last = ground.prediction(lowest)
    points.setdefault(last.plans, last)
    return tuple(sorted(points.values(), key=lambda one: -one.peak_bytes))


def _solver(ground: Ground, chosen: Choice) -> Solver:
    problem, solved, quick = ground.step.problem, chosen.solved, chosen.quick
    return Solver(
        plans=len(problem.choices),
        places=sum(choice.places for choice in problem.choices),
        instants=len(problem.live),
        cost_ms=solved.cost_ms,
        greedy_cost_ms=quick.cost_ms if quick.fits else None,
        gap=None if math.isnan(solved.gap) else solved.gap,
        proven=solved.proven,
        seconds=chosen.seconds,
    )
