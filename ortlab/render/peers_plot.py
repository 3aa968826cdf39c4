"""Peers as a figure: step time against the memory that a step needs, one named mark for each."""

from __future__ import annotations

import math
import statistics
import textwrap
from typing import TYPE_CHECKING

from ortlab.engine_names import engine_kind
from ortlab.render import units
from ortlab.render.page import printable
from ortlab.render.peers_page import peer_words
from ortlab.render.plots import COLOURS, FALLBACK, INK, MIB, dress, new_figure, say
from ortlab.render.run_pages import ENGINE_NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.peers.peers import Peer, Peers

_ENGINE_COLOURS = dict(zip(ENGINE_NAMES, COLOURS, strict=False))
_MARKERS = {"ort": "o", "eager": "s", "checkpoint": "^", "compile": "D"}
_NAME_WIDTH = 44  # characters


def peers_plot(peers: Peers) -> Figure:
    """Draw the median step time, with quartiles, against how far a step's memory rises above its start.

    Where memory was not measured by itself, the peaks of the runs are drawn; where there are none either, the peers
    stand in a row.

    Parameters
    ----------
    peers
        Peers; those that were not measured are left out.

    Returns
    -------
    matplotlib.figure.Figure
        `ortlab.plot(peers).savefig("peers.svg")` saves it.
    """
    shown = [peer for peer in peers if peer.outcome is not None]
    figure = new_figure(max(3.4, 1.4 + 0.34 * len(shown)))
    axes = figure.add_subplot()
    if not shown:
        dress(axes, "Step time against memory", "", "step [ms]")
        say(axes, "No peer was measured.")
        return figure
    devices = ", ".join(dict.fromkeys(run.device for peer in shown for run in peer.point.runs))
    memory, words = _memory(shown)
    for number, (peer, place) in enumerate(zip(shown, memory, strict=True), start=1):
        low, high = _quartiles(peer)
        colour = FALLBACK if peer.point.fell_back else _ENGINE_COLOURS.get(engine_kind(peer.engine), INK)
        name = textwrap.fill(
            units.fold(printable(f"{number}  {peer_words(peer)}"), 2 * _NAME_WIDTH),
            _NAME_WIDTH,
            subsequent_indent="    ",
        )
        axes.errorbar(
            [place],
            [peer.point.step_ms],
            yerr=[[peer.point.step_ms - low], [high - peer.point.step_ms]],
            color=colour,
            marker=_MARKERS.get(engine_kind(peer.engine), "o"),
            markersize=7,
            capsize=3,
            linewidth=1,
            linestyle="none",
            label=name.replace("$", r"\$"),
        )
        axes.annotate(
            str(number),
            (place, peer.point.step_ms),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )
    dress(
        axes, f"Step time and memory, measured on {devices} (median; whiskers: quartiles)", words, "step [ms]"
    )
    axes.margins(0.14)
    axes.set_ylim(bottom=0)
    axes.legend(
        frameon=False,
        labelcolor=INK,
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
        handlelength=1.2,
    )
    return figure


def _memory(shown: list[Peer]) -> tuple[list[float], str]:
    """Return where each peer stands, and what that is: rises, peaks of the runs, or places in a row."""
    kinds = ", ".join(dict.fromkeys(peer.memory.label for peer in shown if peer.memory))
    rises = [peer.rise_bytes / MIB for peer in shown]
    if not any(map(math.isnan, rises)):
        return rises, f"rise of a step's memory above its start [MiB] ({kinds})"
    peaks = [peer.point.peak_bytes / MIB for peer in shown]
    if not any(map(math.isnan, peaks)):
        return peaks, "peak memory of the runs [MiB]"
    return [float(number) for number in range(1, len(shown) + 1)], "peers"


def _quartiles(peer: Peer) -> tuple[float, float]:
    times = [step.total_ms for step in peer.point.warm_steps]
    if len(times) == 1:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high
