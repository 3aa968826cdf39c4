"""What a cluster tells: what a cell printed, showed and raised on each rank, and how its processes stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ortlab.shown import Shown

if TYPE_CHECKING:
    from collections.abc import Mapping

_TORN_OUT: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo says, reading or writing, where the connection to another rank has ended."""


@dataclass(frozen=True)
class RankError:
    """What a cell raised on a rank."""

    name: str  #: Class and text of the exception
    value: str  #: See `name`
    traceback: str  #: As IPython shows it, with the colours of a terminal

    @property
    def is_consequence(self) -> bool:
        """Whether it says no more than that another rank is gone, or that this one was told to stop."""
        return self.name == "KeyboardInterrupt" or any(words in self.value for words in _TORN_OUT)

    def __str__(self) -> str:
        """Write it as the last line of a traceback."""
        return f"{self.name}: {self.value}" if self.value else self.name


@dataclass(frozen=True)
class RankOutput:
    """What one rank gave back, so far or at the end."""

    rank: int  #: Its number, from 0 on
    stdout: str = ""  #: What it printed
    stderr: str = ""  #: See `stdout`
    #: What it displayed, in order, the value of the cell's last line among it: data by MIME type.
    displays: tuple[Mapping[str, Any], ...] = ()
    #: What the cell raised, with its traceback; None if it raised nothing, has not ended, or the error of a magic was
    #: printed in place of a traceback.
    error: RankError | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether its error says no more than that another rank is gone, or that this one was told to stop."""
        return self.error is not None and self.error.is_consequence


def rank_output(rank: int, metadata: Mapping[str, Any]) -> RankOutput:
    """Read what ipyparallel keeps of a request: `metadata` is `Client.metadata`, which grows while the request runs."""
    shown = [content["data"] for content in metadata["outputs"]]
    value = metadata["execute_result"]
    if value:
        shown.append(value["data"])
    raised = metadata["error"]
    error = None
    if raised is not None:
        lines = getattr(raised, "traceback", "") or ""
        error = RankError(raised.ename, raised.evalue, lines if isinstance(lines, str) else "\n".join(lines))
    return RankOutput(rank, metadata["stdout"] or "", metadata["stderr"] or "", tuple(shown), error)


@dataclass(frozen=True)
class RankStatus:
    """One process of a cluster."""

    rank: int
    """Its number, from 0 on."""
    process: int
    """Id of its process."""
    resident_bytes: int | None
    """Its resident set, as the operating system says; None where it cannot tell."""


def rank_status(rank: int, process: int) -> RankStatus:
    """Ask the operating system about the process of a rank."""
    import psutil

    try:
        return RankStatus(rank, process, int(psutil.Process(process).memory_info().rss))
    except psutil.Error:
        return RankStatus(rank, process, None)


@dataclass(frozen=True, repr=False)
class ClusterStatus(Shown):
    """A cluster at one moment."""

    ranks: int
    """How many it has when it runs."""
    backend: str
    """How ranks exchange gradients: "gloo" or "nccl"."""
    threads: int
    """Threads that each rank computes with."""
    cores: int
    """Cores that this machine gives them."""
    running: tuple[RankStatus, ...]
    """Its processes, by rank; empty if it does not run."""
    died: str
    """Which rank has died, in a sentence; empty if none has."""
