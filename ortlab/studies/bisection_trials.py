"""One trial of a bisection: a set of changes that was run, and what the metric says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortlab.records.runs import Run


@dataclass(frozen=True)
class Trial:
    """A set of changes, run from the common start.

    Attributes
    ----------
    names
        The changes that stood, in the order of search; none for the baseline.
    value
        What the metric says: a distance, a ratio, or the user's own number; None where it failed.
    low, high
        Ends of its 95 % interval, for a time; else None.
    amount
        What was measured: the median step time in ms, or the peak in bytes; None for the other metrics.
    failure
        Why it failed, its kind of error first; empty where it ran.
    runs
        Its runs, in order; none where only memory was measured.
    """

    names: tuple[str, ...]
    value: float | None = None
    low: float | None = None
    high: float | None = None
    amount: float | None = None
    failure: str = ""
    runs: tuple[Run, ...] = ()

    @property
    def kind_of_failure(self) -> str:
        """The kind of error, without its words."""
        return self.failure.partition(":")[0]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, readable by `from_dict`."""
        return {
            "names": list(self.names),
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "amount": self.amount,
            "failure": self.failure,
            "runs": [run.to_dict() for run in self.runs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """Rebuild a trial from `to_dict`; a missing field raises KeyError."""
        fields = dict(data)
        fields["names"] = tuple(fields["names"])
        fields["runs"] = tuple(Run.from_dict(run) for run in fields["runs"])
        return cls(**fields)
