"""The page and the figure of the saved activations: each of them, and their totals by layer, operator and module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.memory.saved_activations import OUTSIDE, in_any_layer
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row
from ortlab.render.plan_pages import missing_notes
from ortlab.render.plots import COLOURS, MIB, drawing, dress, key, new_figure, plain, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

    from ortlab.memory.saved_activations import ActivationGroup, Kind, SavedActivation, SavedActivations

ACTIVATIONS_SHOWN = 30
"""Rows of activations that a page shows: those that take most."""

GROUPS_SHOWN = 40
"""Layers, operators or modules that a page shows, each."""


def activations_page(activations: SavedActivations) -> Page:
    """List what is kept, the largest first, and what it adds up to; or that alone, where one kind is asked for."""
    if not activations.rows:
        return Page(
            "Saved activations",
            (Note("Nothing is kept for backward.", Mark.QUIET), *missing_notes(activations)),
        )
    if activations.shown_by:
        return _by_page(activations, activations.shown_by)
    before, after = _notes(activations)
    blocks: list[Block] = [
        Note(total_sentence(activations)),
        *before,
        groups_table(activations, "layer", "By layer"),
        drawing(
            "What each layer keeps, by operator; ortlab.plot(activations) draws it.",
            lambda: activations_plot(activations),
        ),
        groups_table(activations, "operator", "By operator"),
        Folded("By module", blocks=(groups_table(activations, "module", ""),)),
        activations_table(activations),
        *_effects(activations),
        *after,
    ]
    return Page("Saved activations: what is kept for backward", tuple(blocks))


def _notes(activations: SavedActivations) -> tuple[tuple[Note, ...], tuple[Note, ...]]:
    how = Note(
        "Worked out from the shapes in the graph that runs, not measured. Results that are "
        "views of each other (Reshape and the like) share a buffer and are one row, so the rows add up. "
        "Parameters, inputs and constants are not kept for backward: they are there anyway.",
        Mark.QUIET,
    )
    before = (
        *_other_batch(activations),
        *_unknown(activations),
        *_returned(activations),
        *_applied(activations),
    )
    return before, (*_inputs(activations), *missing_notes(activations), how, *_built(activations))


def _built(activations: SavedActivations) -> tuple[Note, ...]:
    return (Note(activations.note, Mark.QUIET),) if activations.note else ()


def _by_page(activations: SavedActivations, kind: Kind) -> Page:
    return Page(
        f"Saved activations by {kind}",
        (
            Note(total_sentence(activations)),
            *_other_batch(activations),
            *_unknown(activations),
            groups_table(activations, kind, ""),
            *missing_notes(activations),
            Note(_HOW, Mark.QUIET),
            *_built(activations),
        ),
    )


def total_sentence(activations: SavedActivations) -> str:
    """Say how much is kept, in how many buffers, and for which batch."""
    least = "At least " if activations.unknown else ""
    buffers = units.many(activations.rows, "buffer")
    return f"{least}{units.size(activations.total_bytes)} in {buffers}, for {_sizes(activations.symbols)}."


_HOW: Final = "Worked out from shapes, not measured."


def batch_words(activations: SavedActivations) -> str:
    """Say in a line of which batch the bytes are, and whether the last one was another."""
    last = (
        f"; ONNX Runtime's last batch had {_sizes(activations.last_batch)}" if activations.last_batch else ""
    )
    return f"For {_sizes(activations.symbols)}{last}. {_HOW}"


def _other_batch(activations: SavedActivations) -> tuple[Note, ...]:
    """Say that the last call was of another batch than the graph was built with, and how to ask for that."""
    if not (last := activations.last_batch):
        return ()
    plain = all(name.isidentifier() for name in last)
    given = ", ".join(f"{name}={size}" for name, size in last.items()) if plain else f"**{dict(last)}"
    return (
        Note(
            "That is the batch that the graph was built with. ONNX Runtime's last batch had "
            f"{_sizes(last)}: lab.activations().at({given}) works out what that one keeps.",
            Mark.WARN,
        ),
    )


def activations_notes(activations: SavedActivations) -> tuple[Note, ...]:
    """Say what the rows alone do not: of which batch it is, what is unknown, returned, applied, read from inputs."""
    return (
        *_other_batch(activations),
        *_unknown(activations),
        *_returned(activations),
        *_applied(activations),
        *_inputs(activations),
        *missing_notes(activations),
        Note(_HOW, Mark.QUIET),
        *_built(activations),
    )


def groups_table(activations: SavedActivations, kind: Kind, caption: str) -> Table:
    """Make the table of the totals by layer, operator or module; its last row is the sum of all."""
    groups = activations.by(kind)
    shown = groups[:GROUPS_SHOWN]
    columns = (
        Column(kind),
        Column("activations", numeric=True),
        Column("bytes", numeric=True, meaning="worked out from shapes; the rows add up to the total"),
        Column("share", numeric=True, meaning="part of all that is kept"),
    )
    rows = [
        row(group.name, units.count(group.count), _group_size(group), units.percent(activations.share(group)))
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
                units.percent(rest / activations.total_bytes if activations.total_bytes else 0.0),
            )
        )
    total = row(
        "all", units.count(len(activations.rows)), units.size(activations.total_bytes), units.percent(1.0)
    )
    return Table(caption, columns, (*rows, total))


def activations_table(activations: SavedActivations) -> Table:
    """Make the table of the activations that take most, those of all layers together."""
    alike = activations.alike()
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
    if activations.plans_known:
        columns = (
            *columns,
            Column("removed by", meaning="recompute plans that remove it, each applied alone"),
        )
    rows = tuple(_activation(activations, rows) for rows in shown)
    hidden = [one for rows in alike[len(shown) :] for one in rows]
    left_out = ""
    if hidden:
        rest = units.size(sum(one.bytes or 0 for one in hidden))
        left_out = (
            f"{units.count(len(hidden))} smaller ones, {rest} together: lab.activations().table() has them."
        )
    return Table("The largest activations, those of all layers together", columns, rows, left_out)


def _activation(activations: SavedActivations, alike: tuple[SavedActivation, ...]) -> tuple[Cell, ...]:
    one = alike[0]
    together = None if one.bytes is None else one.bytes * len(alike)
    cells = row(
        f"{one.operator} -> {one.output}" if one.output else one.operator,
        Cell(in_any_layer(one.module) or "the model itself", more=_details(alike)),
        "not known" if one.shape is None else " x ".join(map(str, one.shape)) or "scalar",
        one.dtype or "not known",
        units.count(len(alike)),
        Cell("not known", Mark.WARN) if one.bytes is None else _measured(one),
        units.size(together),
        units.percent(None if together is None else together / (activations.total_bytes or 1)),
        _kept_for(one),
    )
    if not activations.plans_known:
        return cells
    return (*cells, *row(", ".join(one.plans or ()) or Cell("no plan", Mark.QUIET)))


def _details(alike: tuple[SavedActivation, ...]) -> str:
    """Write what HTML folds under the module: names of the first of them, for users who look into the graph."""
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


def _kept_for(one: SavedActivation) -> str:
    return " and ".join(
        filter(None, ("backward" if one.kept_by else "", "the caller" if one.returned else ""))
    )


def _measured(one: SavedActivation) -> str:
    return f"{units.size(one.bytes)}{' measured' if one.measured else ''}"


def _group_size(group: ActivationGroup) -> Cell:
    if not group.unknown:
        return Cell(units.size(group.bytes))
    return Cell(f"{units.size(group.bytes)} and {units.count(group.unknown)} not known", Mark.WARN)


def _unknown(activations: SavedActivations) -> tuple[Note, ...]:
    if not activations.unknown:
        return ()
    what = (
        "1 activation is"
        if len(activations.unknown) == 1
        else f"{units.count(len(activations.unknown))} activations are"
    )
    return (
        Note(
            f"{what} of unknown size and not in the total: the graph tells the shape only when it runs. "
            "A profiled step knows: lab.activations(sizes=lab.profile().sizes).",
            Mark.WARN,
        ),
    )


def _returned(activations: SavedActivations) -> tuple[Note, ...]:
    if not activations.returned_bytes:
        return ()
    share = units.percent(activations.returned_bytes / activations.total_bytes)
    return (
        Note(
            f"Of it, {units.size(activations.returned_bytes)} ({share}) is there only because the model returns it: no "
            "backward node reads it, and it is free once the caller lets go of the outputs.",
        ),
    )


def _applied(activations: SavedActivations) -> tuple[Note, ...]:
    if not activations.applied:
        return ()
    return (Note(f"With recompute plans applied: {', '.join(activations.applied)}.", Mark.GOOD),)


def _effects(activations: SavedActivations) -> tuple[Block, ...]:
    if not activations.effects:
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
        activations.effects, key=lambda one: (one.net_bytes is not None, -(one.net_bytes or 0), one.config)
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


def _inputs(activations: SavedActivations) -> tuple[Note, ...]:
    if not activations.inputs:
        return ()
    listed = ", ".join(f"{one.name} ({units.size(one.bytes)})" for one in activations.inputs)
    return (Note(f"Backward also reads these inputs, which the caller holds anyway: {listed}.", Mark.QUIET),)


def _sizes(symbols: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size:,}" for name, size in symbols.items()) or "fixed sizes"


# ---- the figure -----------------------------------------------------------------------------------------------------


LAYERS_SHOWN: Final = 32
"""Bars: the largest layers, in the model's order."""

_REST: Final = "other operators"
_REST_COLOUR: Final = "#8d8d8d"
_NAME: Final = 36  # characters
_INCHES_PER_BAR: Final = 0.26


def activations_plot(activations: SavedActivations) -> Figure:
    """Draw what each layer keeps for backward, stacked by operator: the six that keep most, and the others.

    Activations of unknown size are left out, and the heading says so.
    """
    layers = activations.by("layer")
    largest = {group.name for group in sorted(layers, key=lambda group: -group.bytes)[:LAYERS_SHOWN]}
    shown = [group for group in layers if group.name in largest and group.bytes]
    operators = [group.name for group in activations.by("operator")[: len(COLOURS)]]
    kept: dict[str, dict[str, int]] = {name: {} for name in (*operators, _REST)}
    for one in activations.rows:
        bars = kept[one.operator if one.operator in operators else _REST]
        layer = activations.group_of(one, "layer")
        bars[layer] = bars.get(layer, 0) + (one.bytes or 0)
    figure = new_figure(1.3 + _INCHES_PER_BAR * max(len(shown), 4))
    axes = figure.add_subplot()
    unit, per_unit = ("MiB", MIB) if activations.total_bytes >= MIB else ("KiB", 1 << 10)
    heading = f"Kept for backward, worked out from shapes: {units.size(activations.total_bytes)} in all"
    if activations.unknown:
        heading += f", and {units.count(len(activations.unknown))} activations of unknown size"
    if len(shown) < sum(group.bytes > 0 for group in layers):
        heading += f"; the {len(shown)} largest layers"
    dress(axes, heading, unit, "")
    if not shown:
        say(axes, "Nothing is kept for backward.")
        return figure
    rows = [_bar_name(group.name) for group in shown]
    left = [0.0] * len(shown)
    for (operator, bars), colour in zip(
        kept.items(), (*COLOURS[: len(operators)], _REST_COLOUR), strict=True
    ):
        widths = [bars.get(group.name, 0) / per_unit for group in shown]
        if any(widths):
            axes.barh(rows, widths, left=left, label=_bar_name(operator), color=colour, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    key(axes)
    return figure


def _bar_name(text: str) -> str:
    return plain(text if text == OUTSIDE else units.fold(units.printable(text), _NAME))
