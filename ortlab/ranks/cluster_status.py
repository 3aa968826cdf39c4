"""How a cluster stands, as a record: its ranks, what each takes, and whether one has died."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.shown import Shown


@dataclass(frozen=True)
class RankStatus:
    """One process of a cluster.

    Attributes
    ----------
    rank
        Its number, from 0 on.
    process
        Id of its process.
    resident_bytes
        Its resident set, in bytes, as the operating system says; None where it cannot tell.
    """

    rank: int
    process: int
    resident_bytes: int | None


def rank_status(rank: int, process: int) -> RankStatus:
    """Ask the operating system about the process of a rank."""
    import psutil

    try:
        return RankStatus(rank, process, int(psutil.Process(process).memory_info().rss))
    except psutil.Error:
        return RankStatus(rank, process, None)


@dataclass(frozen=True, repr=False)
class ClusterStatus(Shown):
    """A cluster at one moment.

    Attributes
    ----------
    ranks
        How many it has when it runs.
    backend
        "gloo" or "nccl".
    threads
        Threads that each rank computes with.
    cores
        Cores that this machine gives them.
    running
        Its processes, by rank; empty if it does not run.
    died
        Which rank has died, in a sentence; empty if none has.
    """

    ranks: int
    backend: str
    threads: int
    cores: int
    running: tuple[RankStatus, ...]
    died: str
