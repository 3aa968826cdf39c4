"""The pages and figures of processes that train together: ranks of a run, the cluster, and how even a load is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.records.runs import EXECUTED_BY_FALLBACK
from ortlab.render.execution_words import engine_words
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row
from ortlab.render.plots import COLOURS, INK, MIB, drawing, dress, key, new_figure, say
from ortlab.render.run_pages import TIMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.ranks.balancing import Balance, Epoch
    from ortlab.ranks.cluster_records import ClusterStatus
    from ortlab.ranks.ledgers import RankRun, Ranks

RANK_COLUMNS = (
    Column("rank", meaning="number of the process, from 0 on"),
    Column("executed by"),
    Column("steps", numeric=True),
    TIMES[0],
    Column(
        "computing",
        numeric=True,
        meaning="measured: forward, backward up to the rank's last gradient, optimizer; median of warm steps",
    ),
    Column(
        "exchange",
        numeric=True,
        meaning="measured: from the rank's last gradient to the end of backward, waiting for slower ranks included",
    ),
    Column("peak memory", numeric=True, meaning="measured: highest memory of the run"),
    Column("tokens", numeric=True, meaning="counted: in all steps, padding left out"),
    Column("last loss", numeric=True, meaning="measured: loss of the rank's own part of the last batch"),
)
"""Columns of a table of ranks on one machine."""

MACHINE = Column("machine", meaning="name of the rank's machine, and its device there")
"""The column that comes second where ranks are on several machines."""


def rank_columns(ranks: Ranks) -> tuple[Column, ...]:
    """Return the columns of a table of ranks; `rank_cells` gives the cells."""
    first, *rest = RANK_COLUMNS
    return (first, MACHINE, *rest) if ranks.is_spread_out else RANK_COLUMNS


def ranks_page(ranks: Ranks) -> Page:
    """Set the ranks of a run under one another, after what is wrong with them."""
    return Page(_title(ranks), rank_blocks(ranks, ""))


def rank_blocks(ranks: Ranks, caption: str | None = None) -> tuple[Block, ...]:
    """Return the blocks of `ranks_page` for another page; `caption` is that of the table, the title if None."""
    rows = ranks.rows()
    blocks: list[Block] = [Note(sentence, Mark.WARN) for sentence in ranks.cautions()]
    if not rows:
        return (*blocks, Note("The ranks have no run in common yet.", Mark.QUIET))
    head = _title(ranks) if caption is None else caption
    blocks.append(Table(head, rank_columns(ranks), tuple(rank_cells(ranks, one) for one in rows)))
    spread = ranks.spread()
    if spread is not None:
        blocks.append(
            Note(
                f"In a step, the slowest rank computes {units.ratio(spread)} as long as the mean, measured; the others "
                "wait for it in the exchange of gradients."
            )
        )
    places = ", ".join(dict.fromkeys(one.run.device for one in rows))
    where = (
        f"{', '.join(_short(ranks, host) for host in ranks.hosts)}: {places}"
        if ranks.is_spread_out
        else places
    )
    memory = dict.fromkeys(
        f"{one.run.memory.kind} of {one.run.memory.scope.replace('this', 'each')}"
        for one in rows
        if one.run.memory
    )
    sources = f"Times: measured on {where}. " + (f"Memory: measured, {'; '.join(memory)}. " if memory else "")
    blocks.append(Note(sources + _about_tokens(rows), Mark.QUIET))
    return tuple(blocks)


def rank_cells(ranks: Ranks, one: RankRun) -> tuple[Cell, ...]:
    """Say in the columns of `rank_columns` what one of the ranks has measured."""
    run, time = one.run, one.computing_ms
    fell = run.executed_by == EXECUTED_BY_FALLBACK
    return row(
        str(one.rank),
        *([f"{_short(ranks, one.ledger.host)}: {run.device}"] if ranks.is_spread_out else []),
        Cell(
            "PYTORCH (fallback)" if fell else engine_words(run.executed_by), Mark.BAD if fell else Mark.PLAIN
        ),
        units.count(len(run.steps)),
        units.duration(one.step_ms),
        units.duration(time) if time is not None else "-",
        units.duration(one.exchange_ms) if one.exchange_ms is not None else "-",
        units.size(one.peak_bytes),
        units.count(one.tokens) if one.tokens is not None else "-",
        units.loss(run.losses[-1]),
    )


def _short(ranks: Ranks, host: str) -> str:
    """Leave a machine's domain out, unless it is what tells machines apart."""
    short = {one: one.partition(".")[0] for one in ranks.hosts}
    return short[host] if len(set(short.values())) == len(short) and not short[host].isdigit() else host


def _about_tokens(rows: Sequence[RankRun]) -> str:
    """Say why no tokens were counted; nothing if some were."""
    if any(one.tokens is not None for one in rows):
        return ""
    if any(one.run.options.print_input_density for one in rows):
        return "No tokens were counted: no embedding of the model has a padding index."
    return "Tokens are counted with print_input_density=True."


def cluster_page(status: ClusterStatus) -> Page:
    """Say whether a cluster runs, and what each of its processes takes."""
    many = units.many(status.ranks, "rank")
    blocks: list[Block] = []
    if status.died:
        blocks.append(Note(status.died, Mark.BAD))
    if not status.running:
        blocks.append(Note(f"Not running: {many}. %ort_cluster -n {status.ranks} starts them.", Mark.QUIET))
        return Page("Cluster", tuple(blocks))
    columns = (
        Column("rank"),
        Column("process", meaning="its id on this machine"),
        Column("memory", numeric=True, meaning="measured: resident set of the process, now"),
    )
    rows = tuple(
        row(str(one.rank), f"pid {one.process}", units.size(one.resident_bytes)) for one in status.running
    )
    threads = f"{units.many(status.threads, 'thread')} each"
    blocks += [
        Table("", columns, rows),
        Note(f"Running: {many} over {status.backend}, {threads}.", Mark.GOOD),
    ]
    if status.ranks > status.cores:
        cores = units.many(status.cores, "core")
        blocks.append(Note(f"They share {cores}, so they take turns.", Mark.WARN))
    return Page("Cluster", tuple(blocks))


def _title(ranks: Ranks) -> str:
    many = units.many(ranks.ranks, "rank")
    return f"Run {units.count(ranks.shown)} on {many}" if ranks.shown else f"No run on {many}"


# ---- the figure -----------------------------------------------------------------------------------------------------


_PARTS = ("forward", "backward", "exchange", "optimizer", "everything else")


def ranks_plot(ranks: Ranks) -> Figure:
    """Draw a bar for each rank of the run shown: the parts of a step on the left, peak memory on the right."""
    rows = ranks.rows()
    figure = new_figure(1.6 + 0.34 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    if not rows:
        dress(left, "Time of a step", "", "")
        say(left, "The ranks have no run in common.")
        return figure
    names = [f"rank {one.rank}" for one in rows]
    start = [0.0] * len(rows)
    parts = [_parts(one) for one in rows]
    for number, name in enumerate(_PARTS):
        values = [one[number] for one in parts]
        left.barh(names, values, left=start, label=name, color=COLOURS[number])
        start = [before + value for before, value in zip(start, values, strict=True)]
    right.barh(names, [(one.peak_bytes or 0) / MIB for one in rows], color=INK)
    device = ", ".join(dict.fromkeys(one.run.device for one in rows))
    dress(left, f"A step of run {ranks.shown}, measured on {device}", "ms, mean of warm steps", "")
    dress(right, "Peak memory", "MiB", "")
    left.invert_yaxis()
    figure.legend(frameon=False, labelcolor=INK, fontsize=8, ncols=len(_PARTS), loc="outside lower left")
    return figure


def _parts(one: RankRun) -> tuple[float, ...]:
    """Return the mean ms of each of `_PARTS` in warm steps; an exchange that is not told apart is in the backward."""
    warm = one.run.warm_steps
    exchange = statistics.mean(step.exchange_ms or 0.0 for step in warm)
    return (
        statistics.mean(step.forward_ms for step in warm),
        statistics.mean(step.backward_ms for step in warm) - exchange,
        exchange,
        statistics.mean(step.optimizer_ms for step in warm),
        statistics.mean(step.other_ms for step in warm),
    )


# ---- load balance ---------------------------------------------------------------------------------------------------


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
        _dealt(record, "as they come (DistributedSampler)", record.without, lost[0], whole[0]),
        _dealt(record, "balanced by length", record.having, lost[1], whole[1]),
    )
    size = f"batches of {units.count(record.batch_size)}" if record.batch_size else "batches of your own"
    blocks: list[Block] = [
        Table("", columns, rows),
        drawing(_DRAWN, lambda: balance_plot(record)),
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
    epochs = units.many(record.having, "epoch")
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


def _dealt(
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


STEPS_SHOWN: Final = 40
"""Steps of the first epoch that are drawn: more marks cannot be told apart."""

RANKS_NAMED: Final = 12
"""Ranks that the key names: marks and colours repeat, and a long key would leave the axes no room."""


def balance_plot(record: Balance) -> Figure:
    """Draw the first epoch: one mark for each rank and step, a line from the least to the most, and the mean."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(4.6)
    both = figure.subplots(2, sharex=True, sharey=True)
    for axes, epochs, name in zip(
        both, (record.without, record.having), ("As they come", "Balanced by length"), strict=True
    ):
        steps = record.tokens(epochs[0])[:STEPS_SHOWN]
        numbers = range(1, len(steps) + 1)
        axes.vlines(numbers, [min(one) for one in steps], [max(one) for one in steps], color=INK, linewidth=1)
        for rank in range(record.ranks):
            axes.plot(
                numbers,
                [one[rank] for one in steps],
                linestyle="none",
                marker=("o", "s", "^", "D", "v", "P")[rank % 6],
                markersize=4,
                color=COLOURS[rank % len(COLOURS)],
                label=_label(rank, record.ranks),
            )
        ratio = units.ratio(record.imbalance(epochs))
        dress(axes, f"{name}: the fullest rank has {ratio} the mean", "", "tokens")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    both[1].set_xlabel("step of the first epoch", fontsize=8, color=INK)
    key(both[0])
    return figure


def _label(rank: int, ranks: int) -> str:
    """Name a rank in the key; a name that begins with an underscore is left out of it."""
    if rank == RANKS_NAMED < ranks:
        return f"and {ranks - RANKS_NAMED} more"
    return f"rank {rank}" if rank < RANKS_NAMED else "_"
