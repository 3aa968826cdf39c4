"""Recompute plans as they have been written since 2022, read into what `Options.memory_plan` takes."""

from __future__ import annotations

import json
import re
from typing import Final

from ortlab.errors import OptionError
from ortlab.options.switches import PLAN, shown

_OLD_PLAN: Final = re.compile(r"(?P<operators>[\w.]+(?:\+[\w.]+)*)\+?:(?P<strategy>[012])")


def read_plans(text: str) -> tuple[str, ...]:
    """Read a configuration in any of the three dialects into plans as `Options.memory_plan` takes them.

    Operators that the first dialect switches off (`Dropout:0`) are left out. Raises OptionError, which names the entry,
    where one is of none of the three.
    """
    text = text.strip()
    plans: list[str] = []
    for entry in _json_entries(text) if text.startswith("[") else text.split(","):
        entry = entry.strip()  # noqa: PLW2901 - the same entry
        old = _OLD_PLAN.fullmatch(entry)
        if re.fullmatch(PLAN.pattern, entry):
            plans.append(entry)
        elif old and old["strategy"] != "0":
            plans.append(f"{old['operators']}+:{old['strategy']}:-1")
        elif entry and not old:
            raise OptionError(
                f"{shown(entry)} is no recompute plan.",
                why="Plans are written as Gelu:1, as Gelu+:1:-1, or as a JSON list of the latter.",
                fix=f"Write for example {PLAN.example}.",
            )
    return tuple(dict.fromkeys(plans))


def dialect_of(text: str) -> str:
    """Return the dialect of a configuration that `read_plans` can read: "2022", "2023" or "2024"."""
    text = text.strip()
    if text.startswith("["):
        return "2024"
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    return "2023" if all(re.fullmatch(PLAN.pattern, entry) for entry in entries) else "2022"


def _json_entries(text: str) -> list[str]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(
            "The list of plans is no JSON.", why=f"{error}.", fix=f'Write for example ["{PLAN.example}"].'
        ) from None
    if not all(isinstance(entry, str) for entry in entries):
        raise OptionError(
            "The list of plans holds something that is no text.", fix=f'Write for example ["{PLAN.example}"].'
        )
    # One entry may hold several plans with commas, for one cluster that is recomputed as several.
    return [part for entry in entries for part in entry.split(",")]
