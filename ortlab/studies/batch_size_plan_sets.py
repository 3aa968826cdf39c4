"""The sets of plans that a search tries: those that the user names, or the largest that ORT offers and all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.options.options import Options

if TYPE_CHECKING:
    from ortlab.memory.plan import MemoryPlan, PlanRow
    from ortlab.studies.batch_size_points import Plans

_SINGLES: Final = 3
_IN_SET: Final = 4
_SMALLEST_SHARE: Final = 0.25
"""Least share of the largest saving: a plan that saves less gets no batch to the next power of two."""


def read_plan_sets(plans: object) -> tuple[Plans, ...] | None:
    """Read the sets of plans that a user names; None stays None. Raises OptionError for what is no list of plans.

    A set is one plan ("Gelu+:1:-1") or several that are applied together.
    """
    if plans is None:
        return None
    fix = 'plans=["Gelu+:1:-1", ("Gelu+:1:-1", "Dropout+:1:-1")]; lab.plan() lists them.'
    given = [plans] if isinstance(plans, str) else plans
    if not isinstance(given, Iterable):
        raise OptionError(f"The plans are a {type(plans).__name__}, not a list of plans.", fix=fix)
    sets: dict[Plans, None] = {}
    for one in given:
        if not isinstance(one, (str, list, tuple)) or not all(isinstance(part, str) for part in one):
            raise OptionError(f"{one!r} is no set of plans.", fix=fix)
        together = (one,) if isinstance(one, str) else tuple(one)
        checked = Options(memory_plan=together).memory_plan  # raises for what is no plan
        if checked:
            sets[checked] = None
    return tuple(sets)


def largest_plan_sets(plan: MemoryPlan) -> tuple[Plans, ...]:
    """Choose sets from a table of plans: at most `_SINGLES` of the largest singly, then the largest that go together.

    Savings are those of the simulated peak where known, else ORT's own; they only rank. There are no sets where ORT
    offers no plan.
    """
    rows = sorted((row for row in plan.rows if _saving(row) > 0), key=lambda row: (-_saving(row), row.config))
    rows = [row for row in rows if _saving(row) >= _SMALLEST_SHARE * _saving(rows[0])]
    together: list[PlanRow] = []
    for row in rows:
        if len(together) < _IN_SET and not any(_clash(row, other) for other in together):
            together.append(row)
    sets: dict[Plans, None] = {(row.config,): None for row in rows[:_SINGLES]}
    if together:
        sets[tuple(row.config for row in together)] = None
    return tuple(sets)


def _saving(row: PlanRow) -> float:
    known = row.peak_saving_bytes if row.peak_saving_bytes is not None else row.saving_bytes
    return known or 0.0


def _clash(one: PlanRow, other: PlanRow) -> bool:
    return other.config in one.excludes or one.config in other.excludes
