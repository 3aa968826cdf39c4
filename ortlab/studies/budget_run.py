"""A budget: read what is asked, profile and measure a step, choose plans, run and time them, leave them switched on."""

from __future__ import annotations

import itertools
import re
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from ortlab import units
from ortlab.analyses.memory import memory
from ortlab.analyses.profiling import profile, repeat
from ortlab.errors import OptionError, OrtlabError
from ortlab.options.configuration import NOTHING_RECOMPUTED
from ortlab.records.verdicts import interval
from ortlab.runs.experiment import Experiment, Snapshot
from ortlab.runs.interrupts import interrupts_kept, protected, say
from ortlab.runs.stopwatch import synchronizer
from ortlab.studies.budget import MET, Budget, Compared, Prediction, Timing
from ortlab.studies.plans import plan

if TYPE_CHECKING:
    from ortlab.engine.ort import OrtEngine
    from ortlab.memory.plan import MemoryPlan
    from ortlab.options.configuration import Configuration
    from ortlab.runs.bench import Bench
    from ortlab.studies.budget_problem import SimulatedStep
    from ortlab.studies.budget_search import Ground
    from ortlab.studies.engine_comparison import EngineComparison

_FIX: Final = (
    'Write "70%" or "-30%" of what a step needs without plans, "400 MiB" of step memory, '
    'or device="6 GiB" for the whole process or GPU.'
)
_PERCENT: Final = re.compile(r"\s*([+\-\u2212]?)\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*", re.ASCII)
_NUMBER: Final = re.compile(r"\s*[+\-\u2212]?\s*[0-9][0-9_]*(?:\.[0-9]*)?\s*", re.ASCII)
_ALL: Final = 100.0


@dataclass(frozen=True)
class Request:
    """A budget as it was asked for; one of share, step bytes and device bytes is given."""

    asked: str  # in words
    share: float | None = None  # of what a step needs without plans
    step_bytes: int | None = None  # above the start of the step
    device_bytes: int | None = None  # of the whole process or device

    def limit(self, without_bytes: float, held_bytes: float = 0.0) -> int:
        """Return the limit of step memory in bytes, not above zero where a device holds more than was asked for."""
        # `without_bytes` is step memory without plans; `held_bytes` is what process or device holds as a step starts.
        if self.share is not None:
            return int(without_bytes * self.share)
        if self.device_bytes is not None:
            return int(self.device_bytes - held_bytes)
        return self.step_bytes or 0


def read_request(limit: object, device: object) -> Request:
    """Read what `Lab.budget` was called with."""
    if limit is None and device is None:
        raise OptionError("A budget needs a limit.", fix=_FIX)
    if limit is not None and device is not None:
        raise OptionError(
            "A budget is of step memory or of the whole device, not of both.",
            why=f"It was asked for {_shown(limit)}, and for device={_shown(device)}.",
            fix="Leave one of the two out.",
        )
    if device is not None:
        return _of_device(device)
    if isinstance(limit, str) and (percent := _PERCENT.fullmatch(limit)):
        return _of_share(limit.strip(), percent[1], float(percent[2]))
    size = _size(limit, "budget")
    return Request(limit.strip() if isinstance(limit, str) else f"{size:,} B", step_bytes=size)


def _of_device(device: object) -> Request:
    if isinstance(device, str) and _PERCENT.fullmatch(device):
        raise OptionError(
            f"The device budget is {device.strip()!r}.",
            why="A percentage is of what a step needs; of a device, say how much it is.",
            fix='Write device="6 GiB", or leave device out: lab.budget("70%").',
        )
    size = _size(device, "device budget")
    asked = device.strip() if isinstance(device, str) else f"{size:,} B"
    return Request(f"{asked} for the whole device", device_bytes=size)


def _of_share(text: str, sign: str, percent: float) -> Request:
    if sign in {"-", "\u2212"}:
        if not 0 < percent < _ALL:
            why = (
                "Nothing would be left for a step." if percent else "That asks for no less than a step needs."
            )
            raise OptionError(f"The budget is {text!r}.", why=why, fix=_FIX)
        return Request(f"-{percent:g} %", share=1 - percent / _ALL)
    if sign or percent > _ALL:
        raise OptionError(
            f"The budget is {text!r}.",
            why="A step needs 100 % of its memory without any plan; a budget asks for less.",
            fix=_FIX,
        )
    if not percent:
        raise OptionError(f"The budget is {text!r}.", why="Nothing would be left for a step.", fix=_FIX)
    return Request(f"{percent:g} %", share=percent / _ALL)


def _size(value: object, name: str) -> int:
    """Read a size as `units.read_size` does; a bare number in a text is no size, since it may mean MiB or per cent."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        number = value.strip()
        raise OptionError(
            f"The {name} {number!r} has no unit.",
            why="It may mean bytes, MiB, or per cent.",
            fix=f'Write "{number} MiB", "{number} B" or "{number}%". A whole number, not in quotes, is bytes.',
        )
    if isinstance(value, float):
        raise OptionError(
            f"The {name} is {value!r}, a number without a unit.",
            why="It may mean a share, or bytes.",
            fix=f'Write a share as text: "{value * _ALL:g}%".' if 0 < value < 1 else _FIX,
        )
    return units.read_size(value, name=name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"  # noqa: PLR2004 - a line


_STAGES: Final = 10
"""Parts of the work on the progress bar: profile, simulate, measure, choose, trials and choices, time, curve."""

_STEPS: Final = 2
"""Steps of each measurement of memory, of which the highest counts."""

_LOSSES: Final = frozenset({"com.microsoft.SoftmaxCrossEntropyLossInternal", "ortlab::cross_entropy"})
"""Operators that compute the loss of a model with classes."""

_LOGITS_SHARE: Final = 0.2
"""Share of the peak that logits are at least where a loss in blocks is looked at, which takes an export of its own."""

_TIMED_STEPS: Final = 4
"""Steps of each turn that are timed; there are two turns of either side."""

_UNTIMED_STEPS: Final = 2
"""Steps before them in each turn: the first builds, and finds the heap as the other side has left it."""


@interrupts_kept()
def budget(
    bench: Bench,
    limit: str | int | None = None,
    *,
    device: str | int | None = None,
    apply: bool = True,
    verify: bool = True,
    timed: bool = True,
    curve: bool = True,
    candidates: EngineComparison | None = None,
    progress: bool = True,
) -> Budget:
    """Switch on the recomputation that costs least time within an amount of step memory.

    Step memory is what a step needs above its start. The last step is profiled and measured without plans; from
    that is predicted what ONNX Runtime's plans, memory levels, layers that ortlab recomputes, and the loss in blocks of
    rows (`chunked_loss`, where logits are large and the step does not read them) save and cost. What
    is cheapest is run from the step's start, measured, and timed in turns with nothing recomputed. If it misses, what
    saves more is run, then the lowest that is predicted, the largest savings ticked by hand, the memory levels, and
    the layers whose recomputation leaves least.

    Parameters
    ----------
    limit
        What a step may need: a share of what it needs without plans, "70%"; so much less, "-30%"; or an amount,
        "400 MiB" or bytes.
    device
        Instead: what the whole process (on a CPU) or torch's allocator (on CUDA) may hold, "6 GiB". What it holds
        at the start of a step is taken off.
    apply
        Whether the lab keeps the plans switched on where they were measured to meet the budget, on ONNX Runtime.
        Otherwise, and whenever something fails, options and engine are afterwards as before; weights, optimizer,
        random state and ledger always are.
    verify
        Whether to run the plans. Without, all but the step without plans is predicted, and nothing is applied.
    timed
        Whether to time some twenty steps in turns, with and without the plans. Else time is predicted only.
    curve
        Whether to predict other budgets as well.
    candidates
        What `compare_engines` has measured of the same step, to be shown beside the plans.
    progress
        Whether to show a progress bar on a terminal.

    Returns
    -------
    Budget
        The record, also in `lab.budgets`. If nothing fits, it holds the plans that come closest, and why.

    Raises
    ------
    OptionError
        If the budget has no unit, is no share from 0 to 100 %, or both a limit and a device; if a device holds
        more before a step than it may hold, or several parts of the model are wrapped.
    StepError
        If no step has run yet, a step is running, or memory cannot be told on this system.
    KeyboardInterrupt
        If the user interrupts; the lab is then as it was before.
    Exception
        Whatever the step raises.

    Examples
    --------
    >>> lab.budget("70%")
    >>> lab.budget("400 MiB", apply=False).switches
    {'memory_plan': ['Gelu+:1:-1']}
    """
    from ortlab.studies.budget_search import answer

    request = read_request(limit, device)
    bench.check_usable("choose plans for a budget")
    experiment = bench.last_experiment()
    engine = _engine_to_plan(bench)
    present = bench.configuration
    plain = present.changed({"engine": "ort", **NOTHING_RECOMPUTED}, bench.have)
    try:
        # Profiles and measurements put back what they trained, each by itself.
        with bench.set_as_before(), bench.progress.task(_STAGES, show=progress) as bar:
            done = itertools.count(0)

            def tell(what: str) -> None:
                bar.begin(what, next(done))

            bench.configure(plain)
            ground = _ground(bench, plain, experiment, engine, tell)
            if request.device_bytes is not None:
                _check_room(request.device_bytes, ground.held_bytes, ground.device)

            def run(prediction: Prediction) -> int:
                return memory(bench, n=_STEPS, **prediction.switches).rise_bytes

            found = answer(ground, request, run if verify else None, tell, curve=curve)
            found = _with_times(bench, found, plain, experiment, tell, timed=timed)
            found = replace(found, compared=_compared(candidates), before=_differing(present, plain))
    except KeyboardInterrupt as interrupt:
        say(
            interrupt,
            "Stopped the budget; no plans are chosen, and the lab is as it was before. "
            "Ask again: what is known of the step is kept.",
        )
        raise
    return _kept(bench, found, plain, apply=apply)


@protected
def _kept(bench: Bench, found: Budget, plain: Configuration, *, apply: bool) -> Budget:
    """Keep a budget, and switch on what was found where that met it; the one is never without the other."""
    if apply and found.outcome == MET:
        bench.configure(plain.changed(found.switches, bench.have))
        found = replace(found, applied=True)
    bench.budgets.append(found)
    return found


def _with_times(
    bench: Bench,
    found: Budget,
    plain: Configuration,
    experiment: Experiment,
    tell: Callable[[str], None],
    *,
    timed: bool,
) -> Budget:
    """Add how long a step takes without the plans, and with them where they were run."""
    if found.best is not None and timed:
        tell("Timing steps with and without the plans")
        changed = plain.changed(found.switches, bench.have)
        found = replace(found, timing=_timed(bench, plain, changed, experiment))
        step_ms = median(found.timing.without_ms) if found.timing else None
    elif found.answer.plans or found.answer.setting:
        step_ms = median(_times(bench, plain, experiment, _TIMED_STEPS))
    else:
        return found
    return replace(found, without=replace(found.without, step_ms=step_ms))


def _ground(
    bench: Bench, plain: Configuration, experiment: Experiment, engine: OrtEngine, tell: Callable[[str], None]
) -> Ground:
    """Profile the step without plans, once for each step call and configuration, and measure it each time."""
    # Whatever the process has loaded since, such as matplotlib, is in every later measurement.
    from ortlab.studies.budget_search import Ground, choose

    known = bench.simulated
    if known is None or known[0] != plain or known[1] is not experiment:
        tell("Profiling a step, and simulating plans")
        step = _simulated(bench, engine)
        tell("Profiling it with its loss in blocks")
        in_blocks = _in_blocks(bench, plain, engine, step)
        if isinstance(in_blocks, str):
            step.no_blocks = in_blocks
        else:
            step.offer(in_blocks)
        choose(step, 0.0)  # the solver's libraries are in the process before that is measured
        bench.simulated = known = (plain, experiment, step)
    tell("Measuring a step without plans")
    copy_bytes = Snapshot(bench.module, experiment.start.stateful).number_of_bytes
    measured = memory(bench, n=_STEPS)
    peaks = {phase.phase: phase.peak_bytes - measured.start_bytes for phase in measured.step.phases}
    beyond = peaks.pop("optimizer", 0)
    return Ground(
        model=bench.name,
        step=known[2],
        without=Compared("without plans", measured.rise_bytes),
        within_bytes=max(peaks.values(), default=0),
        beyond_bytes=beyond,
        kind=measured.label,
        device=measured.device,
        # While it measures, the lab has a copy of weights and optimizer state to go back to.
        held_bytes=max(0, measured.start_bytes - copy_bytes),
    )


def _simulated(bench: Bench, engine: OrtEngine) -> SimulatedStep:
    """Profile the last step as the lab is set, and return it to be simulated with plans."""
    from ortlab.engine.recompute_words import made_again
    from ortlab.memory.layer_planner import LayerPlanner
    from ortlab.memory.trace import lifetimes, with_blocks
    from ortlab.studies.budget_problem import SimulatedStep

    profiled = profile(bench, memory_efficient_order=True, progress=False)
    execution = engine.execution
    ordered = with_blocks(profiled, execution.loss_blocks)
    usual = lifetimes(with_blocks(profile(bench, 1, progress=False), execution.loss_blocks)).peak
    places = execution.recompute_places()
    again = made_again(execution.built, execution.module, execution.user_inputs)
    return SimulatedStep(ordered, places, usual, _together(plan(bench)), LayerPlanner(ordered, again))


def _in_blocks(
    bench: Bench, plain: Configuration, engine: OrtEngine, step: SimulatedStep
) -> SimulatedStep | str:
    """Return the step with its loss in blocks of rows, or why that is not offered."""
    # It is not where it is on already (of which nothing is said), where logits are a small part of the peak, and where
    # it cannot be had: the loss is none that can be computed so, or the step reads the logits.
    if plain.options.chunked_loss:
        return ""
    losses = [node for node in step.trace.nodes if node.operator in _LOSSES]
    if not losses:
        return "the model's graph has no cross entropy that can be computed so."
    logits = max(step.trace.sizes.get(node.inputs[0], 0) for node in losses)
    share = logits / max(step.peak(step.problem.nothing), 1.0)
    if share < _LOGITS_SHARE:
        return (
            f"logits are {units.size(logits)}, {units.rounded_percent(share)} of the peak; it is looked at from "
            f"{units.rounded_percent(_LOGITS_SHARE)} on."
        )
    try:
        bench.configure(plain.changed({"chunked_loss": True}, bench.have))
        found = _simulated(bench, engine)
        computed, why = bool(engine.execution.loss_blocks), engine.execution.loss_unchanged
    except OrtlabError as error:
        return error.what
    finally:
        bench.configure(plain)
    return found if computed else why


def _timed(bench: Bench, plain: Configuration, changed: Configuration, experiment: Experiment) -> Timing:
    """Time steps in turns: without plans, with them for twice as long, and without again."""
    before = _times(bench, plain, experiment, _TIMED_STEPS)
    with_plans = _times(bench, changed, experiment, 2 * _TIMED_STEPS)
    without = (*before, *_times(bench, plain, experiment, _TIMED_STEPS))
    low, high = interval(with_plans, without)
    return Timing(without, with_plans, low, high)


def _times(
    bench: Bench, configuration: Configuration, experiment: Experiment, count: int
) -> tuple[float, ...]:
    """Return the times of some steps in ms, after those of the same turn that do not count."""
    device = next((tensor.device for tensor in bench.module.parameters()), None)
    synchronize = None if device is None else synchronizer(device)
    times = array("d")  # no list: those that a step names have their content back afterwards

    def step() -> object:
        start = time.perf_counter()
        result = experiment.step()
        if synchronize is not None:
            synchronize()
        times.append(1000 * (time.perf_counter() - start))
        return result

    with bench.as_before(experiment):
        bench.configure(configuration)
        timed = Experiment(step, count, experiment.start)
        repeat(bench, timed, _UNTIMED_STEPS + count, "Timing", progress=False)
    return tuple(times[_UNTIMED_STEPS:])


def _engine_to_plan(bench: Bench) -> OrtEngine:
    engines = bench.engines(None)
    if len(engines) > 1:
        raise OptionError(
            "A budget is for a model that is wrapped as a whole, or for one part of it.",
            why=f"Several parts are wrapped: {', '.join(engines)}.",
            fix="Wrap one part: lab.unwrap(), then ortlab.wrap(model, only=[...]).",
        )
    return next(iter(engines.values()))


def _check_room(asked_bytes: int, held_bytes: int, device: str) -> None:
    if asked_bytes > held_bytes:
        return
    what = "This process, with Python, libraries and weights," if device == "cpu" else f"Torch on {device}"
    raise OptionError(
        f"The device budget of {asked_bytes:,} bytes leaves a step nothing.",
        why=f"{what} holds {held_bytes:,} bytes at the start of a step.",
        fix='Give more, or ask for step memory, which leaves the rest aside: lab.budget("70%").',
    )


def _together(plan: MemoryPlan) -> list[str]:
    """Return the plans that ORT offers only together, without their counts."""
    return [
        ",".join(part.rsplit(":", 1)[0] for part in row.config.split(","))
        for row in plan.rows
        if "," in row.config
    ]


def _differing(before: Configuration, plain: Configuration) -> dict[str, Any]:
    """Return the engine and the plans that a lab has, where it is not ONNX Runtime without any."""
    found: dict[str, Any] = {} if before.engine == plain.engine else {"engine": before.engine}
    for name, value in before.recomputing.items():
        found[name] = list(value) if isinstance(value, tuple) else value  # as JSON has it
    return found


def _compared(candidates: EngineComparison | None) -> tuple[Compared, ...]:
    """Take over what candidates needed, where both their memory and their time were measured."""
    return tuple(
        Compared(candidate.name, int(candidate.rise_bytes), candidate.point.step_ms)
        for candidate in candidates or ()
        if candidate.rise_bytes > 0 and candidate.outcome is not None
    )
