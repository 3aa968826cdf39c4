"""The search for the plans of a budget: solved, simulated, run, and chosen again if what was measured misses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ortlab.errors import BuildError, ExecutionError
from ortlab.studies.budget import (
    Budget,
    Compared,
    Device,
    FailedTrial,
    Obstacle,
    PlanTrial,
    Prediction,
    Setting,
    Solver,
)
from ortlab.studies.budget_problem import TOLERANCE, Choice, Problem
from ortlab.studies.budget_solvers import TIME_LIMIT_S, solve_exactly, solve_quickly

if TYPE_CHECKING:
    from ortlab.studies.budget_problem import SimulatedStep, Solution
    from ortlab.studies.budget_run import Request

ROUNDS: Final = 6
"""How often a limit is tightened or loosened by what the simulation says."""

DESCENT_S: Final = 3.0
"""Seconds for the search for the lowest simulated peak; a later one gets further, since simulated peaks are kept."""

_TRIED: Final = 24
"""How many chosen plans are looked at for places that are spare, those whose last place costs most first."""

_DIFFERS: Final = 0.02
"""Share of a peak by which the simulation may differ from what savings add up to; beyond, plans spoil one another."""

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Chosen:
    """What was chosen for a limit."""

    counts: Counts  # by choice of the problem: how many of its first places are on
    cost_ms: float  # predicted
    peak_bytes: float  # simulated with all of them together
    limit_bytes: float
    solved: Solution  # of the exact solver, in the round that this comes from, or in the last
    quick: Solution  # of the greedy solver, asked the same
    seconds: float  # of all rounds, simulations included
    setting: Setting | None = None  # what is chosen instead of plans

    @property
    def fits(self) -> bool:
        """Whether the simulated peak is within the limit; otherwise this comes closest of what was tried."""
        return self.peak_bytes <= self.limit_bytes + TOLERANCE


def choose(step: SimulatedStep, limit: float, *, time_limit_s: float = TIME_LIMIT_S) -> Chosen:
    """Find the plans that cost least and fit within a limit in bytes when simulated together."""
    # Plans influence one another: what one recomputes, another may keep alive, and a chain that is recomputed from the
    # start of the model lives all at once. So what the solver chooses is simulated, the solver's limit is moved by how
    # much the simulation differs, and it is asked again, a few times; where they differ much, also with those plans
    # only that the lowest simulated peak has. What a person would tick, largest saving first, the memory levels, and
    # layers that ortlab recomputes stand beside it. What is spare in the cheapest that fits is then taken back.
    # `time_limit_s` limits the solver's rounds with all plans and, once more, those with the plans of the lowest peak.
    # If nothing fits, the choice is the lowest simulated peak that was found.
    started = time.perf_counter()
    problem = step.problem
    solved = _rounds(step, problem, limit, time_limit_s)
    spoilt = any(abs(step.peak(one.counts) - one.peak_bytes) > _DIFFERS * one.peak_bytes for one in solved)
    bottom = lowest_counts(step)
    if spoilt and limit >= step.peak(bottom):
        solved += _rounds(step, _within(problem, bottom), limit, time_limit_s)
    singles = [_with(problem.nothing, position, 1) for position in range(len(problem.choices))]
    tried = [one.counts for one in solved] + [*by_hand(step), *singles, bottom]
    fitting = [counts for counts in tried if step.peak(counts) <= limit + TOLERANCE]
    if fitting:
        cheap = sorted(set(fitting), key=lambda counts: (problem.cost_ms(counts), step.peak(counts)))
        slim = [_without_spare(step, counts, limit) for counts in cheap[:2]]
        counts = min(slim, key=lambda one: (problem.cost_ms(one), step.peak(one)))
    else:
        counts = bottom
    peak, cost, setting = step.peak(counts), problem.cost_ms(counts), None
    for one, (one_peak, one_ms) in step.settings.items():
        # The cheapest that fits; where nothing does, the lowest.
        fits, fitted = one_peak <= limit + TOLERANCE, peak <= limit + TOLERANCE
        if (fits and (not fitted or one_ms < cost)) or (not fits and not fitted and one_peak < peak):
            counts, peak, cost, setting = problem.nothing, one_peak, one_ms, one
    best = next((one for one in solved if one.counts == counts), solved[-1])
    quick = solve_quickly(problem, best.limit_bytes)
    return Chosen(counts, cost, peak, limit, best, quick, time.perf_counter() - started, setting)


def by_hand(step: SimulatedStep) -> Iterator[Counts]:
    """Yield what a person would tick: one plan after the other, in all places, the largest saving first."""
    problem = step.problem
    nothing, top = problem.nothing, step.peak(problem.nothing)
    alone = {i: step.peak(_with(nothing, i, one.places)) for i, one in enumerate(problem.choices)}
    counts = nothing
    for position in sorted(alone, key=lambda i: alone[i]):
        counts_with = _with(counts, position, problem.choices[position].places)
        if alone[position] < top and problem.allowed(counts_with):
            counts = counts_with
            yield counts


def lowest_counts(step: SimulatedStep) -> Counts:
    """Find the plans with the lowest simulated peak, going down from several starts, one plan at a time."""
    problem, started = step.problem, time.perf_counter()
    everything = tuple(choice.places for choice in problem.choices)
    starts = [problem.nothing, solve_quickly(problem, 0.0).counts, *by_hand(step)]
    if problem.allowed(everything):
        starts.append(everything)
    order = sorted(set(starts), key=step.peak)
    best = order[0]
    for start in (*order[:2], problem.nothing):
        best = min(best, _down(step, start, started + DESCENT_S), key=lambda one: _rank(step, one))
    return best


def _down(step: SimulatedStep, counts: Counts, until: float) -> Counts:
    """Change one plan at a time, the one that lowers the simulated peak most, or the cost at the same peak."""
    problem = step.problem
    while time.perf_counter() < until:
        better = counts
        for position, choice in enumerate(problem.choices):
            for count in {0, counts[position] - 1, counts[position] + 1, choice.places} - {counts[position]}:
                changed = _with(counts, position, count)
                allowed = 0 <= count <= choice.places and problem.allowed(changed)
                if allowed and _rank(step, changed) < _rank(step, better):
                    better = changed
            if time.perf_counter() > until:
                break
        if better == counts:
            break
        counts = better
    return counts


def _rank(step: SimulatedStep, counts: Counts) -> tuple[float, float]:
    return step.peak(counts), step.problem.cost_ms(counts)


def _with(counts: Counts, position: int, count: int) -> Counts:
    return (*counts[:position], count, *counts[position + 1 :])


def _within(problem: Problem, counts: Counts) -> Problem:
    """Return the problem with those places only."""
    choices = tuple(
        Choice(choice.config, choice.savings[:count], choice.cost_ms[:count])
        for choice, count in zip(problem.choices, counts, strict=True)
    )
    return Problem(problem.live, choices, problem.exclusive)


def _rounds(step: SimulatedStep, problem: Problem, limit: float, time_limit_s: float) -> list[Solution]:
    """Solve, simulate, move the limit, and solve again."""
    solved: list[Solution] = []
    target: float | None = limit
    spent = 0.0
    while target is not None and len(solved) < ROUNDS and spent < time_limit_s:
        found = solve_exactly(problem, target, time_limit_s=time_limit_s - spent)
        spent += found.seconds
        solved.append(found)
        target = None
        if step.peak(found.counts) <= limit + TOLERANCE or found.fits:
            target = _next_target(solved, limit, step)
    return solved


def _next_target(solved: list[Solution], limit: float, step: SimulatedStep) -> float | None:
    """Return the limit to solve for next: what the last simulation says, or half-way between; None to stop."""
    # The solver's peaks at which the simulation fits are held to lie below those at which it does not.
    peak = step.peak
    fitting = [one.peak_bytes for one in solved if peak(one.counts) <= limit + TOLERANCE]
    failing = [one.peak_bytes for one in solved if peak(one.counts) > limit + TOLERANCE]
    low, high = max(fitting, default=-math.inf), min(failing, default=math.inf)
    last = solved[-1]
    target = limit - (peak(last.counts) - last.peak_bytes)
    if not low < target < high:
        target = (low + high) / 2
    if not math.isfinite(target) or (fitting and last.cost_ms == 0):
        return None
    # An optimal solution stays the same for every limit between its own peak and its limit.
    same = any(one.peak_bytes <= target <= one.limit_bytes for one in solved)
    return None if same else target


def _without_spare(step: SimulatedStep, counts: Counts, limit: float) -> Counts:
    """Switch off places that the simulation does not need, those that spare most first, until none is spare."""
    problem = step.problem
    while True:
        before = counts
        spared = sorted(
            (
                (problem.costs[position][count] - problem.costs[position][count - 1], position)
                for position, count in enumerate(counts)
                if count
            ),
            reverse=True,
        )
        for _, position in spared[:_TRIED]:
            for fewer in (0, counts[position] - 1):
                fewer_counts = _with(counts, position, fewer)
                if fewer < counts[position] and step.peak(fewer_counts) <= limit + TOLERANCE:
                    counts = fewer_counts
        if counts == before:
            return counts


TRIALS: Final = 3
"""How often plans are chosen and run before those that a person would tick and the memory levels are run as well."""

CURVE_POINTS: Final = 12
"""Budgets that are predicted between none and the floor."""

_MARGIN: Final = 0.01
"""Share of step memory that is kept free where that is possible: a simulation is off by so much."""

_CURVE_TIME_S: Final = 0.25
"""Seconds for the solver at each point of the curve."""


@dataclass(frozen=True)
class Ground:
    """What is known of a step before plans are chosen; bytes are above the start of the step."""

    model: str
    step: SimulatedStep
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

    def predicted(self, simulated_bytes: float, setting: Setting | None = None) -> float:
        """Return the step memory, in bytes, for a simulated peak."""
        beyond = self.beyond(setting)
        return max(self.within_bytes - self.simulated_bytes + simulated_bytes, beyond)

    def beyond(self, setting: Setting | None = None) -> float:
        """Return the peak of the other phases, in bytes; with the loss in blocks no logits are held there."""
        return (
            self.beyond_bytes - self.step.held_less if setting and setting.chunked_loss else self.beyond_bytes
        )

    def to_simulate(self, limit: float) -> float:
        """Return what may be simulated at most for a limit of step memory, in bytes."""
        return limit - self.within_bytes + self.simulated_bytes

    def prediction(self, choice: Chosen) -> Prediction:
        """Write down what was chosen as options take it."""
        if choice.setting is not None:
            return self.of_setting(choice.setting)
        return self.of_counts(choice.counts)

    def of_setting(self, setting: Setting) -> Prediction:
        """Write down a memory level or recomputed layers as options take them."""
        peak, cost = self.step.settings[setting]
        return Prediction((), self.predicted(peak, setting), cost, **vars(setting))

    def of_counts(self, counts: Sequence[int]) -> Prediction:
        """Write down plans as options take them."""
        problem = self.step.problem
        plans = counted(
            [one.config for one in problem.choices], counts, [one.places for one in problem.choices]
        )
        return Prediction(plans, self.predicted(self.step.peak(counts)), problem.cost_ms(counts))


Run = Callable[[Prediction], int]
"""Runs the step with plans and returns its measured step memory in bytes."""


class Trials:
    """What was run of a budget's plans, and what could not be run: other plans may work where some fail."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.done: list[PlanTrial] = []
        self.failed: list[FailedTrial] = []
        self.error: Exception | None = None  # the first

    def knows(self, prediction: Prediction) -> bool:
        """Tell whether the same switches have been tried."""
        tried = [one.prediction for one in self.done] + [one.prediction for one in self.failed]
        return any(one.switches == prediction.switches for one in tried)

    def measure(self, prediction: Prediction, why: str = "cheapest") -> int | None:
        """Run plans and return the measured step memory in bytes; None if ONNX Runtime or its build fails."""
        try:
            self.done.append(PlanTrial(prediction, self._run(prediction), why))
        except (BuildError, ExecutionError) as error:
            self.failed.append(FailedTrial(prediction, error.what, why))
            self.error = self.error or error
            return None
        return self.done[-1].step_memory_bytes


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
    failed: list[FailedTrial] = []
    if run is not None and (ground.step.problem.choices or ground.step.settings) and limit < needed:
        tried = Trials(run)
        trials, failed = tried.done, tried.failed
        _verify(ground, limit, first, tried, tell)
        if all(trial.step_memory_bytes > limit for trial in trials):
            _look_for_closest(ground, limit, floor, tried, tell)
        if tried.error is not None and not trials:
            raise tried.error
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
        no_blocks=ground.step.no_blocks,
        failed=tuple(failed),
    )


def _chosen(ground: Ground, limit: float) -> Chosen:
    """Choose for a little less than the limit, for all of it where less cannot be had, and nothing if all fits."""
    needed = ground.without.step_memory_bytes
    if limit >= needed:
        return choose(ground.step, max(ground.to_simulate(limit), ground.simulated_bytes))
    careful = choose(ground.step, ground.to_simulate(limit - _MARGIN * needed))
    return careful if careful.fits else choose(ground.step, ground.to_simulate(limit))


def _verify(
    ground: Ground, limit: int, prediction: Prediction, tried: Trials, tell: Callable[[str], None]
) -> None:
    """Run the plans; where they miss, ask for as much less as the prediction was too low."""
    too_low = 0.0
    while len(tried.done) < TRIALS and prediction.acts:
        tell(f"Verifying, trial {len(tried.done) + 1}")
        measured = tried.measure(prediction)
        if measured is None or measured <= limit:
            return
        too_low = max(too_low, measured - prediction.step_memory_bytes)
        tell("Choosing plans that take more off")
        prediction = ground.prediction(_chosen(ground, limit - too_low))
        if tried.knows(prediction):
            return


def _look_for_closest(
    ground: Ground, limit: int, floor: Prediction, tried: Trials, tell: Callable[[str], None]
) -> None:
    """Run what else may come closest, until something fits."""
    # It tries the lowest simulated peak, what a person would tick from the largest saving on, the memory levels, and
    # the layers whose recomputation leaves least, with the loss in blocks where that is offered: the simulation is off
    # by a per cent or two, so only a measurement tells which of them needs least.
    step = ground.step
    ticked = min(by_hand(step), key=step.peak, default=None)
    candidates = [("lowest", floor)]
    if ticked is not None:
        candidates.append(("by hand", ground.of_counts(ticked)))
    # Of recomputed layers, the lowest alone: each of them needs less than the one before.
    layers = min(
        (one for one in step.settings if one.recompute), key=lambda one: step.settings[one], default=None
    )
    settings = [one for one in step.settings if not one.recompute or one == layers]
    candidates += [(found.setting, found) for found in map(ground.of_setting, settings)]
    for why, prediction in candidates:
        if tried.knows(prediction):
            continue
        tell(f"Looking for the closest: {why}")
        measured = tried.measure(prediction, why)
        if measured is not None and measured <= limit:
            return


def _obstacle(ground: Ground, lowest: Chosen) -> Obstacle:
    """Say what keeps memory up: what lives at the simulated peak, or a phase that plans cannot lower."""
    beyond = ground.beyond(lowest.setting)
    if ground.predicted(lowest.peak_bytes, lowest.setting) <= beyond:
        return Obstacle("the optimizer's step or another phase that no plan acts on", beyond)
    found = ground.step.obstacle(lowest.counts, lowest.setting)
    return Obstacle(found.where, ground.predicted(found.bytes, lowest.setting), found.live)


def _curve(ground: Ground, lowest: Chosen, tell: Callable[[str], None]) -> tuple[Prediction, ...]:
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


def _solver(ground: Ground, chosen: Chosen) -> Solver:
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
        settings=len(ground.step.settings),
    )


def counted(configs: Sequence[str], counts: Sequence[int], places: Sequence[int]) -> tuple[str, ...]:
    """Write plans as `Options.memory_plan` takes them: "Gelu+:1" in 3 of 12 places is "Gelu+:1:3", in all ":-1"."""
    # Two plans that go together, "A+:1,B+:1", are two entries.
    return tuple(
        f"{part}:{-1 if count == most else count}"
        for config, count, most in zip(configs, counts, places, strict=True)
        if count
        for part in config.split(",")
    )
