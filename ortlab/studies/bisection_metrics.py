"""What a bisection is about: how a change is measured, when there is one, and which sets of changes show it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.records.runs import Run

if TYPE_CHECKING:
    from ortlab.studies.bisection_trials import Trial

LOSS: Final = "loss"
PARITY: Final = "parity"
STEP_MS: Final = "step_ms"
PEAK_BYTES: Final = "peak_bytes"
METRICS: Final = (LOSS, PARITY, STEP_MS, PEAK_BYTES)

SHARE: Final = 0.5
"""Share of the whole change that a set must show to be taken for its cause; of a ratio, on the logarithmic scale."""

FLOORS: Final = 3.0
"""A change counts from so many times what two equal runs differ by."""

CONFIDENCE: Final = 0.95

Own = Callable[[Run], float]

_TOLERANCE: Final = {LOSS: 1e-5, PARITY: 1e-4, STEP_MS: 0.02, PEAK_BYTES: 0.02}


@dataclass(frozen=True)
class Metric:
    """How a change is measured.

    Attributes
    ----------
    name
        "loss", "parity", "step_ms", "peak_bytes", or the name of the user's function.
    tolerance
        Changes up to this are none: relative, but for a function of the user's, whose unit it has.
    own
        The user's function.
    """

    name: str
    tolerance: float
    own: Own | None = None

    @classmethod
    def read(cls, metric: str | Own, tolerance: float | None) -> Metric:
        """Read what the user gave.

        Raises
        ------
        OptionError
            If there is no such metric, or the tolerance is no number from 0 on.
        """
        if tolerance is not None and (
            isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0
        ):
            raise OptionError(
                f"The tolerance must be a number from 0 on, not {tolerance!r}.",
                fix='lab.bisect("loss", tolerance=1e-5).',
            )
        if isinstance(metric, str) and metric in METRICS:
            return cls(metric, _TOLERANCE[metric] if tolerance is None else float(tolerance))
        if isinstance(metric, str) or not callable(metric):
            raise OptionError(
                f"There is no metric {metric!r}.",
                fix=f"Give one of {', '.join(METRICS)}, or a function that takes a run and returns a number.",
            )
        name = getattr(metric, "__name__", type(metric).__name__)
        return cls(name, 0.0 if tolerance is None else float(tolerance), metric)

    @property
    def is_ratio(self) -> bool:
        """Whether a trial is measured as a ratio to the baseline, whose value is 1."""
        return self.own is None and self.name in (STEP_MS, PEAK_BYTES)

    def floor(self, equal: Sequence[float]) -> float:
        """Return what equal runs differ by.

        Parameters
        ----------
        equal
            Values of trials of the baseline.
        """
        return max((self.size(value, equal[0]) for value in equal), default=0.0)

    def size(self, value: float, base: float) -> float:
        """Return how far a value is from the baseline's: 0 for none, infinite if only one of them is a number."""
        if self.is_ratio:
            return abs(math.log(value)) if value > 0 else math.inf
        if value == base or (math.isnan(value) and math.isnan(base)):
            return 0.0
        return abs(value - base) if math.isfinite(value) and math.isfinite(base) else math.inf

    def least(self, base: float, floor: float) -> float:
        """Return the size up to which a change is none."""
        own = math.log1p(self.tolerance) if self.is_ratio else self.tolerance
        # Against PyTorch the baseline has a distance of its own, and a run as far as that is no worse than it.
        grown = base if self.name == PARITY and self.own is None and math.isfinite(base) else 0.0
        return max(own, FLOORS * floor, grown)

    def is_change(self, whole: Trial, base: float, floor: float) -> bool | None:
        """Tell whether all changes together change anything; None if the noise does not let it be told."""
        assert whole.value is not None  # noqa: S101 - a trial that failed has no value to be asked for
        if self.size(whole.value, base) <= self.least(base, floor):
            return False
        if self.name == STEP_MS and self.own is None:
            return True if _beyond(whole, 1.0) else None
        return True

    def shows(self, trial: Trial, whole: Trial, base: float, floor: float) -> bool | None:
        """Tell whether a set of changes shows the change of all of them together; None if noise hides it."""
        assert trial.value is not None  # noqa: S101 - as above
        assert whole.value is not None  # noqa: S101 - as above
        if not self.is_ratio:
            limit = max(self.least(base, floor), SHARE * self.size(whole.value, base))
            size = self.size(trial.value, base)
            return size > limit or (math.isinf(size) and math.isinf(limit))
        middle = math.exp(SHARE * math.log(whole.value))
        return (trial.value > middle) == (whole.value > 1) if _beyond(trial, middle) else None


def _beyond(trial: Trial, value: float) -> bool:
    """Tell whether the interval of a trial, or where it has none its value, lies on one side of a value."""
    low, high = trial.low, trial.high
    if low is None or high is None:
        low = high = trial.value
    assert low is not None  # noqa: S101 - the caller has a value
    assert high is not None  # noqa: S101 - as above
    return not math.isnan(low + high) and not low <= value <= high


def ratio_of_pairs(values: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the ratios of pairs, with the ends of its 95 % t interval.

    Parameters
    ----------
    values, base
        Times of runs that were made as neighbours, so that a drift of the machine is in both of a pair.

    Returns
    -------
    ratio, low, high : float
        The ends are nan for a single pair.
    """
    from scipy.stats import t

    logs = [math.log(one / other) for one, other in zip(values, base, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:  # noqa: PLR2004 - n - 1
        return math.exp(mean), math.nan, math.nan
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1))
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
