"""The page of a hunt: its points, the figure, what they say, and what the numbers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab.hunting.following import following
from ortlab.hunting.points import FAILED, FELL_BACK, FITS, OVER, PREDICTED, RAN_OUT, plans_name
from ortlab.memory.measured import RESIDENT
from ortlab.render import units
from ortlab.render.hunt_words import best_sentence, closing_sentence
from ortlab.render.page import Block, Cell, Column, Drawing, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.hunting.batch_hunt import BatchHunt
    from ortlab.hunting.points import HuntPoint

_COLUMNS: Final = (
    Column("batch", numeric=True, meaning="samples in a batch"),
    Column("recomputed", meaning="the operators whose results are recomputed instead of kept"),
    Column("outcome", meaning="whether it ran under the limit"),
    Column("peak, predicted", numeric=True, meaning="predicted from the smaller batches, before it ran"),
    Column("peak, measured", numeric=True, meaning="measured; see below what"),
    Column("samples", numeric=True, meaning="measured: median over the warm steps of all rounds"),
    Column("quartiles", numeric=True, meaning="measured: of the samples per second over the warm steps"),
    Column("why"),
)
_MARKS: Final = {
    FITS: Mark.PLAIN,
    OVER: Mark.WARN,
    RAN_OUT: Mark.WARN,
    PREDICTED: Mark.QUIET,
    FELL_BACK: Mark.BAD,
    FAILED: Mark.BAD,
}


def hunt_page(hunt: BatchHunt) -> Page:
    """Say what a hunt found, what did not fit, and how to go on if it was interrupted."""
    blocks: list[Block] = []
    if hunt.stopped and following(hunt) is not None:
        blocks.append(
            Note(
                f"Interrupted after {units.count(len(hunt.points))} points. "
                "Go on: lab.hunt_batch(make_batch, resume=...).",
                Mark.WARN,
            )
        )
    best = hunt.best
    blocks += [Note(sentence) for sentence in (closing_sentence(hunt), best_sentence(hunt)) if sentence]
    if hunt.points:
        order = sorted(hunt.points, key=lambda one: (_place(hunt, one), one.size))
        blocks.append(Table("", _COLUMNS, tuple(_row(one, best) for one in order)))
        blocks += [_drawing(hunt), _sources(hunt)]
    limit = units.size(hunt.limit_bytes)
    return Page(
        f"Hunt {hunt.number} of {hunt.model}: batch sizes on {hunt.engine} under {limit}", tuple(blocks)
    )


def _place(hunt: BatchHunt, point: HuntPoint) -> int:
    sets = ((), *(hunt.plan_sets or ()))
    return sets.index(point.plans) if point.plans in sets else len(sets)


def _row(point: HuntPoint, best: HuntPoint | None) -> tuple[Cell, ...]:
    low, high = point.spread
    spread = f"{units.rate(low)} to {units.rate(high)}" if point.timed else ""
    is_best = point is best
    return row(
        units.count(point.size),
        Cell(plans_name(point.plans), Mark.PLAIN if point.plans else Mark.QUIET, more=",".join(point.plans)),
        Cell(
            "fits, the fastest" if is_best else point.outcome, Mark.GOOD if is_best else _MARKS[point.outcome]
        ),
        units.size(point.predicted_bytes) if point.predicted_bytes is not None else "",
        units.size(point.peak_bytes) if point.peak_bytes is not None else "",
        units.rate(point.samples_per_s) if point.timed else "",
        spread,
        units.fold(point.reason),
    )


def _drawing(hunt: BatchHunt) -> Drawing:
    what = "Samples per second and peak memory against the batch, with the limit; ortlab.plot(hunt) draws it."

    def svg() -> str:
        from ortlab.render.hunt_plot import plot
        from ortlab.render.plots import svg as inline

        return inline(plot(hunt), what)

    return Drawing(what, svg)


def _sources(hunt: BatchHunt) -> Note:
    """Say once, under the table, what the numbers are and what they are not."""
    kinds = ", ".join(dict.fromkeys(one.kind for one in hunt.points if one.kind))
    kept, rounds, steps = units.size(hunt.kept_bytes), units.count(hunt.rounds), units.count(hunt.steps)
    pace = f"Samples per second: measured on {hunt.device}, {rounds} rounds of {steps} warm steps."
    peaks = f"Peaks: measured, {kinds or 'none'}, without {kept} of weights and optimizer state that the hunt keeps to "
    lines = [pace, f"{peaks}go back to; predicted on the straight line through the smaller batches."]
    if RESIDENT in kinds:
        more = (
            "They are of live buffers. An ordinary heap, and ONNX Runtime's arena, keep freed memory as well"
        )
        highest = max((one.ordinary_peak_bytes or 0 for one in hunt.points), default=0)
        lines.append(
            f"{more}: the timed runs rose to {units.size(highest)} at most." if highest else f"{more}."
        )
    return Note("\n".join(lines), Mark.QUIET)
