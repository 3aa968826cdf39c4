"""What a sweep says about a point: its time and memory against the baseline's, and whether another beats it in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ortlab import comparison
from ortlab.cautions import FELL_BACK, cautions

if TYPE_CHECKING:
    from ortlab.sweeps.points import Point

MEMORY_RESOLUTION: Final = 0.01
"""Share of the peak below which two points count as equal: a process's heap breathes more than that by itself."""

# A session that recomputes Dropout has generators of its own, which nothing can set back (onnxruntime 1.19.2).
_LOSSES_DIFFER: Final = "its rounds gave different losses: its dropout masks, or its data, were not the same"


@dataclass(frozen=True)
class Outcome:
    """A measured point against the baseline.

    Attributes
    ----------
    point
        The point.
    time_ratio
        Median step time over that of the baseline, no unit; nan if the baseline was not measured.
    time_low, time_high
        Ends of its 95 % bootstrap confidence interval over the warm steps of all rounds; nan with fewer than 3 on a
        side.
    memory_ratio
        Peak memory over the baseline's; nan where a side has none.
    loss_difference
        Largest relative difference of the losses, step by step, or None where losses are missing.
    on_front
        Whether no other point takes less time without more memory, or less memory without more time. Memory that
        differs by less than `MEMORY_RESOLUTION` counts as equal. A point that fell back is on no front.
    remarks
        What a reader must know before believing the numbers: other data, fallback, ...
    """

    point: Point
    time_ratio: float
    time_low: float
    time_high: float
    memory_ratio: float
    loss_difference: float | None
    on_front: bool
    remarks: tuple[str, ...]

    @property
    def fell_back(self) -> bool:
        """Whether PyTorch executed any step of the point that ORT was asked for."""
        return self.point.fell_back

    @property
    def verdict(self) -> str:
        """Say in words what the interval allows to say about time; nothing where the point fell back."""
        return FELL_BACK if self.fell_back else comparison.verdict(self.time_low, self.time_high)

    @classmethod
    def of(cls, point: Point, base: Point, measured: Sequence[Point]) -> Outcome:
        """Hold a measured point against the baseline and against all that were measured."""
        low = high = math.nan
        apart, remarks = None, dict.fromkeys(caution for run in point.runs for caution in cautions(run))
        if point is base:
            low = high = 1.0
        elif base.measured:
            low, high = comparison.interval(
                [step.total_ms for step in point.warm_steps], [step.total_ms for step in base.warm_steps]
            )
        if base.measured:
            apart = comparison.loss_difference(base.runs[0], point.runs[0])
            if not all(comparison.same_losses(run, point.runs[0]) for run in point.runs):
                remarks[_LOSSES_DIFFER] = None
            remarks |= dict.fromkeys(
                remark for run in point.runs for remark in comparison.remarks(base.runs[0], run)
            )
        return cls(
            point,
            point.step_ms / base.step_ms,
            low,
            high,
            point.peak_bytes / base.peak_bytes,
            apart,
            not point.fell_back
            and not any(_dominates(other, point) for other in measured if not other.fell_back),
            tuple(remarks),
        )


def _dominates(one: Point, other: Point) -> bool:
    """Tell whether a point takes less of something and more of nothing; without memory, time alone counts."""
    if not one.peaks or not other.peaks:
        return one.step_ms < other.step_ms
    no_larger = one.peak_bytes <= other.peak_bytes * (1 + MEMORY_RESOLUTION)
    smaller = one.peak_bytes < other.peak_bytes * (1 - MEMORY_RESOLUTION)
    return (one.step_ms < other.step_ms and no_larger) or (one.step_ms <= other.step_ms and smaller)
