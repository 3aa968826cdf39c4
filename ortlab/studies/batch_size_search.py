"""A search: batch sizes and plans that were tried under a limit of memory, and which of them is fastest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown
from ortlab.studies.batch_size_points import BatchSizePoint, Plans
from ortlab.studies.batch_size_prediction import predicted_peak

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.records.runs import Run


@dataclass(eq=False, repr=False)
class BatchSizeSearch(Shown, JsonRecord, noun="search", layout=2):
    """Batch sizes tried under a limit; `Lab.find_batch_size` makes it and fills it in, point by point.

    Attributes
    ----------
    number
        1, 2, ... in the order of the lab's searches.
    model
        What the lab calls the model.
    engine
        Who was asked to execute it.
    device
        "cpu", "cuda:0", ...
    asked_bytes
        The limit: of step memory, which is what a step needs above its start, or of the whole device.
    of_device
        Whether the limit is of all that the process holds (on a CPU) or torch's allocator hands out (on CUDA).
    sizes
        Batch sizes to try, going up; None for powers of two from 1.
    plan_sets
        Sets of plans to try where a size does not fit without; None as long as they are not chosen.
    steps
        Timed steps of each run.
    rounds
        Timed runs of each point.
    start_digest
        Digest of weights, buffers, optimizer state and random state that every run starts from.
    kept_bytes
        What the search's own copy of that start takes; it is taken off every measured peak.
    held_bytes
        What the process or device was seen to hold at the start of a step, without that copy.
    versions
        Versions of torch, onnxruntime and others that it was made with.
    points
        What was tried, in order.
    stopped
        Whether the user interrupted it; `lab.find_batch_size(make_batch, resume=...)` goes on.
    """

    number: int
    model: str
    engine: str
    device: str
    asked_bytes: int
    of_device: bool
    sizes: tuple[int, ...] | None
    plan_sets: tuple[Plans, ...] | None
    steps: int
    rounds: int
    start_digest: str
    kept_bytes: int
    versions: dict[str, str]
    held_bytes: int = 0
    points: list[BatchSizePoint] = field(default_factory=list)
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
        return max((one for one in self.points if one.plans == plans and one.fits), key=_size, default=None)

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

    # ---- JSON -------------------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, Any]:
        return {
            **vars(self),
            "sizes": None if self.sizes is None else list(self.sizes),
            "plan_sets": None if self.plan_sets is None else [list(plans) for plans in self.plan_sets],
            "points": [point.to_dict() for point in self.points],
        }

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> BatchSizeSearch:
        sizes, sets = fields["sizes"], fields["plan_sets"]
        read = {
            "points": [BatchSizePoint.from_dict(point) for point in fields["points"]],
            "sizes": None if sizes is None else tuple(sizes),
            "plan_sets": None if sets is None else tuple(tuple(plans) for plans in sets),
        }
        return cls(**{**fields, **read})


def _size(point: BatchSizePoint) -> int:
    return point.size
