"""What the doctor looked at; a recipe for what this machine has; what a self-test found, and what it did not run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ortlab.errors import OrtlabError
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


Status: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str  #: What, in a word or two
    status: Status  #: "ok", "warn" (works, but not as well as it could) or "fail"
    found: str  #: What was found, one line
    fix: str = ""  #: Command or step that repairs it; "" if nothing has to be repaired


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """Everything the doctor looked at, in the order of looking."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings do not count."""
        return all(check.status != "fail" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it."""
        return {"ok": self.ok, "checks": [dataclasses.asdict(check) for check in self.checks]}

    def table(self) -> pd.DataFrame:
        """Return one row a check, indexed by name, with the columns status, found and fix."""
        import pandas as pd

        columns = [field.name for field in dataclasses.fields(Check)]
        return pd.DataFrame([dataclasses.astuple(check) for check in self.checks], columns=columns).set_index(
            "name"
        )


@dataclass(frozen=True, repr=False)
class Recipe(Shown):
    """Code that puts ONNX Runtime and an optimizer together."""

    name: str  #: "fused_adam", "deepspeed", "apex" or "all"
    title: str  #: What it puts together
    code: str  #: Python, for a cell of its own
    missing: tuple[str, ...] = ()  #: What it needs and this machine lacks, a sentence each with a repair


Outcome: TypeAlias = Literal["held", "did not hold", "stated", "failed", "not run"]
"""`stated` is a figure that nothing is claimed of; what `failed` ended in an error, or did not end."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried, and its figure."""

    #: "installation", "models", "switches", "optimizers", "memory" or "headline"; "GPU" for what only `--gpu` tries.
    part: str
    name: str  #: What was tried
    outcome: Outcome  #: See `Outcome`
    said: str  #: The figure in words, or why there is none
    value: float | None = None  #: The figure, in the unit that `said` names; None if there is none
    bound: float | None = None  #: What it had to be at most; None if nothing is claimed

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


@dataclass(frozen=True, repr=False)
class SelfTest(Shown, JsonRecord, noun="self-test", layout=1):
    """Everything that a self-test tried."""

    device: str  #: "cpu" or "cuda"
    machine: dict[str, str]  #: Facts of the machine by name: GPU, cores, memory, versions
    started_at: str  #: Start, ISO 8601, UTC
    seconds: dict[str, float] = field(default_factory=dict)  #: What each part took, in s
    findings: tuple[Finding, ...] = ()  #: In the order of trying
    interrupted: bool = False  #: Whether it was ended before its last part

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

    def _fields(self) -> dict[str, Any]:
        return {"ok": self.ok, **super()._fields()}

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> SelfTest:
        del fields["ok"]
        return super()._of_fields(fields)
