"""The page of a comparison of two runs: where they part first, whether it matters, and what was checked."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.parity.parity import DIFFERS, EQUAL, KINDS, NOT_COMPARED, WITHIN
from ortlab.render.page import Block, Cell, Column, Drawing, Folded, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortlab.parity.parity import Divergence, Parity, TensorPair

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
        blocks.append(_drawing(parity))
    blocks += _folded(parity)
    return Page(_title(parity), tuple(blocks))


def _title(parity: Parity) -> str:
    steps = f"{units.count(parity.steps)} {'steps' if parity.steps > 1 else 'step'}"
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


def _drawing(parity: Parity) -> Drawing:
    what = (
        "Distance of each tensor over the depth of the model, and step by step; ortlab.plot(parity) draws it."
    )

    def svg() -> str:
        from ortlab.render.parity_plot import parity_plot
        from ortlab.render.plots import svg as inline

        return inline(parity_plot(parity), what)

    return Drawing(what, svg)


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
    return Table(
        "", _TENSORS, tuple(rows), left_out=f"{units.count(hidden)} more in .table()" if hidden else ""
    )
