"""The answer to an amount of step memory: plans, what is predicted of them, and what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

NO_PLANS_NEEDED: Final = "no plans needed"
MET: Final = "met"
MISSED: Final = "missed"
PREDICTED: Final = "predicted to fit"
TOO_SMALL: Final = "too small"

STEADY: Final = 0.05
"""Share by which the same steps may take longer at one time than at another on a machine that is steady."""

SAME_BYTES: Final = 256 * 1024
"""Bytes by which two measurements of one setting may differ: what Python takes meanwhile."""


@dataclass(frozen=True)
class Setting:
    """Switches that stand for plans: what is switched on in their place."""

    memory_level: int = 0
    recompute: tuple[str, ...] = ()
    chunked_loss: bool = False


@dataclass(frozen=True)
class Prediction:
    """Plans, and what is predicted of them; nothing here was measured."""

    plans: tuple[str, ...]  #: What `Options.memory_plan` takes; ":1:k" recomputes in the first k places
    #: Predicted step memory: the measured one without plans, less what the simulation takes off.
    step_memory_bytes: float
    cost_ms: float  #: What they are predicted to add to a step, in ms
    memory_level: int = 0  #: The memory level that is switched on instead of plans; 0 for plans
    #: What `Options.recompute` takes, switched on instead of plans; empty for plans.
    recompute: tuple[str, ...] = ()
    #: Whether the loss is computed in blocks of rows, beside `recompute` or a level, or alone.
    chunked_loss: bool = False

    @property
    def switches(self) -> dict[str, Any]:
        """What `Lab.set` takes to switch them on."""
        found: dict[str, Any] = {"chunked_loss": True} if self.chunked_loss else {}
        if self.recompute:
            found["recompute"] = list(self.recompute)
        if self.memory_level:
            found["memory_level"] = self.memory_level
        return found or {"memory_plan": list(self.plans)}

    @property
    def acts(self) -> bool:
        """Whether anything is switched on."""
        return bool(self.plans or self.setting)

    @property
    def setting(self) -> str:
        """What is switched on instead of plans, as options are written: "memory_level=1"; empty for plans."""
        said = ["chunked_loss"] * self.chunked_loss
        said += [f"recompute={','.join(self.recompute)}"] * bool(self.recompute)
        said += [f"memory_level={self.memory_level}"] * bool(self.memory_level)
        return " with ".join(said)


@dataclass(frozen=True)
class PlanTrial:
    """One set of plans that was run."""

    prediction: Prediction  #: The plans, and what was predicted
    step_memory_bytes: int  #: Measured step memory, in bytes
    #: Why it was run: "cheapest", "lowest", "by hand: largest saving first", "memory_level=1", "recompute=layers".
    why: str = "cheapest"

    @property
    def error(self) -> float:
        """How far the prediction is from what was measured, relative to the latter; below 0: too low.

        NaN where nothing was measured: a small step may find all its memory free already.
        """
        off = self.prediction.step_memory_bytes - self.step_memory_bytes
        return off / self.step_memory_bytes if self.step_memory_bytes else math.nan


@dataclass(frozen=True)
class FailedTrial:
    """One set of plans that could not be run."""

    prediction: Prediction  #: The plans, and what was predicted
    error: str  #: What ONNX Runtime, or its build, failed with
    why: str = "cheapest"  #: Why it was to be run, as in `PlanTrial`


@dataclass(frozen=True)
class Timing:
    """Steps with the plans against steps without, timed in turns from one start: without, with, with, without."""

    #: Times of the steps without plans that count, in ms: those of the first turn, then those of the last.
    without_ms: tuple[float, ...]
    with_ms: tuple[float, ...]  #: Times of the steps with plans that count, in ms
    low: float  #: Ends of the 95 % bootstrap confidence interval of the ratio of the medians
    high: float  #: See `low`

    @property
    def ratio(self) -> float:
        """Median with plans over median without; above 1: plans cost time."""
        return statistics.median(self.with_ms) / statistics.median(self.without_ms)

    @property
    def added_ms(self) -> float:
        """What the plans add to a step, in ms."""
        return statistics.median(self.with_ms) - statistics.median(self.without_ms)

    @property
    def drift(self) -> float:
        """How much longer a step without plans took in the last turn than in the first, relative to the first."""
        half = len(self.without_ms) // 2
        first, last = (statistics.median(part) for part in (self.without_ms[:half], self.without_ms[half:]))
        return last / first - 1

    @property
    def holds(self) -> bool:
        """Whether the machine was steady enough for a verdict: the same steps took the same time before and after."""
        return abs(self.drift) <= max(STEADY, abs(self.ratio - 1) / 2)


@dataclass(frozen=True)
class Solver:
    """How the plans were found."""

    plans: int  #: How many plans there were to choose from, and in how many places all together
    places: int  #: See `plans`
    instants: int  #: Instants of the step that were looked at
    cost_ms: float  #: Predicted cost of the plans that the exact solver chose, in ms
    #: Cost of those that the greedy one did; None where it found nothing that fits.
    greedy_cost_ms: float | None
    #: Share of the cost that a better choice could at most save; None where that is unknown.
    gap: float | None
    proven: bool  #: Whether nothing better exists, as far as savings add up
    seconds: float  #: How long all of it took, simulations included
    settings: int = 0  #: How many memory levels and sets of recomputed layers there were beside them

    @property
    def ways(self) -> int:
        """How many plans and settings there were; 0 where nothing can be recomputed."""
        return self.plans + self.settings


@dataclass(frozen=True)
class Obstacle:
    """The instant that keeps the peak from falling further."""

    where: str  #: The phase, and what runs then
    bytes: float  #: What is needed then, predicted
    live: tuple[tuple[str, int], ...] = ()  #: What lives there and how many bytes it has, the largest first


@dataclass(frozen=True)
class Compared:
    """A way to run the step, as measured: without plans, eager, checkpointing, a level."""

    name: str  #: What it is
    step_memory_bytes: int  #: Measured step memory, in bytes
    step_ms: float | None = None  #: Measured time of a step, in ms; None where it was not measured


@dataclass(frozen=True)
class Device:
    """What a budget for a whole device leaves to a step."""

    asked_bytes: int  #: What the process or device may hold
    #: What it holds at the start of a step, measured: Python, libraries, weights, optimizer state.
    held_bytes: int


@dataclass(frozen=True, repr=False)
class Budget(Shown, JsonRecord, noun="budget", layout=2):
    """The plans that cost least time within an amount of step memory; `Lab.budget` makes it.

    Step memory is what a step needs above its start: `MemoryMeasurement.rise_bytes`.
    """

    model: str  #: What the lab calls the model
    asked: str  #: What was asked for, as written: "70 %", "-30 %", "400 MiB", "6 GiB for the whole device"
    limit_bytes: int  #: The same in bytes of step memory
    #: How memory was measured: "resident set, large buffers mapped, this process", "CUDA allocated, this process".
    kind: str
    without: Compared  #: The step without plans, as measured
    #: The chosen plans. Where nothing fits, those that are predicted to come closest.
    prediction: Prediction
    floor: Prediction  #: The least step memory that plans are predicted to reach
    solver: Solver  #: How they were found
    #: What was run to verify them, in order; every one but the last missed the budget. Empty if nothing was run.
    trials: tuple[PlanTrial, ...] = ()
    #: Steps with the plans timed against steps without; None if nothing was timed.
    timing: Timing | None = None
    obstacle: Obstacle | None = None  #: What keeps memory from falling further; None where the budget is met
    #: Predicted memory and costs for other budgets, from none to the floor; empty if not asked for.
    curve: tuple[Prediction, ...] = ()
    #: Other ways to run the step, as `Lab.compare_engines` measured them, ONNX Runtime as it was set first.
    compared: tuple[Compared, ...] = ()
    applied: bool = False  #: Whether the lab was left with these plans switched on
    #: What the whole device was to hold, and holds; None where step memory was asked for.
    whole_device: Device | None = None
    #: Engine and switches that the lab had otherwise before: {"engine": "eager"}, {"memory_level": 1}.
    before: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"  #: "cpu" or "cuda:0", ...
    #: Why the loss in blocks of rows (`chunked_loss`) was not offered; empty where it was, or is on.
    no_blocks: str = ""
    failed: tuple[FailedTrial, ...] = ()  #: What was to be run and failed; the trials were run in its place

    @property
    def answer(self) -> Prediction:
        """The plans that were run and are the answer or, without trials, the predicted ones."""
        return self.best.prediction if self.best else self.prediction

    @property
    def plans(self) -> tuple[str, ...]:
        """What `Options.memory_plan` takes; empty where the answer is a memory level, or no plan is needed."""
        return self.answer.plans

    @property
    def switches(self) -> dict[str, Any]:
        """What `Lab.set` takes to switch the answer on: `lab.set(**budget.switches)`."""
        return self.answer.switches

    @property
    def best(self) -> PlanTrial | None:
        """The trial that met the budget, or else came closest; None where nothing was run.

        Of those that are as close as two measurements of one setting, it is the one that costs least.
        """
        met = [trial for trial in self.trials if trial.step_memory_bytes <= self.limit_bytes]
        if met or not self.trials:
            return met[-1] if met else None
        least = min(trial.step_memory_bytes for trial in self.trials) + SAME_BYTES
        close = [trial for trial in self.trials if trial.step_memory_bytes <= least]
        return min(close, key=lambda trial: (trial.prediction.cost_ms, trial.step_memory_bytes))

    @property
    def floor_bytes(self) -> float:
        """The least step memory that was measured with plans, or else the predicted floor, in bytes."""
        least = min((trial.step_memory_bytes for trial in self.trials), default=None)
        return self.floor.step_memory_bytes if least is None or self.outcome == MET else least

    @property
    def outcome(self) -> str:
        """What came out: "met", "missed", "predicted to fit", "too small" or "no plans needed"."""
        if self.without.step_memory_bytes <= self.limit_bytes:
            return NO_PLANS_NEEDED
        if self.best is not None and self.best.step_memory_bytes <= self.limit_bytes:
            return MET
        if self.prediction.step_memory_bytes > self.limit_bytes:
            return TOO_SMALL
        return MISSED if self.best else PREDICTED

    def table(self) -> pd.DataFrame:
        """One row for the step without plans, each trial and each point of the curve; bytes and ms.

        Returns
        -------
        pandas.DataFrame
            Predicted and measured numbers are in columns of their own; what was not measured is missing.
        """
        import pandas as pd

        none = self.without
        rows = [_row("without plans", None, none.step_memory_bytes, none.step_ms)]
        for number, trial in enumerate(self.trials, start=1):
            timed = self.timing if trial is self.best else None
            step_ms = statistics.median(timed.with_ms) if timed else None
            rows.append(_row(f"trial {number}", trial.prediction, trial.step_memory_bytes, step_ms))
        if not self.trials:
            rows.append(_row("chosen", self.prediction, None, None))
        rows += [_row(one.name, None, one.step_memory_bytes, one.step_ms) for one in self.compared]
        rows += [_row("other budget", one, None, None) for one in self.curve]
        return pd.DataFrame(rows)


def _row(
    what: str, prediction: Prediction | None, measured_bytes: int | None, step_ms: float | None
) -> dict[str, object]:
    return {
        "what": what,
        "plans": (prediction.setting or ", ".join(prediction.plans)) if prediction else "",
        "predicted step memory [bytes]": prediction.step_memory_bytes if prediction else None,
        "predicted cost [ms]": prediction.cost_ms if prediction else None,
        "measured step memory [bytes]": measured_bytes,
        "measured step [ms]": step_ms,
    }
