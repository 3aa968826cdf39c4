"""Rows and columns of the saved activations's tables: activations, their groups, and what plans do to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ortlab import units
from ortlab.memory.saved_activations import ActivationGroup, PlanEffect, SavedActivation
from ortlab.memory.symbolic_sizes import shape_at
from ortlab.notebook.widgets.record_table import Column, Content, Look

if TYPE_CHECKING:
    from ortlab.memory.saved_activations import Kind, SavedActivations


def group_rows(activations: SavedActivations, kind: Kind) -> Content[ActivationGroup]:
    """Make the table of the totals by layer, operator or module."""
    return Content(
        records=activations.by(kind),
        columns=[
            Column(kind, lambda row: row.name, lambda row: units.fold(row.name)),
            _numeric("activations", lambda row: row.count, lambda row: units.count(row.count)),
            *_bytes_columns(activations),
        ],
        key=lambda row: row.name,
        look=lambda row: Look(row.name, chosen=False),
        noun=(kind, f"{kind}s"),
        totals=lambda rows: {
            kind: "together",
            "activations": units.count(sum(row.count for row in rows)),
            **_total_bytes(activations, rows),
        },
    )


def activation_rows(
    activations: SavedActivations, within: tuple[Kind, str] | None = None, plan: str = "", chosen: str = ""
) -> Content[SavedActivation]:
    """Make the table of the activations; `chosen` is the key of the one whose details are shown."""
    # `within` is the kind and name of the group that they are of; None for all. Activations that `plan` removes are
    # marked and come first.
    rows = list(activations.rows)
    if within is not None:
        rows = [row for row in rows if activations.group_of(row, within[0]) == within[1]]
    if plan:
        rows.sort(key=lambda row: plan not in (row.plans or ()))  # stable: the largest of each stay first

    def look(row: SavedActivation) -> Look:
        return Look(
            name=f"{row.operator} {row.value}",
            chosen=key_of(row) == chosen,
            mark="removed" if plan and plan in (row.plans or ()) else "",
            code=units.fold(row.value.removeprefix("/_original_module/"), 100),  # ORTModule's own level
        )

    return Content(
        records=rows,
        columns=[
            Column("activation", name_of, name_of),
            Column("module", lambda row: row.module, lambda row: units.fold(row.module or "-")),
            *_line_columns(activations),
            Column(
                "shape",
                lambda row: _shape(activations, row),
                lambda row: units.fold(_shape(activations, row)),
                meaning="for the sizes above; the details have the formula",
            ),
            *_bytes_columns(activations),
        ],
        key=key_of,
        look=look,
        noun=("activation", "activations"),
        search=_search,
        totals=lambda rows: {
            "activation": f"together: {units.count(len(rows))}",
            **_total_bytes(activations, rows),
        },
    )


def effect_rows(
    activations: SavedActivations, plan: str = "", removing: Sequence[str] = ()
) -> Content[PlanEffect]:
    """Make the table of what each plan does to the saved activations; `plan` is the one that is chosen."""
    # The plans in `removing` are marked and come first: they remove the activation that is chosen.
    return Content(
        records=sorted(
            activations.effects, key=lambda one: (one.config not in removing, -(one.net_bytes or 0))
        ),
        columns=[
            Column("plan", lambda one: one.config, lambda one: units.fold(one.config)),
            _numeric("activations", lambda one: len(one.removed), lambda one: units.count(len(one.removed))),
            _numeric("removes", lambda one: one.removed_bytes, lambda one: units.size(one.removed_bytes)),
            _numeric(
                "keeps instead",
                lambda one: one.added_bytes,
                lambda one: units.size(one.added_bytes),
                "what the nodes that it repeats read, and was not kept before",
            ),
            _numeric(
                "less kept",
                lambda one: one.net_bytes,
                lambda one: units.size(one.net_bytes),
                "the difference of the two, worked out from shapes; the peak need not fall by as much",
            ),
        ],
        key=lambda one: one.config,
        look=lambda one: Look(
            one.config, chosen=one.config == plan, mark="removes it" if one.config in removing else ""
        ),
        noun=("plan", "plans"),
    )


def key_of(row: SavedActivation) -> str:
    """Return what tells an activation from all others."""
    return f"{row.part}\n{row.value}"


def name_of(row: SavedActivation) -> str:
    """Name an activation by its operator, and which of several results it is."""
    return f"{row.operator} -> {row.output}" if row.output else row.operator


def _line_columns(activations: SavedActivations) -> list[Column[Any]]:
    if not any(row.source for row in activations.rows):
        return []
    meaning = "where the forward of the module begins; none for torch's own modules"
    return [Column("line", lambda row: row.source or None, _line, meaning=meaning)]


def _line(row: SavedActivation) -> str:
    return row.source.replace("\\", "/").rpartition("/")[2] or "-"


def _shape(activations: SavedActivations, row: SavedActivation) -> str:
    if row.shape is None:
        return "not known"
    sizes = (
        shape_at(row.shape, activations.symbols) or row.shape
    )  # in parts that differ, a size has no value of its own
    return " x ".join(str(size) for size in sizes) or "scalar"


def _search(row: SavedActivation) -> str:
    return " ".join([row.value, row.node, row.module, row.source, row.layer, row.part, *(row.plans or ())])


def _numeric(
    name: str, value: Callable[[Any], float | None], words: Callable[[Any], str], meaning: str = ""
) -> Column[Any]:
    return Column(name, value, words, numeric=True, meaning=meaning)


def _bytes_columns(activations: SavedActivations) -> list[Column[Any]]:
    return [
        _numeric(
            "bytes",
            lambda row: row.bytes,
            lambda row: _known(row.bytes, getattr(row, "unknown", 0)),
            "worked out from shapes, not measured; the rows add up",
        ),
        _numeric(
            "share",
            activations.share,
            lambda row: units.percent(activations.share(row)),
            "part of all that is kept",
        ),
    ]


def _known(size: float | None, unknown: int) -> str:
    return units.size(size) + (f" and {units.count(unknown)} not known" if unknown else "")


def _total_bytes(activations: SavedActivations, rows: Sequence[Any]) -> dict[str, str]:
    size = sum(row.bytes or 0 for row in rows)
    unknown = sum(row.unknown if isinstance(row, ActivationGroup) else row.bytes is None for row in rows)
    share = size / activations.total_bytes if activations.total_bytes else 0.0
    return {"bytes": _known(size, unknown), "share": units.percent(share)}
