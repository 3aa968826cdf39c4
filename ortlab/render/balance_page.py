"""The page of a load balance: how even the ranks are with and without, what is covered, and what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab import units
from ortlab.render.page import Block, Column, Drawing, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.ranks.balancing import Balance, Epoch
    from ortlab.render.page import Cell

_DRAWN = (
    "Tokens of each rank, step by step, without load balancing and with it; ortlab.plot(record) draws it."
)


def balance_page(record: Balance) -> Page:
    """Set both samplers side by side, then say what an epoch covers."""
    columns = (
        Column("samples dealt out"),
        Column("steps", numeric=True, meaning="that all ranks make together in an epoch"),
        Column(
            "max / mean",
            numeric=True,
            meaning="counted: tokens of the fullest rank over the mean, averaged over steps",
        ),
        Column("worst step", numeric=True, meaning="counted: the same of the least even step"),
        Column(
            "waiting", numeric=True, meaning="predicted: share of the ranks' time, if time goes with tokens"
        ),
        Column("waited", numeric=True, meaning="measured: a rank waits so long for others in an epoch"),
        Column("epoch", numeric=True, meaning="measured: computing, and waiting for the slowest"),
        Column("left out", numeric=True, meaning="counted: samples that an epoch does not train on, at most"),
        Column(
            "repeated", numeric=True, meaning="counted: samples that an epoch trains on once more, at most"
        ),
    )
    lost, whole = record.lost_ms or (None, None), record.epoch_ms or (None, None)
    rows = (
        _row(record, "as they come (DistributedSampler)", record.without, lost[0], whole[0]),
        _row(record, "balanced by length", record.having, lost[1], whole[1]),
    )
    size = f"batches of {units.count(record.batch_size)}" if record.batch_size else "batches of your own"
    blocks: list[Block] = [
        Table("", columns, rows),
        Drawing(_DRAWN, lambda: _drawn(record)),
        _sentence(record),
    ]
    uneven = [one for one in (*record.without, *record.having) if not one.is_even]
    if uneven:
        blocks.append(
            Note(
                "Without load balancing, ranks have different numbers of batches here: the longer ones would wait "
                "forever. Only the steps that all have are counted.",
                Mark.WARN,
            )
        )
    if record.never_seen:
        blocks.append(
            Note(
                f"{units.count(len(record.never_seen))} samples are in no epoch: "
                f"{', '.join(map(str, record.never_seen[:10]))}.",
                Mark.WARN,
            )
        )
    epochs = f"{units.count(len(record.having))} epoch{'s' if len(record.having) > 1 else ''}"
    tokens = (
        "a batch counts as its longest sample times its samples"
        if record.padded
        else "tokens without padding"
    )
    blocks.append(
        Note(
            f"{units.count(len(record.sizes))} samples, {size}, {epochs}; {tokens}.",
            Mark.QUIET,
        )
    )
    return Page(f"Load balance over {units.count(record.ranks)} ranks", tuple(blocks))


def _row(
    record: Balance, name: str, epochs: tuple[Epoch, ...], lost: float | None, whole: float | None
) -> tuple[Cell, ...]:
    return row(
        name,
        units.count(epochs[0].steps),
        units.ratio(record.imbalance(epochs)),
        units.ratio(record.worst(epochs)),
        units.percent(record.waiting(epochs)),
        units.duration(lost) if lost is not None else "-",
        units.duration(whole) if whole is not None else "-",
        units.count(max(len(record.missing(one)) for one in epochs)),
        units.count(max(record.repeated(one) for one in epochs)),
    )


def _sentence(record: Balance) -> Note:
    lost, whole = record.lost_ms, record.epoch_ms
    if lost is None or whole is None:
        before, after = record.waiting(record.without), record.waiting(record.having)
        return Note(
            f"Ranks would wait for the slowest for {units.percent(after)} of the time instead of "
            f"{units.percent(before)}: predicted from tokens. With a cluster and a step it is measured."
        )
    saved = lost[0] - lost[1]
    words = f"saved {units.duration(saved)}" if saved > 0 else f"cost {units.duration(-saved)}"
    return Note(
        f"Balancing {words} of waiting in an epoch, measured: {units.duration(lost[1])} instead of "
        f"{units.duration(lost[0])} for each rank. The epoch took {units.duration(whole[1])} instead of "
        f"{units.duration(whole[0])}.",
        Mark.GOOD if saved > 0 else Mark.WARN,
    )


def _drawn(record: Balance) -> str:
    from ortlab.render.balance_plot import balance_plot
    from ortlab.render.plots import svg

    return svg(balance_plot(record), _DRAWN)
