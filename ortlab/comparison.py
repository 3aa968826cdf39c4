"""Runs held against a baseline run: time ratios with confidence intervals, memory, loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlab.cautions import FELL_BACK, cautions
from ortlab.coverage import names
from ortlab.errors import LedgerError

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.runs import Run

CONFIDENCE = 0.95
RESAMPLES = 2000
MINIMUM_STEPS = 3
"""Warm steps that a confidence interval needs; with fewer, the interval is not a number."""


@dataclass(frozen=True)
class Contrast:
    """One run against the baseline.

    Attributes
    ----------
    run
        The run.
    time_ratio
        Median step time of the run over that of the baseline, no unit; 0.9 is a tenth less time.
    time_low, time_high
        Ends of the 95 % bootstrap confidence interval of `time_ratio`; nan with fewer than 3 warm steps on a side.
    memory_ratio
        Peak memory over the baseline's, or None where a side has none or measured another kind.
    loss_difference
        Largest relative difference of the losses, step by step, or None where losses are missing.
    remarks
        What a reader must know before believing the numbers: other data, other start, fallback, ...
    fell_back
        Whether PyTorch executed any step of the run or of the baseline that ORT was asked for.
    """

    run: Run
    time_ratio: float
    time_low: float
    time_high: float
    memory_ratio: float | None
    loss_difference: float | None
    remarks: tuple[str, ...]
    fell_back: bool = False

    @property
    def verdict(self) -> str:
        """Say in words what the interval allows to say about time; nothing where a side fell back."""
        return FELL_BACK if self.fell_back else verdict(self.time_low, self.time_high)


@dataclass(frozen=True)
class Comparison:
    """A baseline run and the runs held against it."""

    baseline: Run
    contrasts: tuple[Contrast, ...]

    def table(self) -> pd.DataFrame:
        """One row per run, the baseline first; ratios are against the baseline."""
        import pandas as pd

        rows: list[dict[str, object]] = [_row(self.baseline, None)]
        rows += [_row(contrast.run, contrast) for contrast in self.contrasts]
        return pd.DataFrame(rows)


def compare(runs: Sequence[Run], baseline: Run | None = None) -> Comparison:
    """Hold runs against a baseline (the first one if none is named).

    The interval is a percentile bootstrap of the ratio of medians over warm steps (`scipy.stats.bootstrap`,
    2000 resamples, seeded, so that the same runs give the same interval). The runs were taken one after another, so
    a drift of the machine between them is not in the interval.

    Raises
    ------
    LedgerError
        If there is nothing to compare.
    """
    if not runs:
        raise LedgerError("There is no run to compare.", fix="Run a step first: %%ort_step, or lab.step(fn).")
    base = baseline if baseline is not None else runs[0]
    others = [run for run in runs if run is not base]
    if not others:
        raise LedgerError(
            "There is only one run, so there is nothing to compare it with.",
            fix="Change an option and rerun: lab.set(...), lab.rerun().",
        )
    return Comparison(base, tuple(_contrast(base, run) for run in others))


def verdict(low: float, high: float) -> str:
    """Say in words what the confidence interval of a ratio of times allows to say; nan where there is none."""
    if math.isnan(low):
        return "too few steps to tell"
    if high < 1.0:
        return "faster"
    if low > 1.0:
        return "slower"
    return "no difference shown"


def _contrast(base: Run, run: Run) -> Contrast:
    low, high = interval([s.total_ms for s in run.warm_steps], [s.total_ms for s in base.warm_steps])
    memory = None
    if (
        run.memory
        and base.memory
        and (run.memory.kind, run.memory.scope) == (base.memory.kind, base.memory.scope)
    ):
        memory = run.memory.peak_bytes / base.memory.peak_bytes
    return Contrast(
        run,
        run.step_ms / base.step_ms,
        low,
        high,
        memory,
        loss_difference(base, run),
        tuple(remarks(base, run)),
        base.fell_back or run.fell_back,
    )


def interval(values: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % bootstrap confidence interval of a ratio of medians.

    Parameters
    ----------
    values, base
        Times of warm steps, in any one unit.

    Returns
    -------
    low, high : float
        Both nan with fewer than 3 times on a side.
    """
    if min(len(values), len(base)) < MINIMUM_STEPS:
        return math.nan, math.nan
    import numpy as np
    from scipy.stats import bootstrap

    def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(np.median(a, axis=axis) / np.median(b, axis=axis))

    result = bootstrap(
        (np.asarray(values), np.asarray(base)),
        ratio,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        paired=False,
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def loss_difference(base: Run, run: Run) -> float | None:
    """Return the largest relative difference of the losses, step by step; None where no step has both.

    Losses that are both nan, or both infinite with one sign, are equal; one of them alone is infinitely far.
    """
    pairs = [(a, b) for a, b in zip(base.losses, run.losses, strict=False) if a is not None and b is not None]
    if not pairs:
        return None
    return max(_apart(a, b) for a, b in pairs)


def same_losses(one: Run, other: Run) -> bool:
    """Tell whether two runs have the same losses, step by step; a loss that is nan is the same as another."""
    return len(one.losses) == len(other.losses) and all(
        a == b or (a is not None and b is not None and _apart(a, b) == 0.0)
        for a, b in zip(one.losses, other.losses, strict=True)
    )


def _apart(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def remarks(base: Run, run: Run) -> list[str]:
    """Say what a reader must know before believing a comparison of two runs; usually nothing."""
    found = [f"run {one.number} {caution}" for one in (base, run) for caution in cautions(one)]
    found += [
        f"run {one.number} did not call the wrapped part {names(one.coverage.uncalled)}"
        for one in (base, run)
        if one.coverage.called and one.coverage.uncalled
    ]
    if run.start_digest != base.start_digest:
        found.append("other start: weights, optimizer or random state differ")
    if run.mode != base.mode:
        found.append(f"other mode: {run.mode} and {base.mode}")
    if run.data_digest != base.data_digest:
        found.append("other data: the model did not see the same inputs")
    if len(run.steps) != len(base.steps):
        found.append(f"other number of steps: {len(run.steps)} and {len(base.steps)}")
    if run.device != base.device:
        found.append(f"other device: {run.device} and {base.device}")
    return found


def _row(run: Run, contrast: Contrast | None) -> dict[str, object]:
    warm = run.warm_steps
    return {
        "run": run.title,
        "step [ms]": run.step_ms,
        "forward [ms]": statistics.median(s.forward_ms for s in warm),
        "backward [ms]": statistics.median(s.backward_ms for s in warm),
        "optimizer [ms]": statistics.median(s.optimizer_ms for s in warm),
        "time ratio": contrast.time_ratio if contrast else 1.0,
        "low": contrast.time_low if contrast else 1.0,
        "high": contrast.time_high if contrast else 1.0,
        "verdict": contrast.verdict if contrast else "baseline",
        "peak [bytes]": run.memory.peak_bytes if run.memory else None,
        "memory ratio": contrast.memory_ratio if contrast else 1.0,
        "last loss": run.losses[-1],
        "loss difference": contrast.loss_difference if contrast else 0.0,
        "remarks": "; ".join(contrast.remarks) if contrast else "",
    }
