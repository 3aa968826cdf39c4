"""What the doctor looked at, with the report of all; and a recipe for what this machine has."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

Status: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes
    ----------
    name
        What, in a word or two.
    status
        "ok", "warn" (works, but not as well as it could) or "fail".
    found
        What was found, one line.
    fix
        Command or step that mends it; "" if nothing has to be mended.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


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
    """Code that puts ONNX Runtime and an optimizer together.

    Attributes
    ----------
    name
        "fused_adam", "deepspeed", "apex" or "all".
    title
        What it puts together.
    code
        Python, for a cell of its own.
    missing
        What it needs and this machine lacks, a sentence each with what mends it.
    """

    name: str
    title: str
    code: str
    missing: tuple[str, ...] = ()
