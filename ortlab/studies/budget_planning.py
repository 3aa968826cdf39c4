"""From a request to a budget: plans are chosen by simulation, run, and chosen again if what was measured misses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from ortlab.studies.budget import Budget, Compared, Device, Obstacle, PlanTrial, Prediction, Solver
from ortlab.studies.budget_request import counted
from ortlab.studies.budget_search import Simulated, by_hand, choose

if TYPE_CHECKING:
    from ortlab.studies.budget_request import Request
    from ortlab.studies.budget_search import Choice

TRIALS: Final = 3
"""How often plans are chosen and run before those that a person would tick and the memory levels are run as well."""

CURVE_POINTS: Final = 12
"""Budgets that are predicted between none and the floor."""

_MARGIN: Final = 0.01
"""Share of step memory that is kept free where that is possible: a simulation is off by so much."""

_CURVE_TIME_S: Final = 0.25
"""Seconds for the solver at each point of the curve."""


class Explained(Simulated, Protocol):
    """A simulated step that can say what its peak is made of."""

    def obstacle(self, counts: Sequence[int], level: int = 0) -> Obstacle:
        """Return the highest instant with these plans, and what lives there; bytes as simulated."""


@dataclass(frozen=True)
class Ground:
    """What is known of a step before plans are chosen; bytes are above the start of the step."""

    model: str
    step: Explained
    without: Compared  # as measured
    within_bytes: float  # measured peak of forward and backward, which plans can lower
    beyond_bytes: float  # measured peak of the other phases, such as the optimizer's step: no plan gets below
    kind: str  # what the bytes are of
    device: str
    held_bytes: int = 0  # what the process or device holds at the start of the step

    @property
    def simulated_bytes(self) -> float:
        """The simulated peak without plans, in the order that a session without plans has."""
        return self.step.peak(self.step.problem.nothing)

    def predicted(self, simulated_bytes: float) -> float:
        """Return the step memory, in bytes, for a simulated peak."""
        return max(self.within_bytes - self.simulated_bytes + simulated_bytes, self.beyond_bytes)

    def to_simulate(self, limit: float) -> float:
        """Return what may be simulated at most for a limit of step memory, in bytes."""
        return limit - self.within_bytes + self.simulated_bytes

    def prediction(self, choice: Choice) -> Prediction:
        """Write down what was chosen as options take it."""
        if choice.level:
            return Prediction((), self.predicted(choice.peak_bytes), choice.cost_ms, choice.level)
        return self.of_counts(choice.counts)

    def of_counts(self, counts: Sequence[int]) -> Prediction:
        """Write down plans as options take them."""
        problem = self.step.problem
        plans = counted(
            [one.config for one in problem.choices], counts, [one.places for one in problem.choices]
        )
        return Prediction(plans, self.predicted(self.step.peak(counts)), problem.cost_ms(counts))


Run = Callable[[Prediction], int]
"""Runs the step with plans and returns its measured step memory in bytes."""


def answer(
    ground: Ground,
    request: Request,
    run: Run | None,
    tell: Callable[[str], None],
    *,
    curve: bool = True,
) -> Budget:
    """Find the plans for a request and verify them; only predict if `run` is None. The budget is not applied yet."""
    needed = ground.without.step_memory_bytes
    limit = request.limit(needed, ground.held_bytes)
    tell("Choosing plans")
    chosen = _chosen(ground, limit)
    lowest = choose(ground.step, min(ground.to_simulate(0.0), 0.0))
    first, floor = ground.prediction(chosen), ground.prediction(lowest)
    trials: list[PlanTrial] = []
    if run is not None and ground.step.problem.choices and limit < needed:
        trials = _verified(ground, limit, first, run, tell)
        if all(trial.step_memory_bytes > limit for trial in trials):
            trials += _closest(ground, limit, floor, trials, run, tell)
    met = limit >= needed or any(trial.step_memory_bytes <= limit for trial in trials)
    return Budget(
        model=ground.model,
        asked=request.asked,
        limit_bytes=limit,
        kind=ground.kind,
        without=ground.without,
        prediction=first,
        floor=floor,
        solver=_solver(ground, chosen),
        trials=tuple(trials),
        obstacle=None if met or first.step_memory_bytes <= limit else _obstacle(ground, lowest),
        curve=_curve(ground, lowest, tell) if curve else (),
        whole_device=Device(request.device_bytes, ground.held_bytes) if request.device_bytes else None,
        device=ground.device,
    )


def _chosen(ground: Ground, limit: float) -> Choice:
    """Choose for a little less than the limit, for all of it where less cannot be had, and nothing if all fits."""
    needed = ground.without.step_memory_bytes
    if limit >= needed:
        return choose(ground.step, max(ground.to_simulate(limit), ground.simulated_bytes))
    careful = choose(ground.step, ground.to_simulate(limit - _MARGIN * needed))
    return careful if careful.fits else choose(ground.step, ground.to_simulate(limit))


def _verified(
    ground: Ground, limit: int, prediction: Prediction, run: Run, tell: Callable[[str], None]
) -> list[PlanTrial]:
    """Run the plans; where they miss, ask for as much less as the prediction was too low."""
    trials: list[PlanTrial] = []
    too_low = 0.0
    while len(trials) < TRIALS and (prediction.plans or prediction.memory_level):
        tell(f"Verifying, trial {len(trials) + 1}")
        measured = run(prediction)
        trials.append(PlanTrial(prediction, measured))
        too_low = max(too_low, measured - prediction.step_memory_bytes)
        if measured <= limit:
            break
        tell("Choosing plans that take more off")
        prediction = ground.prediction(_chosen(ground, limit - too_low))
        if any(trial.prediction.switches == prediction.switches for trial in trials):
            break
    return trials


def _closest(
    ground: Ground,
    limit: int,
    floor: Prediction,
    trials: Sequence[PlanTrial],
    run: Run,
    tell: Callable[[str], None],
) -> list[PlanTrial]:
    """Run what else may come closest, until something fits, and return these trials.

    It tries the lowest simulated peak, what a person would tick from the largest saving on, and the memory levels: the
    simulation is off by a per cent or two, so only a measurement tells which of them needs least.
    """
    step, found = ground.step, list(trials)
    ticked = min(by_hand(step), key=step.peak, default=None)
    candidates = [("lowest", floor)]
    if ticked is not None:
        candidates.append(("by hand", ground.of_counts(ticked)))
    candidates += [
        (f"memory_level={level}", Prediction((), ground.predicted(peak), cost, level))
        for level, (peak, cost) in step.levels.items()
    ]
    for why, prediction in candidates:
        if any(trial.prediction.switches == prediction.switches for trial in found):
            continue
        tell(f"Looking for the closest: {why}")
        found.append(PlanTrial(prediction, run(prediction), why))
        if found[-1].step_memory_bytes <= limit:
            break
    return found[len(trials) :]


def _obstacle(ground: Ground, lowest: Choice) -> Obstacle:
    """Say what keeps memory up: what lives at the simulated peak, or a phase that plans cannot lower."""
    if ground.predicted(lowest.peak_bytes) <= ground.beyond_bytes:
        return Obstacle("the optimizer's step or another phase that no plan acts on", ground.beyond_bytes)
    found = ground.step.obstacle(lowest.counts, lowest.level)
    return Obstacle(found.where, ground.predicted(found.bytes), found.live)


def _curve(ground: Ground, lowest: Choice, tell: Callable[[str], None]) -> tuple[Prediction, ...]:
    """Predict budgets between none and the floor, each point once; none that needs more memory and more time."""
    tell("Predicting other budgets")
    top, bottom = ground.simulated_bytes, lowest.peak_bytes
    points = [Prediction((), ground.predicted(top), 0.0), ground.prediction(lowest)]
    points += [
        ground.prediction(choose(ground.step, float(limit), time_limit_s=_CURVE_TIME_S))
        for limit in np.linspace(top, bottom, CURVE_POINTS + 1)[1:-1]
    ]
    front: list[Prediction] = []
    for point in sorted(points, key=lambda one: (one.cost_ms, one.step_memory_bytes)):
        if not front or point.step_memory_bytes < front[-1].step_memory_bytes:
            front.append(point)
    return tuple(front)


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
