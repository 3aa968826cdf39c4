"""The page of the stash: the activations, what they add up to by layer, operator and module, and the figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.coverage import names
from ortlab.memory.activations import place_of
from ortlab.render import units
from ortlab.render.page import Block, Cell, Column, Drawing, Folded, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.memory.activations import StashedActivation, StashGroup
    from ortlab.memory.stash import Kind, Stash

ACTIVATIONS_SHOWN = 30
"""Rows of activations that a page shows: those that take most."""

GROUPS_SHOWN = 40
"""Layers, operators or modules that a page shows, each."""


def stash_page(stash: Stash) -> Page:
    """List what is kept, the largest first, and what it adds up to; or that alone, where one kind is asked for."""
    if not stash.rows:
        return Page("Stash", (Note("Nothing is kept for backward.", Mark.QUIET), *_missing(stash)))
    if stash.shown_by:
        return _by_page(stash, stash.shown_by)
    before, after = _notes(stash)
    blocks: list[Block] = [
        Note(total_sentence(stash)),
        *before,
        groups_table(stash, "layer", "By layer"),
        _drawing(stash),
        groups_table(stash, "operator", "By operator"),
        Folded("By module", blocks=(groups_table(stash, "module", ""),)),
        activations_table(stash),
        *_effects(stash),
        *after,
    ]
    return Page("Stash: what is kept for backward", tuple(blocks))


def notes_of_stash(stash: Stash) -> tuple[Note, ...]:
    """Say everything about a stash that its tables do not."""
    before, after = _notes(stash)
    return (*before, *after)


def _notes(stash: Stash) -> tuple[tuple[Note, ...], tuple[Note, ...]]:
    how = Note(
        f"Worked out from the shapes in the graph that runs, for {_sizes(stash)}; not measured. Results that are "
        "views of each other (Reshape and the like) share a buffer and are one row, so the rows add up. "
        "Parameters, inputs and constants are not kept for backward: they are there anyway.",
        Mark.QUIET,
    )
    before = (*_unknown(stash), *_returned(stash), *_applied(stash))
    return before, (*_inputs(stash), *_missing(stash), how)


def _by_page(stash: Stash, kind: Kind) -> Page:
    return Page(
        f"Stash by {kind}",
        (
            Note(total_sentence(stash)),
            *_unknown(stash),
            groups_table(stash, kind, ""),
            *_missing(stash),
            Note(f"For {_sizes(stash)}; worked out from shapes, not measured.", Mark.QUIET),
        ),
    )


def total_sentence(stash: Stash) -> str:
    """Say how much is kept, and in how many buffers."""
    least = "At least " if stash.unknown else ""
    buffers = "1 buffer" if len(stash.rows) == 1 else f"{units.count(len(stash.rows))} buffers"
    return f"{least}{units.size(stash.total_bytes)} in {buffers}."


def stash_notes(stash: Stash) -> tuple[Note, ...]:
    """Say what the rows alone do not: what is unknown, returned, applied, read from inputs, and which batch it is."""
    notes = (*_unknown(stash), *_returned(stash), *_applied(stash), *_inputs(stash), *_missing(stash))
    return (*notes, Note(f"For {_sizes(stash)}; worked out from shapes, not measured.", Mark.QUIET))


def groups_table(stash: Stash, kind: Kind, caption: str) -> Table:
    """Make the table of what the stash adds up to by layer, operator or module; its last row is the total."""
    groups = stash.by(kind)
    shown = groups[:GROUPS_SHOWN]
    columns = (
        Column(kind),
        Column("activations", numeric=True),
        Column("bytes", numeric=True, meaning="worked out from shapes; the rows add up to the total"),
        Column("share", numeric=True, meaning="part of all that is kept"),
    )
    rows = [
        row(group.name, units.count(group.count), _group_size(group), units.percent(stash.share(group)))
        for group in shown
    ]
    hidden = groups[len(shown) :]
    if hidden:
        rest = sum(group.bytes for group in hidden)
        rows.append(
            row(
                Cell(f"{units.count(len(hidden))} more", Mark.QUIET),
                units.count(sum(group.count for group in hidden)),
                units.size(rest),
                units.percent(rest / stash.total_bytes if stash.total_bytes else 0.0),
            )
        )
    total = row("all", units.count(len(stash.rows)), units.size(stash.total_bytes), units.percent(1.0))
    return Table(caption, columns, (*rows, total))


def activations_table(stash: Stash) -> Table:
    """Make the table of the activations that take most, those of all layers together."""
    alike = stash.alike()
    shown = alike[:ACTIVATIONS_SHOWN]
    columns: tuple[Column, ...] = (
        Column("operator", meaning="what computes it; -> names which of several results"),
        Column("module", meaning="where in the model; a star stands for the numbers of the layers"),
        Column("shape", meaning="sizes; a name is a dimension of the input"),
        Column("type"),
        Column("places", numeric=True, meaning="how many such activations there are"),
        Column("each", numeric=True, meaning="bytes of one, worked out from the shape"),
        Column("together", numeric=True),
        Column("share", numeric=True, meaning="part of all that is kept, together"),
        Column("kept for", meaning="whether backward nodes read it; whether the model returns it"),
    )
    if stash.plans_known:
        columns = (
            *columns,
            Column("removed by", meaning="recompute plans that remove it, each applied alone"),
        )
    rows = tuple(_activation(stash, rows) for rows in shown)
    hidden = [one for rows in alike[len(shown) :] for one in rows]
    left_out = ""
    if hidden:
        rest = units.size(sum(one.bytes or 0 for one in hidden))
        left_out = f"{units.count(len(hidden))} smaller ones, {rest} together: lab.stash().table() has them."
    return Table("The largest activations, those of all layers together", columns, rows, left_out)


def _activation(stash: Stash, alike: tuple[StashedActivation, ...]) -> tuple[Cell, ...]:
    one = alike[0]
    together = None if one.bytes is None else one.bytes * len(alike)
    cells = row(
        f"{one.operator} -> {one.output}" if one.output else one.operator,
        Cell(place_of(one) or "the model itself", more=_details(alike)),
        "not known" if one.shape is None else " x ".join(map(str, one.shape)) or "scalar",
        one.dtype or "not known",
        units.count(len(alike)),
        Cell("not known", Mark.WARN) if one.bytes is None else _measured(one),
        units.size(together),
        units.percent(None if together is None else together / (stash.total_bytes or 1)),
        _kept_for(one),
    )
    if not stash.plans_known:
        return cells
    return (*cells, *row(", ".join(one.plans or ()) or Cell("no plan", Mark.QUIET)))


def _details(alike: tuple[StashedActivation, ...]) -> str:
    """Write what HTML keeps folded under the module: names for who looks into the graph, of the first of them."""
    one = alike[0]
    lines = [f"result   {one.value}", f"node     {one.node}", *(f"view     {name}" for name in one.views)]
    if one.source:
        lines.append(f"source   {one.source}")
    if one.bytes_symbolic:
        lines.append(f"bytes    {one.bytes_symbolic}")
    lines += [f"read by  {name}" for name in one.kept_by]
    if len(alike) > 1:
        lines.append(f"and {units.count(len(alike) - 1)} more like it")
    return "\n".join(lines)


def _kept_for(one: StashedActivation) -> str:
    return " and ".join(
        filter(None, ("backward" if one.kept_by else "", "the caller" if one.returned else ""))
    )


def _measured(one: StashedActivation) -> str:
    return f"{units.size(one.bytes)}{' measured' if one.measured else ''}"


def _group_size(group: StashGroup) -> Cell:
    if not group.unknown:
        return Cell(units.size(group.bytes))
    return Cell(f"{units.size(group.bytes)} and {units.count(group.unknown)} not known", Mark.WARN)


def _unknown(stash: Stash) -> tuple[Note, ...]:
    if not stash.unknown:
        return ()
    what = (
        "1 activation is" if len(stash.unknown) == 1 else f"{units.count(len(stash.unknown))} activations are"
    )
    return (
        Note(
            f"{what} of unknown size and not in the total: the graph tells the shape only when it runs. "
            "A profiled step knows: lab.stash(sizes=lab.profile().sizes).",
            Mark.WARN,
        ),
    )


def _returned(stash: Stash) -> tuple[Note, ...]:
    if not stash.returned_bytes:
        return ()
    share = units.percent(stash.returned_bytes / stash.total_bytes)
    return (
        Note(
            f"Of it, {units.size(stash.returned_bytes)} ({share}) is there only because the model returns it: no "
            "backward node reads it, and it is free once the caller lets go of the outputs.",
        ),
    )


def _applied(stash: Stash) -> tuple[Note, ...]:
    if not stash.applied:
        return ()
    return (Note(f"With recompute plans applied: {', '.join(stash.applied)}.", Mark.GOOD),)


def _effects(stash: Stash) -> tuple[Block, ...]:
    if not stash.effects:
        return ()
    columns = (
        Column("plan", meaning="what memory_plan takes"),
        Column("removes", numeric=True, meaning="activations that it computes again instead of keeping them"),
        Column(
            "keeps instead",
            numeric=True,
            meaning="what the nodes that it repeats read, and was not kept before",
        ),
        Column("less kept", numeric=True, meaning="the difference of the two"),
    )
    # Those of unknown effect first, then those that do most.
    effects = sorted(
        stash.effects, key=lambda one: (one.net_bytes is not None, -(one.net_bytes or 0), one.config)
    )
    rows = tuple(
        row(
            one.config,
            _bytes(one.removed_bytes),
            _bytes(one.added_bytes),
            Cell(_bytes(one.net_bytes), Mark.WARN if (one.net_bytes or 0) <= 0 else Mark.GOOD),
        )
        for one in effects
    )
    return (
        Table("What each plan does to it, applied alone", columns, rows),
        Note(
            "Worked out from the graph with each plan. How much the peak of a step falls is another question: it need "
            "not lie where this memory is freed.",
            Mark.QUIET,
        ),
    )


def _bytes(number: int | None) -> str:
    return "not known" if number is None else units.size(number)


def _inputs(stash: Stash) -> tuple[Note, ...]:
    if not stash.inputs:
        return ()
    listed = ", ".join(f"{one.name} ({units.size(one.bytes)})" for one in stash.inputs)
    return (Note(f"Backward also reads these inputs, which the caller holds anyway: {listed}.", Mark.QUIET),)


def _missing(stash: Stash) -> tuple[Note, ...]:
    if not stash.missing:
        return ()
    return (Note(f"Without a graph, since not called yet: {names(stash.missing)}.", Mark.WARN),)


def _sizes(stash: Stash) -> str:
    return ", ".join(f"{name} = {size:,}" for name, size in stash.symbols.items()) or "fixed sizes"


def _drawing(stash: Stash) -> Drawing:
    what = "What each layer keeps, by operator; ortlab.plot(stash) draws it."

    def svg() -> str:
        from ortlab.render.plots import svg as inline
        from ortlab.render.stash_plot import stash_plot

        return inline(stash_plot(stash), what)

    return Drawing(what, svg)
