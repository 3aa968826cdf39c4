"""The pages of recompute plans: what each saves and costs here, and those that were read from a file or a log."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.records.runs import names
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, left_out, row

if TYPE_CHECKING:
    from ortlab.memory.plan import MemoryPlan, PlanRow
    from ortlab.memory.saved_activations import SavedActivations
    from ortlab.memory.saved_plans import SavedPlan, SavedPlans

PLANS_SHOWN: Final = 100
"""Plans that a page shows: those with the largest predicted savings."""

Shown = tuple[Column, Callable[["PlanRow"], "str | Cell"]]
"""A column, and what stands in it for a row."""


def plan_page(plan: MemoryPlan) -> Page:
    """List the recompute plans, largest predicted saving first."""
    if not plan.rows:
        return Page(
            "Memory plan",
            (
                Note(NO_OPPORTUNITY, Mark.QUIET),
                *state_notes(plan),
                *recomputed_table(plan),
                *missing_notes(plan),
                *_built(plan),
                *_report(plan),
            ),
        )
    shown = plan.rows[:PLANS_SHOWN]
    columns = _columns(plan)
    rows = tuple(row(*(write(one) for _, write in columns)) for one in shown)
    hidden = len(plan.rows) - len(rows)
    rest = left_out(hidden, "plans that save less: lab.plan().table() has them.")
    level = f"{level_text(plan, plan.memory_level)} Set it to 0 to choose your own."
    how = "Switch one on with lab.set(memory_plan=[...]), then rerun and compare."
    notes = (
        Note(f"Predicted by ORT for {sizes_text(plan)}, not measured. {_OVERLAP}", Mark.QUIET),
        *state_notes(plan),
        *_order_notes(plan),
        Note(level if plan.memory_level else how),
    )
    table = Table("", tuple(column for column, _ in columns), rows, rest)
    return Page(
        "Memory plan",
        (table, *notes, *recomputed_table(plan), *missing_notes(plan), *_built(plan), *_report(plan)),
    )


def recomputed_table(plan: MemoryPlan) -> tuple[Block, ...]:
    """List what ortlab can recompute itself, and say how it is switched on."""
    if not plan.recomputed:
        return ()
    columns = (*_OF_RECOMPUTE, *_known(plan.recomputed), (Column("what it does"), lambda one: one.sentence))
    rows = tuple(row(*(write(one) for _, write in columns)) for one in plan.recomputed)
    table = Table("Recomputed by ortlab itself", tuple(column for column, _ in columns), rows)
    first = next(iter(plan.recomputed)).switches["recompute"]
    how = f"Switch one on with lab.set(recompute={first if len(first) > 1 else json.dumps(first[0])}). "
    priced = any(one.cost_ms is not None for one in plan.recomputed)
    more = (
        "Each stands for itself: of these values one is on at a time."
        if priced
        else "lab.plan(costs=True) predicts what each saves and costs, and finds more sets of layers."
    )
    return (table, Note(how + more))


def _built(plan: MemoryPlan) -> tuple[Note, ...]:
    return (Note(plan.note, Mark.QUIET),) if plan.note else ()


def level_text(plan: MemoryPlan, level: int) -> str:
    """Say what a memory level stands for, if the plan was read for it."""
    if plan.level_set is None or plan.level_set.level != level:
        return f"memory_level={level} chooses the plans."
    return plan.level_set.sentence()


NO_OPPORTUNITY: Final = (
    "ORT offers no recompute plan for this model: nothing that it keeps for the backward pass can be computed again "
    "from what else is there."
)


_SYMBOLS_NAMED: Final = 3


def state_notes(plan: MemoryPlan) -> tuple[Note, ...]:
    """Say what is unresolved, what the model does not have, and what ORT applies otherwise than asked."""
    return (*_unresolved_notes(plan), *_absent_notes(plan), *_applied_notes(plan))


def _unresolved_notes(plan: MemoryPlan) -> tuple[Note, ...]:
    worked_out = [one for one in plan.rows if one.unresolved and one.saving_bytes is not None]
    open_rows = [one for one in plan.rows if one.unresolved and one.saving_bytes is None]
    notes = []
    if worked_out:
        said = (
            f"Of {units.many(worked_out, 'plan')} ORT's formula has sizes that no input gives; they are worked out "
            "from the shapes of what is no longer kept."
        )
        notes.append(Note(said, Mark.QUIET))
    if open_rows:
        symbols = sorted({symbol for one in open_rows for symbol in one.unresolved})
        more = len(symbols) - _SYMBOLS_NAMED
        named = ", ".join(symbols[:_SYMBOLS_NAMED]) + (f" and {units.count(more)} more" if more > 0 else "")
        how = f"lab.plan(costs=True) reads them from a step; lab.plan().at({symbols[0]}=...) takes yours."
        if any(symbol.startswith("valid_indices_count") for symbol in symbols):
            how = "lab.plan().at(label_density=0.15) works them out."
        said = (
            f"Not in the order of savings: the last {units.count(len(open_rows))}, for want of sizes that no input "
            f"gives ({named}). {how}"
        )
        notes.append(Note(said, Mark.WARN))
    return tuple(notes)


def _absent_notes(plan: MemoryPlan) -> tuple[Note, ...]:
    clusters = list(dict.fromkeys(part for one in plan.rows for part in one.cluster.split(",")))
    notes = []
    for config in plan.absent:
        near = difflib.get_close_matches(config.split(":")[0], clusters, n=3)
        hint = f" Near names: {', '.join(near)}." if near else ""
        notes.append(
            Note(
                f"Not applied: {config}. This model has no such cluster, and ORT passes over it.{hint}",
                Mark.BAD,
            )
        )
    return tuple(notes)


def _applied_notes(plan: MemoryPlan) -> tuple[Note, ...]:
    notes = []
    for one in plan.rows:
        if one.as_asked or one.applied is None:
            continue
        asked = "all" if one.requested == -1 else str(one.requested)
        why = "ORT leaves out places where another plan recomputes the same, or where it would save nothing."
        if one.requested is not None and one.requested > one.frequency:
            why = "It has no more."
        elif one.requested is not None and 0 <= one.requested < one.applied:
            why = "ORT recomputes more than it was told to."
        places = f"{units.count(one.applied)} of {units.count(one.frequency)} places"
        notes.append(
            Note(
                f"{one.config}: asked for {asked}, applied in {places}. {why}",
                Mark.WARN if one.applied else Mark.BAD,
            )
        )
    return tuple(notes)


def _order_notes(plan: MemoryPlan) -> tuple[Note, ...]:
    """Say what all plans have in common: a change of order that comes with any of them."""
    bytes_ = plan.order_saving_bytes
    if bytes_ is None:
        return ()
    priced = "Off the peak and costs are predicted from a profiled step, by simulation."
    if not bytes_:
        return (Note(priced, Mark.QUIET),)
    what = "takes" if bytes_ > 0 else "adds"
    way = "off" if bytes_ > 0 else "to"
    size = units.size(abs(bytes_))
    return (
        Note(
            f"{priced} Of each, {size} are no plan's merit: with any plan ONNX Runtime orders all nodes differently, "
            f"which alone {what} that {way} the peak.",
            Mark.QUIET,
        ),
    )


def missing_notes(record: MemoryPlan | SavedActivations) -> tuple[Note, ...]:
    """Say which parts are not in a record of the model, because no step has called them."""
    if not record.missing:
        return ()
    return (Note(f"Without a graph, since not called yet: {names(record.missing)}.", Mark.WARN),)


def _on_here(one: PlanRow) -> Cell:
    if not one.enabled:
        return Cell("-", Mark.QUIET)
    if one.applied is None:
        return Cell("yes", Mark.GOOD)
    if not one.applied:
        return Cell("not applied", Mark.BAD)
    return Cell(
        f"yes, {units.count(one.applied)} of {units.count(one.frequency)}",
        Mark.GOOD if one.as_asked else Mark.WARN,
    )


def _saves(one: PlanRow) -> Cell:
    is_open = one.unresolved and one.saving_bytes is None
    return Cell("unresolved", Mark.WARN) if is_open else Cell(units.size(one.saving_bytes))


_OVERLAP: Final = "Savings overlap where plans share operators, so they do not add up."
_ALWAYS: Final[tuple[Shown, ...]] = (
    (
        Column("plan", meaning="what memory_plan takes: cluster, strategy, count (-1 for all)"),
        lambda one: one.config,
    ),
    (
        Column(
            "on",
            meaning="whether the present options ask for it, and in how many of its places ORT applies it",
        ),
        _on_here,
    ),
    (
        Column("places", numeric=True, meaning="reported by ORT: occurrences in the graph"),
        lambda one: units.count(one.frequency),
    ),
    (
        Column("saves", numeric=True, meaning="predicted by ORT for the sizes below, not measured"),
        _saves,
    ),
)

WHERE_KNOWN: Final[tuple[tuple[str, tuple[Column, Callable[[PlanRow], str]]], ...]] = (
    (
        "peak_saving_bytes",
        (
            Column("off the peak", numeric=True, meaning="predicted by simulating a step, not measured"),
            lambda one: units.size(one.peak_saving_bytes),
        ),
    ),
    (
        "cost_ms",
        (
            Column(
                "costs",
                numeric=True,
                meaning="predicted from a profiled step: more time per step, not measured",
            ),
            lambda one: units.duration(one.cost_ms),
        ),
    ),
    (
        "bytes_per_ms",
        (
            Column("saved per ms", numeric=True, meaning="off the peak by costs, both predicted"),
            lambda one: per_ms(one.bytes_per_ms),
        ),
    ),
    (
        "measured_saving_bytes",
        (
            Column(
                "measured saving",
                numeric=True,
                meaning="measured: peak of a step without it less that with it",
            ),
            lambda one: units.size(one.measured_saving_bytes),
        ),
    ),
    (
        "measured_cost_ms",
        (
            Column(
                "measured cost", numeric=True, meaning="measured: time of a step with it less that without it"
            ),
            lambda one: units.duration(one.measured_cost_ms),
        ),
    ),
    (
        "measured_bytes_per_ms",
        (
            Column("measured per ms", numeric=True, meaning="measured saving by measured cost"),
            lambda one: per_ms(one.measured_bytes_per_ms),
        ),
    ),
)
"""Columns that are there once a row has the number, by the row's attribute."""


_OF_RECOMPUTE: Final[tuple[Shown, ...]] = (
    (
        Column("recompute", meaning="what the switch recompute takes"),
        lambda one: ", ".join(one.switches["recompute"]),
    ),
    (Column("on", meaning="whether the present options ask for it"), _on_here),
    (
        Column("nodes", numeric=True, meaning="nodes that run again, before ONNX Runtime joins some of them"),
        lambda one: units.count(one.frequency),
    ),
    (
        Column("saves", numeric=True, meaning="predicted from a profiled step: what is kept less"),
        _saves,
    ),
)


def _known(rows: Iterable[PlanRow]) -> list[Shown]:
    return [shown for name, shown in WHERE_KNOWN if any(getattr(one, name) is not None for one in rows)]


def _columns(plan: MemoryPlan) -> tuple[Shown, ...]:
    known = _known(plan.rows)
    what: Shown = (Column("what it does"), lambda one: one.sentence)
    instead: Shown = (
        Column("not with", meaning="other ways to recompute the same; of these and it, one at most can act"),
        lambda one: ", ".join(one.excludes),
    )
    parts: Shown = (
        Column("parts", meaning="the wrapped parts that have it; the plan acts on all of them"),
        lambda one: names(one.parts),
    )
    exclusive = (instead,) if any(one.excludes for one in plan.rows) else ()
    return (*_ALWAYS, *known, what, *exclusive, *([parts] if any(one.parts for one in plan.rows) else []))


def per_ms(value: float | None) -> str:
    """Write bytes saved for each ms; "free" where no time is lost, "none" where the peak rises."""
    if value is None:
        return units.MISSING
    if value < 0:
        return "none"  # less time for the same rise would look better
    return "free" if value == float("inf") else f"{units.size(value)}/ms"


def sizes_text(plan: MemoryPlan) -> str:
    """Write which batch the savings are for, and where each size comes from that is not the first batch's."""
    batch = "another batch" if any(where == "given" for where in plan.origins.values()) else "the first batch"
    words = [
        f"{name} = {size:,}" + (f", {where}" if (where := plan.origins.get(name, "given")) != "given" else "")
        for name, size in plan.symbols.items()
    ]
    return f"{batch} ({'; '.join(words) if plan.origins else ', '.join(words) or 'no symbolic size'})"


def _report(plan: MemoryPlan) -> tuple[Folded, ...]:
    lines = units.many(len(plan.report.splitlines()), "line")
    return (
        (Folded("ORT's own report", plan.report, instead=f"print(plan.report), {lines}"),)
        if plan.report
        else ()
    )


# ---- plans that were read -------------------------------------------------------------------------------------------


SavedShown = tuple[Column, Callable[["SavedPlan"], "str | Cell"]]
ROWS_SHOWN: Final = 200
"""Plans that a page shows."""

_WHAT: Final = {
    "2022": "the release of 2022 (Gelu:1)",
    "2023": "releases of 2023 (Gelu+:1:-1)",
    "2024": "releases since 2024, 1.19.2 among them (a JSON list)",
}


def saved_plans_page(saved: SavedPlans) -> Page:
    """List the plans of a file or a log, in its order."""
    title = f"Recompute plans of {saved.source}, as in {_WHAT[saved.dialect]}"
    blocks: list[Block] = [] if saved.complete else [Note(_cut(saved), Mark.BAD)]
    if saved.rows:
        blocks.append(_table(saved))
    else:
        blocks.append(Note("It names no plan.", Mark.QUIET))
    blocks += _notes(saved)
    if saved.log is not None:
        blocks.append(Folded("Its tables, as they stand in it", saved.tables(), repeats=True))
    return Page(title, tuple(blocks))


def _cut(saved: SavedPlans) -> str:
    log = saved.log
    found = [] if log is None else [(len(log.alleviations), "summary of 2022", "summaries of 2022")]
    if log is not None:
        found += [
            (
                len(log.matrix.features) + len(log.matrix.plans),
                "line of the features",
                "lines of the features",
            ),
            (len(log.insight.rows), "row of MemoryInsight", "rows of MemoryInsight"),
        ]
    read = ", ".join(units.many(number, one, more) for number, one, more in found if number)
    return f"This log is cut off: the end of a table is missing. What was there was read: {read}."


def _table(saved: SavedPlans) -> Table:
    columns = _saved_columns(saved)
    shown = saved.rows[:ROWS_SHOWN]
    rows = tuple(row(*(write(one) for _, write in columns)) for one in shown)
    hidden = len(saved.rows) - len(shown)
    rest = left_out(hidden, "more: .table() has them.")
    return Table("", tuple(column for column, _ in columns), rows, rest)


def _saved_columns(saved: SavedPlans) -> list[SavedShown]:
    columns: list[SavedShown] = [
        (Column("plan", meaning="as memory_plan takes it today"), lambda one: one.config),
        (Column("on", meaning="whether it was on"), _was_on),
    ]
    if any(one.places is not None for one in saved.rows):
        places = Column("places", numeric=True, meaning="occurrences, by the log")
        columns.append((places, lambda one: units.count(one.places)))
    if any(_bytes(one) is not None for one in saved.rows):
        saves = Column(
            "saves", numeric=True, meaning="predicted by ORT for the log's own batch, not measured"
        )
        columns.append((saves, lambda one: units.size(_bytes(one))))
    if any(_bytes(one) is None and one.shapes for one in saved.rows):
        columns.append((Column("need not be kept", meaning="by the log"), lambda one: "; ".join(one.shapes)))
    if any(one.present is not None for one in saved.rows):
        columns.append((Column("this model", meaning="whether the present model has it"), _present))
    if any(one.sentence for one in saved.rows):
        columns.append((Column("what it does"), lambda one: one.sentence))
    return columns


def _bytes(one: SavedPlan) -> float | None:
    return one.printed_bytes if one.printed_bytes is not None else one.saving_bytes


def _present(one: SavedPlan) -> Cell:
    return Cell("has it", Mark.GOOD) if one.present else Cell("has it not", Mark.WARN)


def _was_on(one: SavedPlan) -> Cell:
    if not one.on:
        return Cell("-", Mark.QUIET)
    if one.applied is None or one.requested is None:
        return Cell("yes")
    asked = "all" if one.requested < 0 else units.count(one.requested)
    return Cell(f"yes, applied {units.count(one.applied)} (asked for {asked})")


def _notes(saved: SavedPlans) -> list[Note]:
    notes = []
    if saved.symbols:
        sizes = ", ".join(f"{name} = {size:,}" for name, size in saved.symbols.items())
        notes.append(Note(f"Predicted by ORT for the log's own batch ({sizes}), not measured.", Mark.QUIET))
    wrong = [
        one
        for one in saved.rows
        if one.printed_bytes is not None
        and one.saving_bytes is not None
        and one.printed_bytes != one.saving_bytes
    ]
    notes += [
        Note(
            f"{one.config}: the log says {units.count(one.printed_bytes)} B, and its own formula comes to "
            f"{units.count(one.saving_bytes)} B.",
            Mark.WARN,
        )
        for one in wrong
    ]
    absent = [one for one in saved.rows if one.present is False]
    if absent:
        number = f"{units.count(len(absent))} of {units.count(len(saved.rows))}"
        lines = [one.config + (f" (near: {', '.join(one.near)})" if one.near else "") for one in absent]
        notes.append(Note(f"This model does not have {number}: {'; '.join(lines)}.", Mark.WARN))
    if saved.present:
        notes.append(Note(f"To switch on what it has: lab.set(memory_plan={list(saved.present)})"))
    elif not any(one.present is not None for one in saved.rows) and saved.rows:
        notes.append(Note("Not compared with a model: saved.against(lab.plan()) does that.", Mark.QUIET))
    return notes
