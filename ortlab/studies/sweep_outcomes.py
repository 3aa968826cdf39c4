"""What a sweep says about a point: its time and memory against the baseline's, and whether another beats it in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ortlab.records import comparison, verdicts
from ortlab.records.verdicts import FELL_BACK, Timed, TimeRatio, cautions

if TYPE_CHECKING:
    from ortlab.studies.sweep_points import Point

MEMORY_RESOLUTION: Final = verdicts.MEMORY_MARGIN
"""Share of step memory below which two points count as equal."""

# A session that recomputes Dropout has generators of its own, which nothing can set back (onnxruntime 1.19.2).
_LOSSES_DIFFER: Final = "its rounds gave different losses: its dropout masks, or its data, were not the same"


@dataclass(frozen=True)
class Outcome(Timed):
    """A measured point against the baseline.

    Attributes
    ----------
    point
        The point.
    time
        Step time over that of the baseline, with its interval and what may be said of it; see
        `ortlab.records.verdicts`.
    memory_ratio
        Step memory over the baseline's; nan where a side has none.
    loss_difference
        Largest relative difference of the losses, step by step, or None where losses are missing.
    on_front
        Whether no other point takes less time without more memory, or less memory without more time. Memory that
        differs by less than `MEMORY_RESOLUTION` counts as equal. A point that fell back is on no front.
    remarks
        What a reader must know before believing the numbers: other data, fallback, ...
    memory_verdict
        "less memory" or "more memory" than the baseline; empty where it is the same, or is not known.
    """

    point: Point
    time: TimeRatio
    memory_ratio: float
    loss_difference: float | None
    on_front: bool
    remarks: tuple[str, ...]
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
