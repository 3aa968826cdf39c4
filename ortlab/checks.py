"""One thing that the doctor looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

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
