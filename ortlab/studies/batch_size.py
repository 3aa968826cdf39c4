"""A search for a batch size: what was tried under a limit of memory, what comes next, and which is fastest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from ortlab.memory.plan import RECOMPUTE_IS
from ortlab.records.record_files import JsonRecord
from ortlab.records.runs import Run, Step  # noqa: TC001 - asked for when a record is read
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

Plans = tuple[str, ...]
"""What is recomputed, each as a plan's table has it: "Gelu+:1:-1", "recompute=layers"; () for nothing."""

FITS: Final = "fits"
OVER: Final = "over the limit"
"""It ran, and needed more than the limit."""
RAN_OUT: Final = "ran out of memory"
PREDICTED: Final = "not run"
"""It is predicted to need more than the limit, or than the machine has left."""
FELL_BACK: Final = "fell back"
"""PyTorch executed it, though ONNX Runtime was asked for."""
FAILED: Final = "failed"

TOO_LARGE: Final = frozenset({OVER, RAN_OUT, PREDICTED})
"""Outcomes that less memory would repair."""


@dataclass(frozen=True)
class BatchSizePoint:
    """One batch size under one set of plans."""

    size: int  #: Samples in the batch
    plans: Plans  #: What is recomputed: "Gelu+:1:-1", "recompute=layers"; () for nothing
    outcome: str  #: "fits", "over the limit", "ran out of memory", "not run", "fell back" or "failed"
    reason: str = ""  #: Why it does not fit, or was not run; "" if it fits
    #: What it was predicted to need, from smaller batches and before it ran, of that which is limited: step memory, or
    #: the whole device. None if there was nothing to predict from.
    predicted_bytes: float | None = None
    #: Peak of the process or device that was measured, in bytes, without the copy of weights that the search keeps;
    #: None if it did not run to its end.
    peak_bytes: int | None = None
    #: How far that is above what was held at the start of the last step; None likewise.
    step_memory_bytes: int | None = None
    #: What was measured: "resident set, large buffers mapped", "resident set" or "CUDA allocated"; "" without a peak.
    kind: str = ""
    #: The timed runs, one for each round that is done; their own peaks are those of an ordinary heap.
    runs: tuple[Run, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it ran to its end under the limit, executed by the engine that was asked for."""
        return self.outcome == FITS

    @property
    def timed(self) -> bool:
        """Whether its pace was measured."""
        return self.fits and bool(self.runs)

    @property
    def warm_steps(self) -> tuple[Step, ...]:
        """The warm steps of all rounds; see `Run.warm_steps`."""
        return tuple(step for run in self.runs for step in run.warm_steps)

    @property
    def sample_ms(self) -> tuple[float, ...]:
        """Time of each warm step by its samples, in ms; empty if it was not timed."""
        return tuple(step.total_ms / self.size for step in self.warm_steps) if self.timed else ()

    @property
    def samples_per_s(self) -> float:
        """Median over the warm steps of all rounds; nan if it was not timed."""
        return 1000 / statistics.median(self.sample_ms) if self.timed else math.nan

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the samples per second over the warm steps; nan if it was not timed."""
        paces = [1000 / time for time in self.sample_ms]
        if not paces:
            return math.nan, math.nan
        if len(paces) == 1:
            return paces[0], paces[0]
        low, _, high = statistics.quantiles(paces, n=4, method="inclusive")
        return low, high

    @property
    def ordinary_peak_bytes(self) -> int | None:
        """Highest peak of the timed runs, in bytes, as the process or device itself saw it; None without one."""
        return max((run.memory.peak_bytes for run in self.runs if run.memory), default=None)


def plans_name(plans: Plans) -> str:
    """Name what is recomputed: "Gelu", "FusedMatMul -> Add, Dropout", "layers:1/2"; "no plan" for nothing."""
    names = [
        one.removeprefix(RECOMPUTE_IS)
        if one.startswith(RECOMPUTE_IS)
        else part.split(":")[0].rstrip("+").replace("+", " -> ")
        for one in plans
        for part in one.split(",")
    ]
    return ", ".join(dict.fromkeys(names)) or "no plan"


Measured = Sequence[tuple[int, float]]
"""Batch sizes and their measured peaks in bytes."""


def predicted_peak(size: int, measured: Measured, without_plans: Measured = ()) -> float | None:
    """Predict the peak of a batch in bytes: activations grow with it, weights and the process itself do not."""
    # It lies on the straight line (least squares) through `measured`, smaller batches with the same plans. If there is
    # only one of them, the line through `without_plans` says where theirs starts. None if that has fewer than two
    # batches, or nothing was measured with the plans.
    if len(measured) > 1:
        start, slope = _line(measured)
    elif measured and len(without_plans) > 1:
        (known, peak), (start, _) = measured[0], _line(without_plans)
        start = min(start, peak)
        slope = (peak - start) / known
    else:
        return None
    return start + slope * size


def most_of(size: int, start_bytes: float, known_size: int, known_peak_bytes: float) -> float:
    """Return the most bytes that a batch can take if one smaller batch is known: all of its rise grows with the batch.

    `start_bytes` is the level before the step.
    """
    return start_bytes + max(0.0, known_peak_bytes - start_bytes) * size / known_size


def _line(measured: Measured) -> tuple[float, float]:
    """Fit start and slope, which is never negative: no batch needs less than a smaller one."""
    sizes, peaks = [size for size, _ in measured], [peak for _, peak in measured]
    middle, height = sum(sizes) / len(sizes), sum(peaks) / len(peaks)
    spread = sum((size - middle) ** 2 for size in sizes)
    slope = sum((size - middle) * (peak - height) for size, peak in measured) / spread if spread else 0.0
    slope = max(0.0, slope)
    return height - slope * middle, slope


@dataclass(eq=False, repr=False)
class BatchSizeSearch(Shown, JsonRecord, noun="search", layout=2):
    """Batch sizes tried under a limit; `Lab.find_batch_size` makes it and fills it in, point by point."""

    #: 1, 2, ... in the order of the lab's searches.
    number: int
    model: str  #: What the lab calls the model
    engine: str  #: Who was asked to execute it
    device: str  #: "cpu", "cuda:0", ...
    #: The limit: of step memory, which is what a step needs above its start, or of the whole device.
    asked_bytes: int
    #: Whether the limit is of all that the process holds (on a CPU) or torch's allocator hands out (on CUDA).
    of_device: bool
    sizes: tuple[int, ...] | None  #: Batch sizes to try, going up; None for powers of two from 1
    #: Sets of plans to try where a size does not fit without; None as long as they are not chosen.
    plan_sets: tuple[Plans, ...] | None
    steps: int  #: Timed steps of each run
    rounds: int  #: Timed runs of each point
    #: Digest of weights, buffers, optimizer state and random state that every run starts from.
    start_digest: str
    kept_bytes: int  #: What the search's own copy of that start takes; it is taken off every measured peak
    versions: dict[str, str]  #: Versions of torch, onnxruntime and others that it was made with
    #: What the process or device was seen to hold at the start of a step, without that copy.
    held_bytes: int = 0
    points: list[BatchSizePoint] = field(default_factory=list)  #: What was tried, in order
    #: Whether the user interrupted it; `lab.find_batch_size(make_batch, resume=...)` goes on.
    stopped: bool = False

    # ---- filling ----------------------------------------------------------------------------------------------

    def add(self, point: BatchSizePoint) -> None:
        """Write down a point; one of the same size and plans is replaced."""
        for position, known in enumerate(self.points):
            if (known.size, known.plans) == (point.size, point.plans):
                self.points[position] = point
                return
        self.points.append(point)

    def add_run(self, size: int, plans: Plans, run: Run) -> None:
        """Write down a timed run of a point."""
        point = self.point(size, plans)
        assert point is not None  # noqa: S101 - only points that fit are timed
        self.add(replace(point, runs=(*point.runs, run)))

    @property
    def limit_bytes(self) -> int:
        """What the whole process or device may hold: with a limit of step memory, what it holds anyway besides."""
        return self.asked_bytes if self.of_device else self.held_bytes + self.asked_bytes

    @property
    def limit_of(self) -> str:
        """What the limit is of: "step memory", "the whole process" or "the whole device"."""
        if not self.of_device:
            return "step memory"
        return "the whole process" if self.device == "cpu" else "the whole device"

    def needed(self, point: BatchSizePoint) -> int | None:
        """Return what a point was measured to need of that which is limited, in bytes; None if it did not run."""
        return point.peak_bytes if self.of_device else point.step_memory_bytes

    # ---- what came out ----------------------------------------------------------------------------------------

    def point(self, size: int, plans: Plans = ()) -> BatchSizePoint | None:
        """Return a point; None if it was not tried."""
        return next((one for one in self.points if (one.size, one.plans) == (size, plans)), None)

    def measured(self, plans: Plans, below: int | None = None) -> list[tuple[int, float]]:
        """Return sizes and what they were measured to need under some plans, of sizes below one."""
        return [
            (one.size, float(needed))
            for one in self.points
            if one.plans == plans
            and (needed := self.needed(one)) is not None
            and (below is None or one.size < below)
        ]

    def predicted(self, size: int, plans: Plans) -> float | None:
        """Predict what a size needs from those measured below it, in bytes; None if they do not suffice."""
        without = self.measured((), size) if plans else ()
        return predicted_peak(size, self.measured(plans, size), without)

    def largest(self, plans: Plans) -> BatchSizePoint | None:
        """Return the largest batch that fits under some plans; None if none does."""
        return max(
            (one for one in self.points if one.plans == plans and one.fits),
            key=lambda one: one.size,
            default=None,
        )

    @property
    def best(self) -> BatchSizePoint | None:
        """The point with the most samples per second of those that fit; None if none was timed."""
        return max((one for one in self.points if one.timed), key=lambda one: one.samples_per_s, default=None)

    @property
    def best_with_plans(self) -> BatchSizePoint | None:
        """The fastest point whose batch fits with plans only; None if there is none."""
        alone = self.largest(())
        larger = [
            one for one in self.points if one.timed and one.plans and (alone is None or one.size > alone.size)
        ]
        return max(larger, key=lambda one: one.samples_per_s, default=None)

    def pace_ratio(self, point: BatchSizePoint, base: BatchSizePoint) -> tuple[float, float, float]:
        """Hold the samples per second of two points against each other.

        Returns
        -------
        ratio, low, high : float
            Above 1 if `point` is faster; the ends of the 95 % bootstrap confidence interval over warm steps are nan
            with fewer than 3 of them on a side.
        """
        from ortlab.records.verdicts import interval

        low, high = interval(
            base.sample_ms, point.sample_ms
        )  # times by the sample, so the quotient is turned round
        return point.samples_per_s / base.samples_per_s, low, high

    def table(self) -> pd.DataFrame:
        """One row per point, in the order in which they were tried; sizes in bytes."""
        import pandas as pd

        rows = [
            {
                "batch": one.size,
                "plans": ",".join(one.plans),
                "outcome": one.outcome,
                "needed, predicted [bytes]": one.predicted_bytes,
                "needed, measured [bytes]": self.needed(one),
                "step memory [bytes]": one.step_memory_bytes,
                "peak of the process [bytes]": one.peak_bytes,
                "samples/s": one.samples_per_s,
                "low quartile": one.spread[0],
                "high quartile": one.spread[1],
                "peak of the timed runs [bytes]": one.ordinary_peak_bytes,
                "runs": len(one.runs),
                "reason": one.reason,
            }
            for one in self.points
        ]
        return pd.DataFrame(rows)


LARGEST: Final = 1 << 20
"""The largest power of two that is tried."""


@dataclass(frozen=True)
class Task:
    """One thing to do."""

    kind: str  # "try" a point and measure its peak, "time" one that fits, or "choose" the sets of plans
    size: int = 0  # 0 for a choice
    plans: Plans = ()
    round: int = 0  # of a timed run, from 1


def following(search: BatchSizeSearch) -> Task | None:
    """Return the next task; None if the search is complete.

    1. Without plans, sizes go up until one does not fit.
    2. With each set of plans: the largest size that fits without them, from which the next is predicted; then that
       next size, and on until one does not fit.
    3. Every point that fits is timed, in rounds; every other round goes backwards, so that a drift of the machine
       favours no point.
    """
    task = _climb(search, (), from_size=None)
    if task is not None:
        return task
    misfit = first_misfit(search)
    if misfit is not None and misfit.outcome in TOO_LARGE:
        if search.plan_sets is None:
            return Task("choose")
        alone = search.largest(())
        for plans in search.plan_sets:
            task = _climb(search, plans, from_size=misfit.size if alone is None else alone.size)
            if task is not None:
                return task
    return _round(search)


def first_misfit(search: BatchSizeSearch) -> BatchSizePoint | None:
    """Return the smallest size that does not fit without plans; None if all fit that were tried."""
    return next((one for one in search.points if not one.plans and not one.fits), None)


def sizes_of(search: BatchSizeSearch) -> Iterator[int]:
    """Yield the sizes that may be tried, in ascending order."""
    if search.sizes is not None:
        yield from search.sizes
        return
    size = 1
    while size <= LARGEST:
        yield size
        size *= 2


def remaining(search: BatchSizeSearch) -> int:
    """Count the timed runs that the points found so far still need."""
    return sum(max(0, search.rounds - len(one.runs)) for one in search.points if one.fits)


def _climb(search: BatchSizeSearch, plans: Plans, *, from_size: int | None) -> Task | None:
    for size in sizes_of(search):
        if from_size is not None and size < from_size:
            continue
        point = search.point(size, plans)
        if point is None:
            return Task("try", size, plans)
        if not point.fits:
            return None
    return None


def _round(search: BatchSizeSearch) -> Task | None:
    order = [one for one in search.points if one.fits]
    for number in range(1, search.rounds + 1):
        for point in order if number % 2 else reversed(order):
            if len(point.runs) < number:
                return Task("time", point.size, point.plans, number)
    return None
