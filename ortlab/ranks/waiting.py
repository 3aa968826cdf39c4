"""Waiting for all ranks, so that none is left behind: where one fails or the user interrupts, the others come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import ExecutionError

if TYPE_CHECKING:
    from ortlab.ranks.cluster_loss import Lost
    from ortlab.ranks.processes import Processes

GRACE_SECONDS: Final = 3.0
"""How long the others may go on by themselves after one rank has failed, and again after they were interrupted."""

STUCK_SECONDS: Final = 120.0
"""How long ranks may take to come back once their connections are broken; a graph that is being built ends first."""

_AGAIN_SECONDS: Final = 15.0
"""After which time ranks that still run are sent another SIGINT: long enough to save a file after the first."""

_POLL_SECONDS: Final = 0.05
_LEFT_ALONE, _INTERRUPTED, _TORN_OUT = range(3)


class RankDiedError(ExecutionError):
    """The process of a rank has ended while others went on."""

    def __init__(self, lost: Lost) -> None:
        self.lost = lost
        super().__init__(
            f"Rank {lost.rank} (process {lost.process}) {lost.how} {lost.when}, and the other ranks were ended.",
            why="Ranks train on the same model: without one of them the others would wait forever.",
            fix=f"Start the cluster again, %ort_cluster -n {lost.ranks} or Cluster({lost.ranks}); where memory was "
            "short, with fewer ranks or smaller batches.",
        )


class RanksStuckError(ExecutionError):
    """Ranks did not come back, though they were interrupted and their connections broken."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(
            f"Ranks {', '.join(map(str, ranks))} did not stop, and the cluster was ended.",
            why="They were interrupted and their connections were broken, and they still ran after "
            f"{STUCK_SECONDS:g} s.",
            fix="Start the cluster again.",
        )


class Waiting:
    """Follows one request to each rank until all have answered.

    Ranks that wait in a collective operation for one that has failed cannot be interrupted: they wait in C++. So after
    a failure or an interrupt they are given some seconds, are sent a SIGINT, and then lose their connections, which
    ends the operation with an error. Those that still run are sent another now and then: a rank that had not yet begun
    its cell has ignored the first. The user's second interrupt ends the waiting. `look` is called at each turn, to show
    what has been printed.
    """

    def __init__(
        self,
        processes: Processes,
        pending: Mapping[int, Any],
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._processes = processes
        self._pending = pending
        self._look = look
        self._stage = _LEFT_ALONE
        self._since: float | None = None
        self._told = 0.0
        self.interrupt: KeyboardInterrupt | None = None
        self.broken = False  # whether connections had to be broken; the ranks need a new process group then
        # Ranks that were told to stop; what they raise then says no more than that.
        self.recalled: frozenset[int] = frozenset()

    def finish(self) -> None:
        """Wait until all ranks have answered.

        Raises RankDiedError where the process of a rank has ended, RanksStuckError where ranks do not come back, and
        KeyboardInterrupt where the user interrupts a second time.
        """
        while True:
            try:
                while not self._is_over():
                    time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt as pressed:  # noqa: PERF203 - a user presses it once or twice
                if self.interrupt is not None:
                    raise
                self.interrupt = pressed
                self._since = time.monotonic() - GRACE_SECONDS
            else:
                return

    def _is_over(self) -> bool:
        lost = self._processes.lost("while it ran")
        self._look()
        if lost is not None:
            raise RankDiedError(lost)
        open_ = [rank for rank, one in self._pending.items() if not one.ready()]
        if not open_:
            return True
        failed = any(one.ready() and not one.successful() for one in self._pending.values())
        if failed or self.interrupt is not None:
            self._recall(open_)
        return False

    def _recall(self, ranks: list[int]) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        waited = now - self._since
        if self._stage == _LEFT_ALONE and waited >= GRACE_SECONDS:
            self.recalled = frozenset(ranks)
            self._interrupt(ranks, now)
            self._stage, self._since = _INTERRUPTED, now
        elif self._stage == _INTERRUPTED and waited >= GRACE_SECONDS:
            self._processes.break_connections()
            self.broken = True
            self._stage, self._since = _TORN_OUT, now
        elif self._stage == _TORN_OUT and waited >= STUCK_SECONDS:
            raise RanksStuckError(ranks)
        elif self._stage == _TORN_OUT and now - self._told >= _AGAIN_SECONDS:
            self._interrupt(ranks, now)

    def _interrupt(self, ranks: list[int], now: float) -> None:
        self._processes.interrupt(ranks)
        self._told = now
