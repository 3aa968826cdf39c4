"""The page of peers: time, memory and loss of each beside ONNX Runtime's, and what could not be run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.cautions import FELL_BACK
from ortlab.engine_names import engine_kind
from ortlab.render import units
from ortlab.render.page import Block, Cell, Column, Drawing, Mark, Note, Page, Table, row
from ortlab.render.run_pages import engine_words

if TYPE_CHECKING:
    from ortlab.peers.peers import Peer, Peers

_COLUMNS = (
    Column("peer", meaning="who executed the model, and how it differs from the lab as it is set"),
    Column("time", numeric=True, meaning="measured: step time over the baseline's, with 95 % interval"),
    Column("verdict", meaning="what the interval allows to say about time"),
    Column("step", numeric=True, meaning="measured: median wall time of a warm step, all rounds together"),
    Column("peak", numeric=True, meaning="measured: highest level of the process or device, see below"),
    Column("rise", numeric=True, meaning="measured: how far a step rises above its start, see below"),
    Column("rise, ratio", numeric=True, meaning="measured: the rise over the baseline's"),
    Column("last loss", numeric=True, meaning="measured: loss of the last step"),
    Column("loss apart", numeric=True, meaning="measured: largest relative difference, step by step"),
)
_VERDICTS = {"faster": Mark.GOOD, "slower": Mark.WARN, FELL_BACK: Mark.BAD}


def peers_page(peers: Peers) -> Page:
    """Say what each peer took, what it did to the model, and which could not be run."""
    every = list(peers)
    measured = [peer for peer in every if peer.outcome is not None]
    blocks: list[Block] = []
    if not peers.sweep.complete:
        done, planned = peers.sweep.runs_done, peers.sweep.runs_planned
        blocks.append(Note(f"Interrupted: {done} of {planned} runs are done.", Mark.WARN))
    if measured:
        blocks.append(Table("", _COLUMNS, tuple(_row(peers, peer) for peer in measured)))
    else:
        blocks.append(Note("No peer could be measured.", Mark.BAD))
    if not_run := [peer for peer in every if peer.reason]:
        columns = (Column("peer"), Column("what happened"), Column("reason"))
        rows = tuple(
            row(
                peer_words(peer),
                Cell("failed", Mark.BAD) if peer.point.failure else Cell("not run", Mark.QUIET),
                peer.reason,
            )
            for peer in not_run
        )
        blocks.append(Table("Not measured", columns, rows))
    blocks += [Note(f"{peer_words(peer)}: {peer.detail}.", Mark.QUIET) for peer in measured if peer.detail]
    blocks += [
        Note(f"{peer_words(peer)}: no memory: {peer.no_memory}", Mark.WARN)
        for peer in every
        if peer.no_memory
    ]
    blocks += [
        Note(
            f"{peer_words(peer)}: {'; '.join(peer.outcome.remarks)}.",
            Mark.BAD if peer.outcome.fell_back else Mark.WARN,
        )
        for peer in measured
        if peer.outcome is not None and peer.outcome.remarks
    ]
    if measured:
        blocks += [_drawing(peers), _sources(measured)]
    rounds = f"{units.count(peers.sweep.rounds)} rounds of " if peers.sweep.rounds > 1 else ""
    steps = f"{units.count(peers.sweep.count)} {'steps' if peers.sweep.count > 1 else 'step'}"
    return Page(f"Peers of {peers.sweep.model}: {rounds}{steps} each", tuple(blocks))


def peer_words(peer: Peer) -> str:
    """Name a peer in words: "ONNX Runtime, memory_level=1", "torch.compile with activation memory budget 0.5"."""
    _, comma, changed = peer.name.partition(", ")
    return f"{engine_words(peer.engine)}{comma}{changed}"


def _row(peers: Peers, peer: Peer) -> tuple[Cell, ...]:
    outcome, point = peer.outcome, peer.point
    assert outcome is not None  # noqa: S101 - only measured peers have a row
    is_base = point is peers.sweep.baseline
    name = Cell(peer_words(peer), Mark.BAD if point.fell_back else Mark.PLAIN)
    time = units.ratio_interval(outcome.time_ratio, outcome.time_low, outcome.time_high)
    return row(
        name,
        units.ratio(1.0) if is_base else time,
        Cell("baseline", Mark.QUIET)
        if is_base and not point.fell_back
        else Cell(outcome.verdict, _VERDICTS.get(outcome.verdict, Mark.QUIET)),
        units.duration(point.step_ms),
        units.size(peer.peak_bytes),
        units.size(peer.rise_bytes),
        units.ratio(peer.rise_ratio),
        units.loss(point.runs[-1].losses[-1]),
        "-" if is_base else units.difference(outcome.loss_difference),
    )


def _drawing(peers: Peers) -> Drawing:
    what = "Step time against the memory of a step, one mark per peer; ortlab.plot(peers) draws it."

    def svg() -> str:
        from ortlab.render.peers_plot import peers_plot
        from ortlab.render.plots import svg as inline

        return inline(peers_plot(peers), what)

    return Drawing(what, svg)


def _sources(measured: list[Peer]) -> Note:
    devices = ", ".join(dict.fromkeys(run.device for peer in measured for run in peer.point.runs))
    labels = "; ".join(dict.fromkeys(peer.memory.label for peer in measured if peer.memory))
    lines = [
        "Ratios are against ONNX Runtime as the lab is set; below 1 is less.",
        "Brackets: 95 % bootstrap confidence interval over the warm steps of all rounds.",
        f"Times: measured on {devices}; what was built or compiled is no part of them.",
    ]
    if labels:
        lines.append(
            f"Memory: measured one after another ({labels}). Peaks hold the libraries that are loaded by then; "
            "the rise is what peers are to be compared by."
        )
    elif any(peer.point.peaks for peer in measured):
        lines.append("Memory: peaks of the runs in one process, in which earlier peers' memory may count.")
    if any(engine_kind(peer.engine) != "ort" for peer in measured):
        lines.append(
            "PyTorch and ONNX Runtime draw dropout masks from different generators: with dropout, losses are apart."
        )
    return Note("\n".join(lines), Mark.QUIET)
