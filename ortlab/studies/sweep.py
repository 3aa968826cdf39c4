"""A sweep: the points of a grid, what was measured at each against the baseline, and what could not be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ortlab.options.configuration import Configuration  # noqa: TC001 - asked for when a record is read
from ortlab.options.options import Effect, switches
from ortlab.options.switches import Value
from ortlab.records import comparison, verdicts
from ortlab.records.record_files import JsonRecord
from ortlab.records.runs import Initialization, Run, Step, least_step_memory
from ortlab.records.verdicts import FELL_BACK, Timed, TimeRatio, cautions
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

Changes: TypeAlias = dict[str, Value]
"""What one point changes: options by name, "engine" among them."""


@dataclass(frozen=True)
class Point:
    """One point of a sweep: a configuration and the runs that were made of it."""

    #: 1, 2, ... in the order of the grid; 0 for a baseline that is not among the points.
    number: int
    changes: Changes  #: What the point changes, as the user asked: options by name, "engine" among them
    #: Engine and all switches; None if they contradict each other or cannot act here.
    configuration: Configuration | None
    #: Why the point is not run: a contradiction, or another point that does the same; "" otherwise.
    skipped: str = ""
    #: Why a run of it failed; "" otherwise. Its other runs, if any, count no more.
    failure: str = ""
    runs: tuple[Run, ...] = ()  #: One for each round that is done

    @property
    def measured(self) -> bool:
        """Whether there is something to show: a run, and none that failed."""
        return bool(self.runs) and not self.failure

    @property
    def fell_back(self) -> bool:
        """Whether PyTorch executed any step of its runs that ORT was asked for."""
        return any(run.fell_back for run in self.runs)

    @property
    def warm_steps(self) -> tuple[Step, ...]:
        """The warm steps of all rounds; see `Run.warm_steps`."""
        return tuple(step for run in self.runs for step in run.warm_steps)

    @property
    def step_ms(self) -> float:
        """Median wall time of a warm step over all rounds, in ms; nan if nothing was measured."""
        return statistics.median(s.total_ms for s in self.warm_steps) if self.measured else math.nan

    @property
    def step_memory_bytes(self) -> float:
        """How far a step rises above its start, in bytes; nan if it was not measured. It is measured in two rounds."""
        known = least_step_memory(self.runs) if self.measured else None
        return math.nan if known is None else float(known)

    @property
    def no_step_memory(self) -> str:
        """Why `step_memory_bytes` is missing; else empty."""
        return self.runs[0].no_step_memory if self.measured and math.isnan(self.step_memory_bytes) else ""

    @property
    def builds(self) -> tuple[Initialization, ...]:
        """What was built for it, run by run."""
        return tuple(run.initialization for run in self.runs if run.initialization)

    @property
    def rebuilt(self) -> Initialization | None:
        """What was built for it, all runs together; None if everything was there."""
        total: Initialization | None = None
        for build in self.builds:
            total = build if total is None else total.plus(build)
        return total

    @property
    def state(self) -> str:
        """Say how far it got: "skipped", "failed", "measured" or "missing"."""
        if self.skipped:
            return "skipped"
        if self.failure:
            return "failed"
        return "measured" if self.runs else "missing"

    def value(self, name: str) -> object:
        """Return what an option, or "engine", is at this point; None if it is not known."""
        if self.configuration is None or name in self.changes:
            return self.changes.get(name)
        return (
            self.configuration.engine if name == "engine" else getattr(self.configuration.options, name, None)
        )


def same_work(one: Configuration, other: Configuration) -> bool:
    """Tell whether two configurations do the same: only ONNX Runtime reads the switches."""
    if one.engine != other.engine:
        return False
    return one.engine != "ort" or one.options.stage_of_change(other.options) is None


def cheapest_order(points: Sequence[Point], first: int) -> list[int]:
    """Order positions so that those with equal exports, then equal graphs stand together; `first` comes first."""
    seen: dict[tuple[object, ...], int] = {}

    def rank(configuration: Configuration, until: Effect) -> int:
        values = tuple(
            getattr(configuration.options, one.name)
            for one in switches()
            if one.effect <= until and configuration.engine == "ort"
        )
        return seen.setdefault((configuration.engine, until, values), len(seen))

    keys = [
        (
            rank(one.configuration, Effect.EXPORT),
            rank(one.configuration, Effect.GRAPH),
            position != first,
            position,
        )
        for position, one in sorted(enumerate(points), key=lambda pair: pair[0] != first)
        if one.configuration is not None
    ]
    return [position for *_, position in sorted(keys)]


MEMORY_RESOLUTION: Final = verdicts.MEMORY_MARGIN
"""Share of step memory below which two points count as equal."""

# A session that recomputes Dropout has generators of its own, which nothing can set back (onnxruntime 1.19.2).
_LOSSES_DIFFER: Final = "its rounds gave different losses: its dropout masks, or its data, were not the same"


@dataclass(frozen=True)
class Outcome(Timed):
    """A measured point against the baseline."""

    point: Point  #: The point
    #: Step time over that of the baseline, with its interval and what may be said of it; see `ortlab.records.verdicts`.
    time: TimeRatio
    memory_ratio: float  #: Step memory over the baseline's; nan where a side has none
    #: Largest relative difference of the losses, step by step, or None where losses are missing.
    loss_difference: float | None
    #: Whether no other point takes less time without more memory, or less memory without more time. Memory that differs
    #: by less than `MEMORY_RESOLUTION` counts as equal. A point that fell back is on no front.
    on_front: bool
    #: What a reader must know before believing the numbers: other data, fallback, ...
    remarks: tuple[str, ...]
    #: "less memory" or "more memory" than the baseline; empty where it is the same, or is not known.
    memory_verdict: str = ""

    @property
    def fell_back(self) -> bool:
        """Whether PyTorch executed any step of the point that ORT was asked for."""
        return self.point.fell_back

    @property
    def verdict(self) -> str:
        """Say in words what may be said about time; nothing else where the point fell back."""
        return FELL_BACK if self.fell_back else self.time.verdict

    @property
    def memory(self) -> str:
        """Say "less memory" or "more memory"; empty where it is the same, or is not known."""
        return "" if self.fell_back else self.memory_verdict

    @classmethod
    def of(cls, point: Point, base: Point, measured: Sequence[Point]) -> Outcome:
        """Hold a measured point against the baseline and against all that were measured."""
        time = TimeRatio(math.nan, math.nan, math.nan, "")
        apart, remarks = None, dict.fromkeys(caution for run in point.runs for caution in cautions(run))
        if point is base:
            time = TimeRatio(1.0, 1.0, 1.0, verdicts.NO_DIFFERENCE)
        elif base.measured:
            time = verdicts.compare_times(base.runs, point.runs)
            if time.verdict == verdicts.NOT_COMPARABLE and len(point.runs) == 1:
                time = replace(time, reason=f"one round, and {time.reason}")
        if base.measured:
            apart = comparison.loss_difference(base.runs[0], point.runs[0])
            if not all(comparison.same_losses(run, point.runs[0]) for run in point.runs):
                remarks[_LOSSES_DIFFER] = None
            remarks |= dict.fromkeys(
                remark for run in point.runs for remark in comparison.remarks(base.runs[0], run)
            )
        return cls(
            point,
            time,
            point.step_memory_bytes / base.step_memory_bytes if base.step_memory_bytes else math.nan,
            apart,
            not point.fell_back
            and not any(_dominates(other, point) for other in measured if not other.fell_back),
            tuple(remarks),
            verdicts.memory_verdict(_whole(base.step_memory_bytes), _whole(point.step_memory_bytes)),
        )


def _whole(size: float) -> int | None:
    return None if math.isnan(size) else int(size)


def _dominates(one: Point, other: Point) -> bool:
    """Tell whether a point takes less of something and more of nothing; without memory, time alone counts."""
    if math.isnan(one.step_memory_bytes + other.step_memory_bytes):
        return one.step_ms < other.step_ms
    no_larger = one.step_memory_bytes <= other.step_memory_bytes * (1 + MEMORY_RESOLUTION)
    smaller = one.step_memory_bytes < other.step_memory_bytes * (1 - MEMORY_RESOLUTION)
    return (one.step_ms < other.step_ms and no_larger) or (one.step_ms <= other.step_ms and smaller)


class Sweep(Shown, JsonRecord, noun="sweep", layout=1):
    """Points tried from one start; `Lab.sweep` makes it and fills it in, run by run.

    Attributes
    ----------
    number
        1, 2, ... in the order of the lab's sweeps; the sweep's runs carry it.
    model
        What the lab calls the model.
    points
        All points as they stand, in the order of the grid; number 0, if there is one, is the baseline.
    count
        Steps of each run.
    rounds
        Runs of each point.
    start_digest
        Digest of weights, buffers, optimizer and random state that every run starts from.
    """

    def __init__(
        self,
        number: int,
        model: str,
        points: Sequence[Point],
        *,
        baseline: int,
        count: int,
        rounds: int,
        start_digest: str,
    ) -> None:
        self.number = number
        self.model = model
        self.count = count
        self.rounds = rounds
        self.start_digest = start_digest
        self.points = list(points)
        self._baseline = baseline

    # ---- what is to be done -----------------------------------------------------------------------------------

    def missing(self) -> Iterator[tuple[int, int]]:
        """Go through the runs that are still to be made: number of the round from 1 on, position of the point."""
        # Every other round goes backwards: a steady drift of the machine then favours no point. Points with the same
        # export stand together, and within them those with the same graph, so that little is built more than once. The
        # last round ends with the baseline, whose session is then there for whatever the user does next.
        order = cheapest_order(self.points, self._baseline)
        for number in range(1, self.rounds + 1):
            if not self.runs_planned:
                return
            for position in reversed(order) if (self.rounds - number) % 2 == 0 else order:
                point = self.points[position]
                if not point.skipped and not point.failure and len(point.runs) < number:
                    yield number, position

    @property
    def runs_planned(self) -> int:
        """How many runs there are when all is done, points that failed left out."""
        return self.rounds * sum(not point.skipped and not point.failure for point in self.points)

    @property
    def runs_done(self) -> int:
        """How many of them have been made."""
        return sum(len(point.runs) for point in self.points if not point.failure)

    @property
    def complete(self) -> bool:
        """Whether no run is missing."""
        return next(self.missing(), None) is None

    def add(self, position: int, run: Run) -> None:
        """Write down a run of a point."""
        point = self.points[position]
        self.points[position] = replace(point, runs=(*point.runs, run))

    def fail(self, position: int, reason: str) -> None:
        """Write down that a point failed; it is not tried again."""
        self.points[position] = replace(self.points[position], failure=reason)

    # ---- what came out ----------------------------------------------------------------------------------------

    @property
    def baseline(self) -> Point:
        """The point that the others are held against."""
        return self.points[self._baseline]

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of what differs between the points, in the order of the grid."""
        named = dict.fromkeys(name for point in self.points for name in point.changes)
        last, absent = self.points[-1].changes, object()
        return tuple(
            name
            for name in named
            if any(point.changes.get(name, absent) != last.get(name, absent) for point in self.points)
        )

    @property
    def constants(self) -> Changes:
        """What all points change alike."""
        return {name: value for name, value in self.points[-1].changes.items() if name not in self.axes}

    def name(self, point: Point) -> str:
        """Name a point by what differs between the points."""
        words = [f"{axis}={_words(point.changes[axis])}" for axis in self.axes if axis in point.changes]
        return ", ".join(words) or "as the lab was set"

    def outcomes(self) -> tuple[Outcome, ...]:
        """Every measured point against the baseline, the fastest first."""
        measured = sorted((point for point in self.points if point.measured), key=lambda point: point.step_ms)
        return tuple(Outcome.of(point, self.baseline, measured) for point in measured)

    def table(self) -> pd.DataFrame:
        """One row per point in the order of the grid; columns for what differs, and ratios against the baseline.

        Returns
        -------
        pandas.DataFrame
            Indexed by the point's number; `table().sort_values("step [ms]")` sorts it.
        """
        import pandas as pd

        found = {id(outcome.point): outcome for outcome in self.outcomes()}
        rows = [self._row(point, found.get(id(point))) for point in self.points]
        return pd.DataFrame(rows).set_index("point")

    # ---- JSON -------------------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, Any]:
        return {name.lstrip("_"): value for name, value in super()._fields().items()}

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Sweep:
        sweep = super()._of_fields(fields)
        _ = sweep.baseline  # raises if its position is not there
        return sweep

    # ---- parts ------------------------------------------------------------------------------------------------

    def measured(self, point: Point, outcome: Outcome | None) -> dict[str, object]:
        """Return what was measured of a point, and why not: the columns of every table of points."""
        verdict = outcome.verdict if outcome else ""
        if outcome and point is self.baseline and not outcome.fell_back:
            verdict = "baseline"
        return {
            "state": point.state,
            "step [ms]": point.step_ms,
            "time ratio": outcome.time_ratio if outcome else math.nan,
            "low": outcome.time_low if outcome else math.nan,
            "high": outcome.time_high if outcome else math.nan,
            "verdict": verdict,
            "step memory [bytes]": point.step_memory_bytes,
            "memory ratio": outcome.memory_ratio if outcome else math.nan,
            "last loss": point.runs[-1].losses[-1] if outcome else None,
            "loss difference": outcome.loss_difference if outcome else None,
            "runs": tuple(run.number for run in point.runs),
            "reason": point.skipped or point.failure,
            "why not comparable": outcome.time.reason if outcome else "",
            "remarks": "; ".join(outcome.remarks) if outcome else "",
        }

    def _row(self, point: Point, outcome: Outcome | None) -> dict[str, object]:
        build = point.rebuilt
        return {
            "point": point.number,
            **{axis: point.value(axis) for axis in self.axes},
            **self.measured(point, outcome),
            "on the front": bool(outcome and outcome.on_front),
            "rebuilt from": build.stage if build else "",
            "rebuild [ms]": build.total_ms if build else 0.0,
            "rebuilds": len(point.builds),
        }


def _words(value: object) -> str:
    return (",".join(value) or "()") if isinstance(value, tuple) else str(value)
