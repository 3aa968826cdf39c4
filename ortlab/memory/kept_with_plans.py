"""What is kept for backward with several recompute plans, worked out from what each of them does alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortlab.memory.saved_activations import PlanEffect, SavedActivation, SavedActivations

_EVERYWHERE = -1


def kept_with(
    activations: SavedActivations, plans: Sequence[str], places: Mapping[str, int]
) -> SavedActivations:
    """Return what is kept with these plans; an estimate, since plans may act on each other.

    `activations` knows the effects of all plans. `places` has, by plan such as "Gelu+:1:-1", in how many places of the
    graph it can act: a plan in some of them removes the first ones of what it removes in all.
    """
    effects = {effect.config: effect for effect in activations.effects}
    kept = {_key(row): row for row in activations.rows}
    for plan in activations.applied:  # back to the graph without plans, as the effects are told for it
        effect = effects.get(_everywhere(plan))
        if effect is not None:
            kept.update({_key(row): row for row in _first(effect.removed, plan, places)})
    added: dict[tuple[str, str], SavedActivation] = {}
    for config in (part for plan in plans for part in plan.split(",")):
        effect = effects.get(_everywhere(config))
        if effect is None:
            continue
        for row in _first(effect.removed, config, places):
            kept.pop(_key(row), None)
            added.pop(_key(row), None)
        added.update({_key(row): row for row in _first(_new(effect, kept), config, places)})
    return replace(activations, rows=tuple({**added, **kept}.values()), applied=tuple(plans))


def _new(effect: PlanEffect, kept: Mapping[tuple[str, str], SavedActivation]) -> list[SavedActivation]:
    return [row for row in effect.added if _key(row) not in kept]


def _first(rows: Iterable[SavedActivation], plan: str, places: Mapping[str, int]) -> list[SavedActivation]:
    """Return what a plan acts on in its first places, in the order of the graph."""
    ordered = sorted(rows, key=lambda row: row.position)
    count, every = int(plan.rpartition(":")[2]), places.get(_everywhere(plan), 0)
    if count == _EVERYWHERE or not every:
        return ordered
    return ordered[: round(len(ordered) * min(count / every, 1.0))]


def _everywhere(plan: str) -> str:
    return f"{plan.rpartition(':')[0]}:{_EVERYWHERE}"


def _key(row: SavedActivation) -> tuple[str, str]:
    return row.part, row.value
