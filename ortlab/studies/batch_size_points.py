"""The points of a search: a batch size under a set of plans, its predicted and measured memory, and its pace."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ortlab.records.runs import Run, Step

Plans = tuple[str, ...]
"""Recompute plans as `Options.memory_plan` takes them; () for none."""

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
"""Outcomes that less memory would mend."""


@dataclass(frozen=True)
class BatchSizePoint:
    """One batch size under one set of plans.

    Attributes
    ----------
    size
        Samples in the batch.
    plans
        The recompute plans; () for none.
    outcome
        "fits", "over the limit", "ran out of memory", "not run", "fell back" or "failed".
    reason
        Why it does not fit, or was not run; "" if it fits.
    predicted_bytes
        What it was predicted to need, from smaller batches and before it ran, of that which is limited: step memory, or
        the whole device. None if there was nothing to predict from.
    peak_bytes
        Peak of the process or device that was measured, in bytes, without the copy of weights that the search keeps;
        None if it did not run to its end.
    step_memory_bytes
        How far that is above what was held at the start of the last step; None likewise.
    kind
        What was measured: "resident set, large buffers mapped", "resident set" or "CUDA allocated"; "" without a peak.
    runs
        The timed runs, one for each round that is done; their own peaks are those of an ordinary heap.
    """

    size: int
    plans: Plans
    outcome: str
    reason: str = ""
    predicted_bytes: float | None = None
    peak_bytes: int | None = None
    step_memory_bytes: int | None = None
    kind: str = ""
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, readable by `from_dict`."""
        return {**vars(self), "plans": list(self.plans), "runs": [run.to_dict() for run in self.runs]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BatchSizePoint:
        """Rebuild a point from `to_dict`; a missing field raises KeyError or TypeError."""
        runs = tuple(Run.from_dict(run) for run in data["runs"])
        return cls(**{**data, "plans": tuple(data["plans"]), "runs": runs})


def plans_name(plans: Plans) -> str:
    """Name a set of plans by what it recomputes: "Gelu", "FusedMatMul -> Add, Dropout"; "no plan" for none."""
    clusters = [
        part.split(":")[0].rstrip("+").replace("+", " -> ") for one in plans for part in one.split(",")
    ]
    return ", ".join(dict.fromkeys(clusters)) or "no plan"
