"""The pages of parity: where two runs part first, with the figure; and a model's own autograd Functions."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.parity.parity import (
    DIFFERS,
    EQUAL,
    INPUT_GRADIENT,
    KINDS,
    NOT_COMPARED,
    OUTPUT,
    OUTPUT_GRADIENT,
    PARAMETER_GRADIENT,
    UPDATED_PARAMETER,
    WITHIN,
)
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, left_out, row
from ortlab.render.plots import COLOURS, FALLBACK, INK, drawing, dress, key, new_figure, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.parity.parity import Divergence, FunctionReport, Parity, TensorPair

_SHOWN: Final = 40
"""Rows of a folded table; the rest is in `Parity.table`."""

_NAMES: Final = {"eager": "PyTorch", "ort": "ONNX Runtime"}
_FIRST: Final = (
    Column("phase"),
    Column("parts first in", meaning="the module whose own computation differs"),
    Column("its forward", meaning="file and line"),
    Column("seen in", meaning="the first tensor beyond its limit, in the order of the computation"),
    Column(
        "distance", numeric=True, meaning="measured: norm of the difference over the norm of the reference"
    ),
    Column("floor", numeric=True, meaning="measured: what repetition and rounding explain at this place"),
    Column("limit", numeric=True, meaning="the distance from which on it counts as a difference"),
    Column("why this module"),
)

_TENSORS: Final = (
    Column("module"),
    Column("tensor"),
    Column("step", numeric=True),
    Column("distance", numeric=True, meaning="relative, L2"),
    Column("floor", numeric=True),
    Column("mean", numeric=True, meaning="reference | candidate"),
    Column("std", numeric=True, meaning="reference | candidate"),
    Column("nan", numeric=True, meaning="reference | candidate"),
)

_CHECKS: Final = (Column("question"), Column("answer"))
_STATES: Final = {"done": Mark.PLAIN, "found": Mark.WARN, "not done": Mark.QUIET}


def parity_page(parity: Parity) -> Page:
    """Say where two runs part first, whether it matters, and what was looked at."""
    blocks: list[Block] = [_verdict(parity)]
    found = [one for one in (parity.forward, parity.backward, parity.update) if one]
    if found:
        blocks.append(Table("", _FIRST, tuple(_first_row(one) for one in found)))
    blocks += [Note(text, Mark.WARN) for text in parity.notes]
    if parity.losses:
        blocks.append(_losses(parity))
    if parity.checks:
        rows = tuple(row(one.question, Cell(one.result, _STATES[one.state])) for one in parity.checks)
        blocks.append(Table("Checklist", _CHECKS, rows))
    blocks.append(_counts(parity))
    if any(pair.distance for pair in parity.pairs):
        blocks.append(
            drawing(
                "Distance of each tensor over the depth of the model, and step by step; ortlab.plot(parity) draws it.",
                lambda: parity_plot(parity),
            )
        )
    blocks += _folded(parity)
    return Page(_title(parity), tuple(blocks))


def _title(parity: Parity) -> str:
    steps = units.many(parity.steps, "step")
    return f"Parity of {parity.model}: {_name(parity.candidate)} against {_name(parity.reference)}, {steps}"


def _name(engine: str) -> str:
    return _NAMES.get(engine, engine)


def _verdict(parity: Parity) -> Note:
    compared = len(parity.pairs) - len(parity.not_compared)
    losses = parity.loss_difference
    matters = "" if math.isnan(losses) else f" The losses differ by {units.difference(losses)} at most."
    if parity.ok:
        words = (
            f"Of {units.count(compared)} tensors none is further apart than repetition and rounding explain."
        )
        return Note(words + matters, Mark.GOOD)
    first = parity.first
    assert first is not None  # noqa: S101 - as ok says
    kind = f" ({first.module_class})" if first.module_class else ""
    times = _times(first.pair)
    words = (
        f"The runs part in the {first.phase} of step {first.pair.site.step}, in {first.module or 'the model'}{kind}: "
        f"{first.reason}, {times}."
    )
    if first.others:
        others = ", ".join(one or "the model" for one in first.others)
        words += f" It may also be {others}: these cannot be told apart."
    return Note(words + matters, Mark.BAD)


def _times(pair: TensorPair) -> str:
    if pair.distance is None:
        return "by how much cannot be told"
    if math.isinf(pair.distance.relative):
        return "by nan or inf on one side only"
    distance = units.difference(pair.distance.relative)
    return f"by {distance}, where rounding explains {units.difference(pair.floor)}"


def _first_row(one: Divergence) -> tuple[Cell, ...]:
    site, distance = one.pair.site, one.pair.distance
    where = f"{one.module or 'the model'}{f' ({one.module_class})' if one.module_class else ''}"
    return row(
        one.phase,
        Cell(where, Mark.BAD),
        PurePath(one.source).name or "-",
        f"{site.module or 'the model'}: {site.kind} {site.name}, step {site.step}"
        + (f", call {site.call}" if site.call > 1 else ""),
        units.difference(distance.relative if distance else None),
        units.difference(one.pair.floor),
        units.difference(one.pair.limit),
        one.reason,
    )


def _losses(parity: Parity) -> Table:
    columns = (
        Column("step", numeric=True),
        Column(f"loss, {_name(parity.reference)}", numeric=True, meaning="measured"),
        Column(f"loss, {_name(parity.candidate)}", numeric=True, meaning="measured"),
        Column("difference", numeric=True, meaning="relative, no unit"),
    )
    rows = []
    for number, (theirs, ours) in enumerate(parity.losses, start=1):
        both = theirs is not None and ours is not None
        apart = abs(ours - theirs) / max(abs(ours), abs(theirs)) if both and ours != theirs else 0.0  # type: ignore[operator,arg-type]
        rows.append(
            row(str(number), units.loss(theirs), units.loss(ours), units.difference(apart if both else None))
        )
    return Table("Losses", columns, tuple(rows))


def _counts(parity: Parity) -> Table:
    counts = Counter((pair.site.kind, pair.verdict) for pair in parity.pairs)
    columns = (
        Column("tensors"),
        Column("agree", numeric=True, meaning="within the limit"),
        Column("of these bit for bit", numeric=True),
        Column("differ", numeric=True, meaning="beyond the limit"),
        Column("not compared", numeric=True, meaning="only one side has them; see below"),
    )
    rows = []
    for kind in KINDS:
        equal, within, differing, unseen = (
            counts[kind, name] for name in (EQUAL, WITHIN, DIFFERS, NOT_COMPARED)
        )
        if not equal + within + differing + unseen:
            continue
        rows.append(
            row(
                kind,
                units.count(equal + within),
                units.percent(equal / (equal + within)) if equal + within else "-",
                Cell(units.count(differing), Mark.BAD if differing else Mark.PLAIN),
                units.count(unseen),
            )
        )
    written = f"{units.size(parity.written_bytes)} were written per step." if parity.written_bytes else ""
    return Table("What was compared", columns, tuple(rows), left_out=written)


def _folded(parity: Parity) -> list[Block]:
    blocks: list[Block] = []
    differing = parity.differing
    if differing:
        blocks.append(
            Folded(
                f"Beyond the limit: {units.count(len(differing))}, in the order of the computation",
                blocks=(_tensors(differing),),
            )
        )
    reasons = Counter(pair.note for pair in parity.not_compared)
    if reasons:
        columns = (Column("why"), Column("tensors", numeric=True), Column("such as"))
        rows = tuple(
            row(reason or "-", units.count(count), _such_as(parity.not_compared, reason))
            for reason, count in reasons.most_common()
        )
        title = f"Not compared: {units.count(len(parity.not_compared))}"
        blocks.append(Folded(title, blocks=(Table("", columns, rows),)))
    return blocks


def _such_as(pairs: Sequence[TensorPair], reason: str) -> str:
    site = next(pair.site for pair in pairs if pair.note == reason)
    return f"{site.module or 'the model'}: {site.kind} {site.name}"


def _tensors(pairs: Sequence[TensorPair]) -> Table:
    rows = []
    for pair in pairs[:_SHOWN]:
        sides = (pair.reference, pair.candidate)
        rows.append(
            row(
                pair.site.module or "the model",
                f"{pair.site.kind} {pair.site.name}",
                str(pair.site.step),
                units.difference(pair.distance.relative if pair.distance else None),
                units.difference(pair.floor),
                *(
                    " | ".join(units.loss(getattr(side, fact)) if side else units.MISSING for side in sides)
                    for fact in ("mean", "std")
                ),
                " | ".join(units.count(side.nan) if side else units.MISSING for side in sides),
            )
        )
    hidden = len(pairs) - len(rows)
    return Table("", _TENSORS, tuple(rows), left_out(hidden, "more in .table()"))


# ---- the figure -----------------------------------------------------------------------------------------------------


_HEIGHT: Final = 7.0  # inches
_LEAST: Final = 1e-9
"""Where a distance of zero is drawn: a logarithmic axis has none."""

_MOST: Final = 1e3
_PHASES: Final = (
    ("Forward: what modules return, in the order of the calls", (OUTPUT,), "forward"),
    (
        "Backward: gradients, in the order in which they arrive",
        (OUTPUT_GRADIENT, INPUT_GRADIENT, PARAMETER_GRADIENT),
        "backward",
    ),
)


def parity_plot(parity: Parity) -> Figure:
    """Draw the distance of each tensor of the first step over the depth, and the largest of each step."""
    figure = new_figure(_HEIGHT)
    forward, backward, over_steps = figure.subplots(3)
    step = parity.first.pair.site.step if parity.first else 1
    for axes, (title, kinds, phase) in zip((forward, backward), _PHASES, strict=True):
        pairs = [
            one for one in parity.pairs if one.site.step == step and one.site.kind in kinds and one.distance
        ]
        _over_depth(axes, pairs, getattr(parity, phase), f"{title}; step {step}")
    _over_steps(over_steps, parity)
    return figure


def _over_depth(axes: Axes, pairs: Sequence[TensorPair], first: Divergence | None, title: str) -> None:
    dress(axes, title, "tensor", "relative distance")
    if not pairs:
        say(axes, "Nothing was compared.")
        return
    places = range(1, len(pairs) + 1)
    axes.plot(
        places, [_drawn(pair.limit) for pair in pairs], color=INK, linewidth=0.8, linestyle=":", label="limit"
    )
    axes.plot(places, [_drawn(pair.floor) for pair in pairs], color=COLOURS[1], linewidth=1.0, label="floor")
    axes.scatter(
        places,
        [_drawn(pair.distance.relative) for pair in pairs if pair.distance],
        s=9,
        color=[FALLBACK if pair.verdict == "differs" else COLOURS[0] for pair in pairs],
        label="distance",
        zorder=3,
    )
    if first is not None and first.pair in pairs:
        place = pairs.index(first.pair) + 1
        axes.axvline(place, color=FALLBACK, linewidth=1, linestyle="--")
        left = place > len(pairs) / 2
        axes.annotate(
            first.module or "the model",
            (place, 0.06),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if left else 4, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=8,
            color=FALLBACK,
        )
    axes.set_yscale("log")
    key(axes)


def _over_steps(axes: Axes, parity: Parity) -> None:
    from matplotlib.ticker import MaxNLocator

    dress(axes, "Median and largest distance of each step, as a share of the limit", "step", "share of limit")
    steps = sorted({pair.site.step for pair in parity.pairs})
    kinds = (
        ("activations", (OUTPUT,)),
        ("gradients", (OUTPUT_GRADIENT, INPUT_GRADIENT, PARAMETER_GRADIENT)),
        ("updated parameters", (UPDATED_PARAMETER,)),
    )
    drawn = False
    for position, (name, wanted) in enumerate(kinds):
        shares = {step: _shares(parity.pairs, step, wanted) for step in steps}
        known = [step for step in steps if shares[step]]
        if not known:
            continue
        drawn = True
        middle = [_drawn(sorted(shares[step])[len(shares[step]) // 2]) for step in known]
        largest = [_drawn(max(shares[step])) for step in known]
        colour = COLOURS[position]
        axes.plot(known, largest, color=colour, marker="o", markersize=4, linewidth=1.2, label=name)
        axes.plot(known, middle, color=colour, marker="_", markersize=7, linewidth=0.8, linestyle=":")
    if not drawn:
        say(axes, "Nothing was compared.")
        return
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    key(axes)


def _shares(pairs: Sequence[TensorPair], step: int, kinds: Sequence[str]) -> list[float]:
    return [
        pair.distance.relative / pair.limit
        for pair in pairs
        if pair.site.step == step and pair.site.kind in kinds and pair.distance and pair.limit
    ]


def _drawn(value: float) -> float:
    return _MOST if math.isinf(value) or math.isnan(value) else min(_MOST, max(_LEAST, value))


# ---- autograd Functions ---------------------------------------------------------------------------------------------


_FUNCTION_MARKS = {"agrees": Mark.GOOD, "differs": Mark.BAD, "not checked": Mark.WARN}


def function_page(report: FunctionReport) -> Page:
    """List the Functions, and say what a difference means."""
    heading = f"Autograd Functions of {report.model}"
    if not report.checks:
        return Page(heading, (Note("Its forward calls none.", Mark.QUIET),))
    rows = tuple(
        row(one.name, units.count(one.calls), Cell(one.state, _FUNCTION_MARKS[one.state]), one.found or "-")
        for one in report.checks
    )
    columns = (
        Column("function"),
        Column("calls", numeric=True, meaning="in one forward of the model"),
        Column("backward", meaning="measured: against finite differences of the forward, in float64"),
        Column("what was found"),
    )
    note = Note(
        "Each Function ran alone, on the first inputs it got. PyTorch and ONNX Runtime run the same backward: one that "
        "differs trains alike with both, and wrongly, unless it is meant, as in a straight-through estimator.",
        Mark.QUIET if report.ok else Mark.BAD,
    )
    return Page(heading, (Table("", columns, rows), note))
