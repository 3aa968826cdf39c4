"""A bisection: which switches cause a change, what was run to find out, and what it says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ortlab.options.options import Options
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown
from ortlab.studies.bisection_metrics import Metric
from ortlab.studies.bisection_search import Culprits
from ortlab.studies.bisection_trials import Trial

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.options.switches import Value

RESPONSIBLE: Final = "responsible"
NO_CHANGE: Final = "no change"
TOO_NOISY: Final = "too noisy"
NOT_COMPARABLE: Final = "not comparable"
UNFINISHED: Final = "unfinished"


@dataclass(eq=False, repr=False)
class Bisection(Shown, JsonRecord, noun="bisection", layout=1):
    """A search for the switches that cause a change; `Lab.bisect` makes it and fills it in, trial by trial.

    Attributes
    ----------
    number
        1, 2, ... in the order of the lab's bisections.
    model
        What the lab calls the model.
    metric
        "loss", "parity", "step_ms", "peak_bytes", or the name of the user's function.
    tolerance
        Changes up to this are none; see `ortlab.studies.bisection_metrics.Metric`.
    against
        The switches of the baseline.
    changes
        What differs from it, by option, in the order of search.
    count, rounds
        Steps of each run; pairs of runs of each trial that is timed.
    start_digest
        Digest of weights, buffers, optimizer state and random state that every run starts from.
    versions
        Package versions by name.
    trials
        What was run, in order; the first is the baseline.
    repeats
        The baseline run again, which tells what equal runs differ by.
    runs
        How many runs (or measurements of memory) were made, pairs counted as two.
    outcome
        "responsible", "no change", "too noisy", "not comparable" (the model draws random numbers, and other ones
        change the losses as much) or "unfinished".
    culprits
        The smallest sets that were found; each causes the change by itself.
    drawn
        Of losses: the largest relative difference of the baseline's when the model draws other random numbers, as its
        dropout does; 0 where it draws none, None where nobody has looked.
    """

    number: int
    model: str
    metric: str
    tolerance: float
    against: Options
    changes: dict[str, Value]
    count: int
    rounds: int
    start_digest: str
    versions: dict[str, str]
    trials: list[Trial] = field(default_factory=list)
    repeats: list[Trial] = field(default_factory=list)
    runs: int = 0
    outcome: str = UNFINISHED
    culprits: tuple[Culprits, ...] = ()
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
        """Tell whether a trial shows the change of all of them together; None if it cannot be told.

        Parameters
        ----------
        trial
            The trial.
        metric
            How to judge; by default by the record's own name and tolerance.
        """
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
        from ortlab.studies.bisection_metrics import METRICS

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

    # ---- JSON -------------------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, Any]:
        return {
            **vars(self),
            "against": self.against.to_dict(),
            "changes": {
                name: list(one) if isinstance(one, tuple) else one for name, one in self.changes.items()
            },
            "trials": [trial.to_dict() for trial in self.trials],
            "repeats": [trial.to_dict() for trial in self.repeats],
            "culprits": [
                {"names": list(one.names), "together": [list(group) for group in one.together]}
                for one in self.culprits
            ],
        }

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Bisection:
        changes = fields["changes"].items()
        read = {
            "against": Options.from_dict(fields["against"]),
            "changes": {name: tuple(one) if isinstance(one, list) else one for name, one in changes},
            **{name: [Trial.from_dict(one) for one in fields[name]] for name in ("trials", "repeats")},
            "culprits": tuple(
                Culprits(tuple(one["names"]), tuple(tuple(group) for group in one["together"]))
                for one in fields["culprits"]
            ),
        }
        return cls(**{**fields, **read})


def _unknown(_run: object) -> float:
    """Stand for a function of the user's in a record that was read."""
    raise NotImplementedError
