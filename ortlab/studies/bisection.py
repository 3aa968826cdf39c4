"""A bisection: which switches cause a change, how that is measured, what was run to find out, and what it says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.errors import OptionError
from ortlab.options.options import Options  # noqa: TC001 - asked for when a record is read
from ortlab.options.switches import Value  # noqa: TC001 - asked for when a record is read
from ortlab.records.record_files import JsonRecord
from ortlab.records.runs import Run
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Trial:
    """A set of changes, run from the common start."""

    names: tuple[str, ...]  #: The changes that stood, in the order of search; none for the baseline
    #: What the metric says: a distance, a ratio, or the user's own number; None where it failed.
    value: float | None = None
    low: float | None = None  #: Ends of its 95 % interval, for a time; else None
    high: float | None = None  #: See `low`
    #: What was measured: the median step time in ms, or the peak in bytes; None for the other metrics.
    amount: float | None = None
    failure: str = ""  #: Why it failed, its kind of error first; empty where it ran
    runs: tuple[Run, ...] = ()  #: Its runs, in order; none where only memory was measured

    @property
    def kind_of_failure(self) -> str:
        """The kind of error, without its words."""
        return self.failure.partition(":")[0]


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
class Culprits:
    """A smallest set of changes that shows the effect."""

    names: tuple[str, ...]  #: The changes, in the order of search
    #: Groups of at least two of them that could not be told apart: no set that holds only a part gave an answer.
    together: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Metric:
    """How a change is measured."""

    name: str  # "loss", "parity", "step_ms", "peak_bytes", or the name of the user's function
    tolerance: (
        float  # changes up to this are none: relative, but for a function of the user's, whose unit it has
    )
    own: Own | None = None  # the user's function

    @classmethod
    def read(cls, metric: str | Own, tolerance: float | None) -> Metric:
        """Read what the user gave; raise OptionError for no metric, or a tolerance that is no number from 0 on."""
        if tolerance is not None and not units.is_tolerance(tolerance):
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
        """Return what equal runs differ by, from the values of trials of the baseline."""
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
    """Return the geometric mean of the ratios of pairs, with the ends of its 95 % t interval; nan for a single pair."""
    # The times are of runs that were made as neighbours, so that a drift of the machine is in both of a pair.
    from scipy.stats import t

    logs = [math.log(one / other) for one, other in zip(values, base, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:  # noqa: PLR2004 - n - 1
        return math.exp(mean), math.nan, math.nan
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1))
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


RESPONSIBLE: Final = "responsible"
NO_CHANGE: Final = "no change"
TOO_NOISY: Final = "too noisy"
NOT_COMPARABLE: Final = "not comparable"
UNFINISHED: Final = "unfinished"


@dataclass(eq=False, repr=False)
class Bisection(Shown, JsonRecord, noun="bisection", layout=1):
    """A search for the switches that cause a change; `Lab.bisect` makes it and fills it in, trial by trial."""

    #: 1, 2, ... in the order of the lab's bisections.
    number: int
    model: str  #: What the lab calls the model
    metric: str  #: "loss", "parity", "step_ms", "peak_bytes", or the name of the user's function
    tolerance: float  #: Changes up to this are none; see `Metric`
    against: Options  #: The switches of the baseline
    changes: dict[str, Value]  #: What differs from it, by option, in the order of search
    count: int  #: Steps of each run; pairs of runs of each trial that is timed
    rounds: int  #: See `count`
    #: Digest of weights, buffers, optimizer state and random state that every run starts from.
    start_digest: str
    versions: dict[str, str]  #: Package versions by name
    trials: list[Trial] = field(default_factory=list)  #: What was run, in order; the first is the baseline
    #: The baseline run again, which tells what equal runs differ by.
    repeats: list[Trial] = field(default_factory=list)
    runs: int = 0  #: How many runs (or measurements of memory) were made, pairs counted as two
    #: "responsible", "no change", "too noisy", "not comparable" (the model draws random numbers, and other ones change
    #: the losses as much) or "unfinished".
    outcome: str = UNFINISHED
    #: The smallest sets that were found; each causes the change by itself.
    culprits: tuple[Culprits, ...] = ()
    #: Of losses: the largest relative difference of the baseline's when the model draws other random numbers, as its
    #: dropout does; 0 where it draws none, None where nobody has looked.
    drawn: float | None = None

    # ---- what came out ----------------------------------------------------------------------------------------

    def trial(self, names: frozenset[str]) -> Trial | None:
        """Return the trial of a set of changes; None if it was not run."""
        return next((one for one in self.trials if frozenset(one.names) == names), None)

    @property
    def baseline(self) -> Trial | None:
        """The trial without any change; None if it was not run yet."""
        return self.trial(frozenset())

    @property
    def whole(self) -> Trial | None:
        """The trial with all changes; None if it was not run yet."""
        return self.trial(frozenset(self.changes))

    def of(self, culprits: Culprits) -> Trial | None:
        """Return the trial of a set of culprits alone; None if it was not run by itself."""
        return self.trial(frozenset(culprits.names))

    @property
    def rest(self) -> Trial | None:
        """The trial of what is left without any culprit; None if it was not run."""
        named = {name for one in self.culprits for name in one.names}
        left = frozenset(self.changes) - named
        return self.trial(left) if named and left else None

    def shows(self, trial: Trial, metric: Metric | None = None) -> bool | None:
        """Tell whether a trial shows the change of all of them together; None if it cannot be told."""
        base, whole = self.baseline, self.whole
        if base is None or whole is None:
            return None
        if whole.failure and not base.failure:
            if not trial.failure:
                return False
            return True if trial.kind_of_failure == whole.kind_of_failure else None
        if base.failure and not whole.failure:
            return not trial.failure
        if trial.value is None or base.value is None or whole.value is None:
            return None
        return (metric or self._metric).shows(trial, whole, base.value, self.floor)

    @property
    def floor(self) -> float:
        """What equal runs of the baseline differ by, in the metric's measure."""
        equal = [
            one.value for one in (self.baseline, *self.repeats) if one is not None and one.value is not None
        ]
        return self._metric.floor(equal)

    @property
    def least(self) -> float:
        """What counts as no change at most: relative, or in the unit of the user's function."""
        metric, base = self._metric, self.baseline
        most = metric.least(0.0 if base is None or base.value is None else base.value, self.floor)
        return math.expm1(most) if metric.is_ratio else most

    @property
    def _metric(self) -> Metric:
        return Metric(self.metric, self.tolerance, None if self.metric in METRICS else _unknown)

    def table(self) -> pd.DataFrame:
        """One row per trial, in the order in which they were run."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "changes": len(one.names),
                    "switches": ", ".join(self.words(name) for name in one.names),
                    "value": one.value,
                    "low": one.low,
                    "high": one.high,
                    "shows the change": self.shows(one) if self.outcome == RESPONSIBLE else None,
                    "runs": len(one.runs),
                    "failure": one.failure,
                }
                for one in self.trials
            ]
        )

    def words(self, name: str) -> str:
        """Write a change as it is set: "memory_level=1"."""
        value = self.changes[name]
        return f"{name}={','.join(value) if isinstance(value, tuple) else value}"


def _unknown(_run: object) -> float:
    """Stand for a function of the user's in a record that was read."""
    raise NotImplementedError
