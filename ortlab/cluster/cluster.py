"""Processes that train together, started from a notebook: ipyparallel engines in one `torch.distributed` group."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ortlab.cluster.member import ledger, position, set_variables, value
from ortlab.cluster.outputs import RankError, RankOutput, rank_output
from ortlab.cluster.processes import Lost, Processes
from ortlab.cluster.resources import chosen_backend, cores
from ortlab.cluster.status import ClusterStatus, RankStatus
from ortlab.cluster.waiting import RankDiedError, RanksStuckError, Waiting
from ortlab.errors import ExecutionError, OptionError

if TYPE_CHECKING:
    from ortlab.ranks.ranks import Ranks

_clusters: list[weakref.ref[Cluster]] = []
"""Every cluster that was started and lives, in the order of their starts."""

_WATCH_SECONDS: Final = 0.5
_OUTPUT_SECONDS: Final = 60.0


class Cluster:
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
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise OptionError(
                f"A cluster of {ranks!r} ranks.", fix="Give a whole number above 0: Cluster(2)."
            )
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
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
        self._tell = tell
        self._held: Processes | None = None
        self._end: weakref.finalize[[Processes], Cluster] | None = None
        self._died: tuple[Lost, str] | None = None
        self._renewed = False
        # A call holds it; the watch looks only between calls.
        self._calling = threading.Lock()
        self._changing = threading.Lock()

    @property
    def running(self) -> bool:
        """Whether the processes are there."""
        return self._held is not None

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids, by rank; empty if it is not running."""
        return self._held.ranks if self._held else ()

    def start(self) -> Cluster:
        """Start the processes and let them find each other; does nothing if they run.

        Raises
        ------
        InstallError
            If ipyparallel is missing.
        ExecutionError
            If they do not start; it has the end of their log.
        """
        if self._held is None:
            self._died = None
            _clusters[:] = [one for one in _clusters if one() not in (None, self)] + [weakref.ref(self)]
            self._held = held = Processes(self.ranks, self.threads, self.backend)
            self._end = weakref.finalize(self, Processes.end, held)
            reference = weakref.ref(self)
            threading.Thread(
                target=_watch, args=(reference, held), daemon=True, name="ortlab-cluster"
            ).start()
        return self

    def stop(self) -> None:
        """End the processes, and wait until they have ended; does nothing if none run."""
        with self._changing:
            end, self._held, self._end = self._end, None, None
        if end is not None:
            end()

    def status(self) -> ClusterStatus:
        """Say how many ranks there are, whether they run, and what each takes."""
        import psutil

        found = []
        for rank, pid in enumerate(self.processes):
            size = None
            with contextlib.suppress(psutil.Error):
                size = int(psutil.Process(pid).memory_info().rss)
            found.append(RankStatus(rank, pid, size))
        died = "" if self._died is None else RankDiedError(*self._died).what
        return ClusterStatus(self.ranks, self.backend, self.threads, cores(), tuple(found), died)

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
        pending = self._finished(lambda view: view.apply_async(function, *args, **kwargs), range(self.ranks))
        self._raise_failures(enumerate(pending))
        return [one.get() for one in pending]

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
            self._finished(ask, ranks, lambda: seen(outputs()))
            for one in asked:  # what was printed comes on a channel of its own
                one.wait_for_output(_OUTPUT_SECONDS)
        finally:
            seen(outputs())
        # From the replies: a rank shows the error of a magic as words only.
        self._raise_failures(zip(ranks, asked, strict=True))
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
        from ortlab.ranks.rank_ledger import RankLedger
        from ortlab.ranks.ranks import Ranks

        return Ranks(tuple(RankLedger.from_dict(one) for one in self.run(ledger, lab)))

    def __enter__(self) -> Cluster:  # noqa: PYI034 - Self needs Python 3.11
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    def __repr__(self) -> str:
        """Show how many ranks there are and whether they run."""
        return f"Cluster({self.ranks}, {'running' if self.running else 'not running'})"

    def _finished(
        self, ask: Callable[[Any], Any], ranks: Sequence[int], look: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Ask ranks for something, wait for all of them, and put them into one group again where that broke."""
        with self._calling:
            held = self._held
            if held is None:
                if self._died is not None:
                    raise RankDiedError(*self._died)
                raise ExecutionError(
                    "The cluster does not run.", fix="%ort_cluster -n 2, or Cluster(2).start()."
                )
            try:
                pending = [ask(held.client[rank]) for rank in ranks]
                waiting = Waiting(held, pending, ranks, look)
                waiting.finish()
                if waiting.interrupt is not None or not all(one.successful() for one in pending):
                    self._put_together(held, broken=waiting.broken)
            except RankDiedError as error:
                self._died = error.lost, error.when
                self.stop()
                raise
            except (RanksStuckError, KeyboardInterrupt):
                self.stop()
                raise
        if waiting.interrupt is not None:
            raise waiting.interrupt
        return pending

    def _put_together(self, held: Processes, *, broken: bool) -> None:
        """Give the ranks a new process group, unless they stand at the same place in the one they have."""
        if not broken:
            asked = [held.client[rank].apply_async(position) for rank in range(self.ranks)]
            waiting = Waiting(held, asked, range(self.ranks))
            waiting.finish()
            broken = len({one.get() for one in asked}) > 1
        if broken:
            held.renew_group()
        self._renewed = broken

    def look_between_calls(self, held: Processes) -> bool:
        """End the ranks if one of them has died while nobody called; return whether to look again."""
        if not self._calling.acquire(blocking=False):
            return self._held is held
        try:
            with self._changing:
                lost = held.lost() if self._held is held else None
                if lost is None:
                    return self._held is held
                self._died = lost, "between two calls"
                end, self._held, self._end = self._end, None, None
            if end is not None:
                end()
        finally:
            self._calling.release()
        self._tell(str(RankDiedError(*self._died)))
        return False

    def _raise_failures(self, replies: Iterable[tuple[int, Any]]) -> None:
        """Raise what the user can mend: of several errors, not one that only follows from another."""
        causes = {rank: cause for rank, one in replies if (cause := one.exception()) is not None}
        if not causes:
            return
        errors = {rank: _rank_error(cause) for rank, cause in causes.items()}
        rank = min(errors, key=lambda one: errors[one].is_consequence)
        others = "" if len(errors) == 1 else f", as did {len(errors) - 1} more"
        fix = "Mend it and run it again."
        if self._renewed:
            fix += (
                " The ranks have a new process group, since some were torn out of the old one: put "
                "DistributedDataParallel around the model again."
            )
        raise ExecutionError(
            f"Rank {rank} failed{others}; all ranks have come back and keep their variables.",
            # It may be an error of ortlab, with lines of its own.
            why=str(errors[rank]).replace("\n", "\n  "),
            fix=fix,
        ) from causes[rank]


def _rank_error(cause: BaseException) -> RankError:
    """Read what ipyparallel raises for an exception of another process."""
    name, value = getattr(cause, "ename", type(cause).__name__), getattr(cause, "evalue", str(cause))
    return RankError(name, value, getattr(cause, "traceback", "") or "")


def latest() -> Cluster | None:
    """Return the cluster that was started last and still runs; if none runs, the last one; None if there is none."""
    living = [one for one in (reference() for reference in _clusters) if one is not None]
    return next((one for one in reversed(living) if one.running), living[-1] if living else None)


def _watch(cluster: weakref.ref[Cluster], held: Processes) -> None:
    """Look between two calls whether a rank has died, end the others then, and tell."""
    while True:
        time.sleep(_WATCH_SECONDS)
        living = cluster()
        if living is None or not living.look_between_calls(held):
            return
        del living
