"""Pages of many processes: what each rank has measured in a run, and how a cluster stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ortlab import units
from ortlab.records.runs import EXECUTED_BY_FALLBACK
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row
from ortlab.render.run_pages import engine_words

if TYPE_CHECKING:
    from ortlab.ranks.cluster_records import ClusterStatus
    from ortlab.ranks.ledgers import RankRun, Ranks

RANK_COLUMNS = (
    Column("rank", meaning="number of the process, from 0 on"),
    Column("executed by"),
    Column("steps", numeric=True),
    Column("step", numeric=True, meaning="measured: median wall time of a warm step, start-up left out"),
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
    many = f"{units.count(status.ranks)} rank{'s' if status.ranks > 1 else ''}"
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
    threads = f"{units.count(status.threads)} thread{'s' if status.threads > 1 else ''} each"
    blocks += [
        Table("", columns, rows),
        Note(f"Running: {many} over {status.backend}, {threads}.", Mark.GOOD),
    ]
    if status.ranks > status.cores:
        cores = f"{units.count(status.cores)} core{'s' if status.cores > 1 else ''}"
        blocks.append(Note(f"They share {cores}, so they take turns.", Mark.WARN))
    return Page("Cluster", tuple(blocks))


def _title(ranks: Ranks) -> str:
    many = f"{units.count(ranks.ranks)} rank{'s' if ranks.ranks > 1 else ''}"
    return f"Run {units.count(ranks.shown)} on {many}" if ranks.shown else f"No run on {many}"
