"""What a user holds of processes that train together: starts and ends them, and lets them work at the same time."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ortlab import units
from ortlab.errors import OptionError
from ortlab.ranks.call import call
from ortlab.ranks.cluster_records import ClusterStatus, RankOutput, rank_output, rank_status
from ortlab.ranks.processes import Lifetime, RankDiedError
from ortlab.ranks.rank_process import ledger, set_variables, value
from ortlab.shown import Shown

if TYPE_CHECKING:
    from ortlab.ranks.ledgers import Ranks

BACKENDS: Final = ("gloo", "nccl")
"""gloo works between CPUs, NCCL between GPUs, of which each rank needs one."""

RANK_BYTES: Final = 300 << 20
"""About what a rank takes before it has a model, in bytes; with torch 2.13 on Linux its resident set is 307 MiB."""

_OUTPUT_SECONDS: Final = 60.0

_clusters: list[weakref.ref[Cluster]] = []
"""Every cluster that was started and lives, in the order of their starts."""


class Cluster(Shown):
    """Some processes on this machine, each a rank of one `torch.distributed` group.

    Use it in a `with` statement, or call `start` and `stop`. The processes end with it; with the interpreter; and,
    where the interpreter is killed, by themselves. Nothing listens then, and while they run, on the loopback only.

    Where a rank raises, or the user interrupts, all ranks come back and keep their variables. Where one dies, also
    between two calls, the others are ended, and the next call says so.

    Parameters
    ----------
    ranks
        How many. A warning says so where there are more than cores.
    threads
        Threads that each computes with; by default the machine's cores, divided among them.
    backend
        "gloo" or "nccl"; by default NCCL where there is a GPU for each rank, gloo otherwise.
    tell
        Called with a sentence when a rank dies between two calls; by default nobody is told before the next call.

    Raises
    ------
    OptionError
        If `ranks` is no whole number above 0, or the backend is unknown or lacks GPUs.

    Examples
    --------
    >>> with Cluster(2) as cluster:
    ...     cluster.run(train, epochs=3)  # a list: what each rank returned
    """

    def __init__(
        self,
        ranks: int,
        *,
        threads: int | None = None,
        backend: str | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        if not units.is_whole(ranks, 1):
            raise OptionError(
                f"A cluster of {ranks!r} ranks.", fix="Give a whole number above 0: Cluster(2)."
            )
        if threads is not None and not units.is_whole(threads, 1):
            raise OptionError(f"Ranks of {threads!r} threads.", fix="Give a whole number above 0, or none.")
        self.ranks = ranks
        self.threads = threads or max(1, cores() // ranks)
        self.backend = chosen_backend(backend, ranks)
        if ranks > (available := cores()):
            warnings.warn(
                f"{ranks} ranks share {available} core{'s' if available > 1 else ''}: they take turns, so their times "
                "say nothing about as many cores or GPUs.",
                stacklevel=2,
            )
        self._lifetime = Lifetime(tell)

    @property
    def running(self) -> bool:
        """Whether the processes are there."""
        return self._lifetime.processes is not None

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids, by rank; empty if it is not running."""
        held = self._lifetime.processes
        return () if held is None else held.ranks

    def start(self) -> Cluster:
        """Start the processes and let them find each other; does nothing if they run.

        Raises
        ------
        OptionError
            If so many do not fit into the machine's memory.
        InstallError
            If ipyparallel is missing.
        ExecutionError
            If they do not start; it has the end of their log.
        """
        if not self.running:
            check_memory(self.ranks)
            _clusters[:] = [one for one in _clusters if one() not in (None, self)] + [weakref.ref(self)]
            self._lifetime.start(self.ranks, self.threads, self.backend)
        return self

    def stop(self) -> None:
        """End the processes, and wait until they have ended; does nothing if none run."""
        self._lifetime.stop()

    def status(self) -> ClusterStatus:
        """Say how many ranks there are, whether they run, and what each takes."""
        found = tuple(rank_status(rank, pid) for rank, pid in enumerate(self.processes))
        lost = self._lifetime.lost
        died = "" if lost is None else RankDiedError(lost).what
        return ClusterStatus(self.ranks, self.backend, self.threads, cores(), found, died)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank at the same time.

        Parameters
        ----------
        function
            Runs in the other processes: it imports what it needs itself. `torch.distributed` is set up there.
        *args, **kwargs
            What it is called with, on each rank the same.

        Returns
        -------
        list
            What it returned, by rank.

        Raises
        ------
        ExecutionError
            If it raises on a rank, if a rank dies, or the cluster does not run.
        KeyboardInterrupt
            If the user interrupts; the ranks have come back then.
        """

        def ask(view: Any) -> Any:
            return view.apply_async(function, *args, **kwargs)

        return call(self._lifetime, range(self.ranks), ask).results()

    def run_cell(
        self,
        source: str,
        *,
        on: Sequence[int] | None = None,
        seen: Callable[[tuple[RankOutput, ...]], None] = lambda _: None,
    ) -> tuple[RankOutput, ...]:
        """Run a notebook cell, magics included, on every rank at the same time; its variables stay there.

        Parameters
        ----------
        source
            The cell.
        on
            Ranks that run it; all if not given. Collective operations need all.
        seen
            Called with the outputs so far, again and again, and with all of them at the end, also before an error.

        Returns
        -------
        tuple of RankOutput
            What each printed, showed and returned.

        Raises
        ------
        OptionError
            If there is no such rank.
        ExecutionError
            If it raises on a rank, if a rank dies, or the cluster does not run.
        KeyboardInterrupt
            If the user interrupts; the ranks have come back then.
        """
        ranks = tuple(range(self.ranks)) if on is None else tuple(on)
        if unknown := [rank for rank in ranks if rank not in range(self.ranks)]:
            raise OptionError(f"There is no rank {unknown[0]!r}.", fix=f"Ranks are 0 to {self.ranks - 1}.")
        asked: list[Any] = []

        def ask(view: Any) -> Any:
            asked.append(view.execute(source, silent=False, block=False))
            return asked[-1]

        def outputs() -> tuple[RankOutput, ...]:
            return tuple(rank_output(rank, one.metadata) for rank, one in zip(ranks, asked, strict=False))

        try:
            over = call(self._lifetime, ranks, ask, lambda: seen(outputs()))
            for one in asked:  # what was printed comes on a channel of its own
                one.wait_for_output(_OUTPUT_SECONDS)
        finally:
            seen(outputs())
        # From the replies: a rank shows the error of a magic as words only.
        over.results()
        return outputs()

    def values(self, expression: str) -> list[Any]:
        """Evaluate a Python expression among the variables of each rank, and bring the values here.

        Parameters
        ----------
        expression
            A variable, or more: "lab.runs[-1].step_ms". Its value has to be one that can be pickled.

        Returns
        -------
        list
            The values, by rank.

        Raises
        ------
        ExecutionError
            If it cannot be evaluated, or the cluster does not run.
        """
        return self.run(value, expression)

    def push(self, **variables: Any) -> None:
        """Set variables on every rank; their values are copied.

        Raises
        ------
        ExecutionError
            If the cluster does not run, or a value cannot be pickled.
        """
        self.run(set_variables, variables)

    def gather(self, lab: str | None = None) -> Ranks:
        """Bring the ledgers of all ranks here.

        Parameters
        ----------
        lab
            Name of the variable that holds the lab on each rank; the one wrapped last if not given.

        Returns
        -------
        Ranks
            What each rank has measured, run by run.

        Raises
        ------
        ExecutionError
            If a rank has no lab, or the cluster does not run.
        """
        from ortlab.ranks.ledgers import RankLedger, Ranks

        return Ranks(tuple(RankLedger.from_dict(one) for one in self.run(ledger, lab)))

    def __enter__(self) -> Cluster:  # noqa: PYI034 - Self needs Python 3.11
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def latest() -> Cluster | None:
    """Return the cluster that was started last and still runs; if none runs, the last one; None if there is none."""
    living = [one for one in (reference() for reference in _clusters) if one is not None]
    return next((one for one in reversed(living) if one.running), living[-1] if living else None)


def cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def chosen_backend(wished: str | None, ranks: int) -> str:
    """Choose how ranks exchange gradients: as wished, or NCCL where there is a GPU for each rank, gloo otherwise."""
    if wished is not None and wished not in BACKENDS:
        raise OptionError(
            f"There is no backend {wished!r}.", fix=f"Give one of {', '.join(BACKENDS)}, or none."
        )
    if wished == "gloo":
        return wished
    import torch

    devices = torch.cuda.device_count()
    if wished == "nccl" and devices < ranks:
        raise OptionError(
            f"{ranks} ranks cannot train over NCCL here.",
            why=f"Each needs a GPU of its own, and there are {devices}.",
            fix="Use fewer ranks, or gloo, which trains on CPUs.",
        )
    return "nccl" if devices >= ranks else "gloo"


def check_memory(ranks: int) -> None:
    """Raise OptionError where so many processes would take more memory than is free."""
    # A machine that runs out of memory may end any process.
    import psutil

    free = psutil.virtual_memory().available
    if ranks * RANK_BYTES > free:
        raise OptionError(
            f"{ranks} ranks do not fit into this machine's memory.",
            why=f"Each takes about {RANK_BYTES >> 20} MiB before it has a model, and {free >> 20} MiB are free.",
            fix=f"Use at most {free // RANK_BYTES} ranks; more train on several machines, under torchrun or Slurm.",
        )
