"""Less step memory as a slider shows it: cost and what is kept, for each share that was predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ortlab import units
from ortlab.memory.saved_activations import kept_with
from ortlab.render.activations_page import batch_words
from ortlab.render.budget_page import answer_notes, plans_words
from ortlab.render.page import Block, Column, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.memory.saved_activations import Kind, SavedActivations
    from ortlab.studies.budget import Budget, Prediction

_KINDS: Final[tuple[Kind, ...]] = ("layer", "operator")
_GROUPS: Final = 12
"""Parts of a bar; smaller ones are put together."""

_OTHERS: Final = "others"


def budget_states(budget: Budget, activations: SavedActivations, places: Mapping[str, int]) -> dict[str, Any]:
    """Return the states of the slider, the largest first; plain JSON types, empty where no plan saves anything."""
    # `activations` knows what each plan removes, `places` in how many places each can act.
    predicted = _worth_it([*budget.curve, budget.prediction, budget.floor])
    whole = budget.without.step_memory_bytes
    if not whole or len(predicted) < 2:  # noqa: PLR2004 - with none but "keep all" there is nothing to choose
        return {}
    every = kept_with(activations, (), places)
    names = {kind: _names(every, kind) for kind in _KINDS}
    states = [
        {
            "share": one.step_memory_bytes / whole,
            "said": _said(budget, one),
            "cost": _cost(budget, one),
            "kept": _kept(one, activations, places, names),
        }
        for one in predicted
    ]
    return {
        **_bars(every, names),
        "low": math.ceil(100 * predicted[-1].step_memory_bytes / whole),
        "states": states,
    }


def kept_states(activations: SavedActivations) -> dict[str, Any]:
    """Return what is known before anything is predicted, one state: all that is kept; empty for nothing."""
    names = {kind: _names(activations, kind) for kind in _KINDS}
    if not any(names.values()):
        return {}
    bars = _bars(activations, names)
    kept = [bar["all"] for bar in bars["bars"]]
    return {
        **bars,
        "low": 100,
        "states": [{"share": 1.0, "said": batch_words(activations), "cost": "", "kept": kept}],
    }


def _bars(every: SavedActivations, names: Mapping[Kind, list[str]]) -> dict[str, Any]:
    return {
        "bars": [
            {
                "title": f"kept for backward, by {kind}",
                "names": names[kind],
                "all": _bytes(every, kind, names[kind]),
            }
            for kind in _KINDS
        ]
    }


def applied_page(budget: Budget, before: SavedActivations, after: SavedActivations) -> Page:
    """Say what came out of a budget that was run, and what is kept less now."""
    blocks: list[Block] = [*answer_notes(budget)]
    if budget.applied:
        blocks.append(_changes(before, after))
    number = "lab.budgets[-1] has all that was run and predicted."
    return Page("", (*blocks, Note(number, Mark.QUIET)))


def _changes(before: SavedActivations, after: SavedActivations) -> Table:
    was = {one.name: one.bytes for one in before.by("layer")}
    now = {one.name: one.bytes for one in after.by("layer")}
    rows = [
        row(
            name,
            units.size(was.get(name, 0)),
            units.size(now.get(name, 0)),
            _less(was.get(name), now.get(name)),
        )
        for name in dict.fromkeys([*was, *now])
    ][:_GROUPS]
    rows.append(
        row(
            "all",
            units.size(before.total_bytes),
            units.size(after.total_bytes),
            _less(before.total_bytes, after.total_bytes),
        )
    )
    columns = (
        Column(
            "what changed: kept for backward in",
            meaning="worked out from the graphs without and with the plans",
        ),
        Column("before", numeric=True),
        Column("now", numeric=True),
        Column("change", numeric=True),
    )
    return Table("", columns, tuple(rows))


def _less(before: float | None, now: float | None) -> str:
    return units.change((now or 0) / before) if before else "-"


def _worth_it(found: Sequence[Prediction]) -> list[Prediction]:
    """Leave out what costs as much as something smaller; the largest first."""
    kept: list[Prediction] = []
    for one in sorted(found, key=lambda one: (one.step_memory_bytes, one.cost_ms)):
        if not kept or one.cost_ms < kept[-1].cost_ms:
            kept.append(one)
    return kept[::-1]


def _said(budget: Budget, one: Prediction) -> str:
    whole = units.size(budget.without.step_memory_bytes)
    if not one.acts:
        return f"All of it: {whole}, measured. Nothing is computed twice."
    needs = f"{units.size(one.step_memory_bytes)} of {whole}"
    return f"{needs}, predicted: {plans_words(one)}."


def _cost(budget: Budget, one: Prediction) -> str:
    if not one.cost_ms:
        return "no time"
    share = (
        f" (+{units.rounded_percent(one.cost_ms / budget.without.step_ms)})" if budget.without.step_ms else ""
    )
    return f"+{units.duration(one.cost_ms)} a step{share}"


def _kept(
    one: Prediction,
    activations: SavedActivations,
    places: Mapping[str, int],
    names: Mapping[Kind, list[str]],
) -> list[list[int]] | None:
    """Return the bytes of each part of each bar; None for what is known only when it is built: levels and layers."""
    if one.setting:
        return None
    kept = kept_with(activations, one.plans, places)
    return [_bytes(kept, kind, names[kind]) for kind in _KINDS]


def _names(activations: SavedActivations, kind: Kind) -> list[str]:
    groups = [one for one in activations.by(kind) if one.bytes]
    if len(groups) <= _GROUPS:
        return [one.name for one in groups]
    large = sorted(groups, key=lambda one: -one.bytes)[: _GROUPS - 1]
    return [*(one.name for one in groups if one in large), _OTHERS]


def _bytes(activations: SavedActivations, kind: Kind, names: Sequence[str]) -> list[int]:
    found = dict.fromkeys(names, 0)
    for one in activations.by(kind):
        name = one.name if one.name in found else _OTHERS
        if name in found:
            found[name] += one.bytes
    return list(found.values())
