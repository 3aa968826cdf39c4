"""What a self-test found: its parts with their figures, and what was not run and why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ortlab import record_files
from ortlab.errors import LedgerError, OrtlabError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA: Final = 1

Outcome: TypeAlias = Literal["held", "did not hold", "stated", "failed", "not run"]
"""`stated` is a figure that nothing is claimed of; what `failed` ended in an error, or did not end."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried, and its figure.

    Attributes
    ----------
    part
        "installation", "models", "switches", "optimizers", "memory" or "headline"; "GPU" for what only `--gpu` tries.
    name
        What was tried.
    outcome
        See `Outcome`.
    said
        The figure in words, or why there is none.
    value
        The figure, in the unit that `said` names; None if there is none.
    bound
        What it had to be at most; None if nothing is claimed.
    """

    part: str
    name: str
    outcome: Outcome
    said: str
    value: float | None = None
    bound: float | None = None

    @classmethod
    def held_to(cls, bound: float, part: str, name: str, said: str, value: float) -> Finding:
        """Judge a figure by its bound, which is added to what is said; nan does not hold."""
        outcome: Outcome = "held" if value <= bound else "did not hold"
        return cls(part, name, outcome, f"{said} (at most {bound:g})", value, bound)

    @classmethod
    def of_error(cls, part: str, name: str, error: Exception) -> Finding:
        """Say what a trial failed with: an error of ortlab without its next step, any other by its first line."""
        words = (
            " ".join(filter(None, (error.what, error.why))) if isinstance(error, OrtlabError) else str(error)
        )
        first = (words.strip().splitlines() or [""])[0]
        return cls(part, name, "failed", f"{type(error).__name__}: {first}")


@dataclass(frozen=True)
class SelfTest:
    """Everything that a self-test tried.

    Attributes
    ----------
    device
        "cpu" or "cuda".
    machine
        Facts of the machine by name: GPU, cores, memory, versions.
    started_at
        Start, ISO 8601, UTC.
    seconds
        What each part took, in s.
    findings
        In the order of trying.
    interrupted
        Whether it was ended before its last part.
    """

    device: str
    machine: dict[str, str]
    started_at: str
    seconds: dict[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing failed, everything claimed held, and it ran to its end."""
        return not self.interrupted and all(
            one.outcome not in {"failed", "did not hold"} for one in self.findings
        )

    @property
    def not_run(self) -> tuple[Finding, ...]:
        """What was not tried here, each with the reason."""
        return tuple(one for one in self.findings if one.outcome == "not run")

    def table(self) -> pd.DataFrame:
        """Return one row a finding, with the columns part, name, outcome, said, value and bound."""
        import pandas as pd

        columns = [one.name for one in dataclasses.fields(Finding)]
        return pd.DataFrame([dataclasses.astuple(one) for one in self.findings], columns=columns)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, readable by `from_dict`."""
        return {"schema": SCHEMA, "ok": self.ok, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> SelfTest:
        """Rebuild the record from `to_dict`.

        Raises
        ------
        LedgerError
            If it was written by another layout, or lacks a field.
        """
        data = record_files.without_layout(record, SCHEMA, "This self-test")
        try:
            del data["ok"]
            data["findings"] = tuple(Finding(**one) for one in data["findings"])
            return cls(**data)
        except (KeyError, TypeError) as error:
            raise LedgerError(
                "This self-test cannot be read.", why=f"A field is missing or unknown: {error}."
            ) from error

    def save(self, path: str | Path) -> Path:
        """Write the record as JSON and return the path."""
        return record_files.write(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> SelfTest:
        """Read what `save` wrote.

        Raises
        ------
        LedgerError
            If the file holds no self-test.
        """
        record = record_files.read(
            path,
            dict,
            file=f"The file {path}",
            other=f"The file {path} is no self-test.",
            fix="Give a selftest.json that `ortlab selftest` wrote.",
        )
        return cls.from_dict(record)
