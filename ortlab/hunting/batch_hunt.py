"""A hunt: batch sizes and plans that were tried under a limit of memory, and which of them is fastest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ortlab.hunting.points import HuntPoint, Plans, plans_name
from ortlab.hunting.prediction import predicted_peak
from ortlab.record_files import JsonRecord

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.runs import Run


@dataclass(eq=False, repr=False)
class BatchHunt(JsonRecord, noun="hunt", layout=1):
    """Batch sizes tried under a limit; `Lab.hunt_batch` makes it and fills it in, point by point.

    Attributes
    ----------
    number
        1, 2, ... in the order of the lab's hunts.
    model
        What the lab calls the model.
    engine
        Who was asked to execute it.
    device
        "cpu", "cuda:0", ...
    limit_bytes
        What the peak may reach: on a CPU the resident set of the process, on CUDA what torch's allocator hands out.
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
        What the hunt's own copy of that start takes; it is taken off every measured peak.
    versions
        Versions of torch, onnxruntime and others that it was made with.
    points
        What was tried, in order.
    stopped
        Whether the user interrupted it; `lab.hunt_batch(make_batch, resume=...)` goes on.
    """

    number: int
    model: str
    engine: str
    device: str
    limit_bytes: int
    sizes: tuple[int, ...] | None
    plan_sets: tuple[Plans, ...] | None
    steps: int
    rounds: int
    start_digest: str
    kept_bytes: int
    versions: dict[str, str]
    points: list[HuntPoint] = field(default_factory=list)
    stopped: bool = False

    # ---- filling ----------------------------------------------------------------------------------------------

    def add(self, point: HuntPoint) -> None:
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

    # ---- what came out ----------------------------------------------------------------------------------------

    def point(self, size: int, plans: Plans = ()) -> HuntPoint | None:
        """Return a point; None if it was not tried."""
        return next((one for one in self.points if (one.size, one.plans) == (size, plans)), None)

    def measured(self, plans: Plans, below: int | None = None) -> list[tuple[int, float]]:
        """Return sizes and measured peaks under some plans, of sizes below one."""
        return [
            (one.size, float(one.peak_bytes))
            for one in self.points
            if one.plans == plans and one.peak_bytes is not None and (below is None or one.size < below)
        ]

    def predicted(self, size: int, plans: Plans) -> float | None:
        """Predict the peak of a size from those measured below it, in bytes; None if they do not suffice."""
        without = self.measured((), size) if plans else ()
        return predicted_peak(size, self.measured(plans, size), without)

    def largest(self, plans: Plans) -> HuntPoint | None:
        """Return the largest batch that fits under some plans; None if none does."""
        return max((one for one in self.points if one.plans == plans and one.fits), key=_size, default=None)

    @property
    def best(self) -> HuntPoint | None:
        """The point with the most samples per second of those that fit; None if none was timed."""
        return max((one for one in self.points if one.timed), key=lambda one: one.samples_per_s, default=None)

    @property
    def best_with_plans(self) -> HuntPoint | None:
        """The fastest point whose batch fits with plans only; None if there is none."""
        alone = self.largest(())
        larger = [
            one for one in self.points if one.timed and one.plans and (alone is None or one.size > alone.size)
        ]
        return max(larger, key=lambda one: one.samples_per_s, default=None)

    def pace_ratio(self, point: HuntPoint, base: HuntPoint) -> tuple[float, float, float]:
        """Hold the samples per second of two points against each other.

        Returns
        -------
        ratio, low, high : float
            Above 1 if `point` is faster; the ends of the 95 % bootstrap confidence interval over warm steps are nan
            with fewer than 3 of them on a side.
        """
        from ortlab.comparison import interval

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
                "peak, predicted [bytes]": one.predicted_bytes,
                "peak, measured [bytes]": one.peak_bytes,
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
    def _of_fields(cls, fields: dict[str, Any]) -> BatchHunt:
        sizes, sets = fields["sizes"], fields["plan_sets"]
        read = {
            "points": [HuntPoint.from_dict(point) for point in fields["points"]],
            "sizes": None if sizes is None else tuple(sizes),
            "plan_sets": None if sets is None else tuple(tuple(plans) for plans in sets),
        }
        return cls(**{**fields, **read})

    def __repr__(self) -> str:
        """Show the limit, how much was tried, and the best point."""
        best = self.best
        found = f"best: batch {best.size}, {plans_name(best.plans)}" if best else "nothing timed"
        limit = f"limit {self.limit_bytes:,} bytes"
        return f"BatchHunt({self.number}: {self.model}, {limit}, {len(self.points)} points, {found})"


def _size(point: HuntPoint) -> int:
    return point.size
