"""One thing that a part of the self-test tries, by name; running all of a part, each trial announced before it runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ortlab.records.selftest import Finding

Device: TypeAlias = Literal["cpu", "cuda"]
Size: TypeAlias = Literal["small", "tiny"]
"""Of what is tried."""

SAME: Final = {"cpu": 1e-5, "cuda": 1e-3}
"""Largest relative difference of two trainings that should be one. On a GPU other kernels sum in another order, and
some multiply in TF32."""

TRYING: Final = "TRYING"
FINDING: Final = "FINDING"
"""What a line of a part's process begins with; JSON stands behind: a name ("" after each trial), a finding."""


@dataclass(frozen=True)
class Trial:
    """One thing to try."""

    part: str
    name: str
    run: Callable[[], Iterable[Finding]]  # an error that it raises is a finding, too


def not_run(part: str, name: str, why: str) -> Trial:
    """Return a trial that only says why it is not run."""
    return Trial(part, name, lambda: [Finding(part, name, "not run", why)])


def report(trials: Iterable[Trial], tried: Collection[str]) -> None:
    """Run trials, and print a line before and after each, and a line for each finding.

    Trials may be made one by one, while others run. Those named in `tried` are left out, because an earlier process got
    as far.
    """
    for one in trials:
        if one.name in tried:
            continue
        _print(TRYING, one.name)
        try:
            findings = list(one.run())
        except Exception as error:  # noqa: BLE001 - it is a finding
            findings = [Finding.of_error(one.part, one.name, error)]
        for found in findings:
            _print(FINDING, dataclasses.asdict(found))
        _print(TRYING, "")  # what ends the process from here on is not this trial


def _print(kind: str, content: object) -> None:
    sys.stdout.write(kind + json.dumps(content) + "\n")
    sys.stdout.flush()
