"""One call to ranks: all are asked, all answer or are called back, and where their group broke they get a new one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import ExecutionError
from ortlab.ranks.cluster_records import RankError
from ortlab.ranks.processes import RankDiedError
from ortlab.ranks.rank_process import position
from ortlab.runs.interrupts import say

if TYPE_CHECKING:
    from ortlab.ranks.processes import Lifetime, Processes

GRACE_SECONDS: Final = 3.0
"""How long the others may go on by themselves after one rank has failed, and again after they were interrupted."""

STUCK_SECONDS: Final = 120.0
"""How long ranks may take to come back once their connections are broken; a graph that is being built ends first."""

_AGAIN_SECONDS: Final = 15.0
"""After which time ranks that still run are sent another SIGINT: long enough to save a file after the first."""

_POLL_SECONDS: Final = 0.05
_LEFT_ALONE, _INTERRUPTED, _TORN_OUT = range(3)


@dataclass(frozen=True)
class Call:
    """A call that is over."""

    replies: Mapping[int, Any]  # ipyparallel's results, by rank
    renewed: bool  # whether the ranks have a new process group since
    recalled: frozenset[int] = frozenset()  # ranks that were told to stop, since another had failed

    def results(self) -> list[Any]:
        """Return what each rank returned, by rank."""
        causes = {rank: cause for rank, one in self.replies.items() if (cause := one.exception()) is not None}
        if not causes:
            return [one.get() for one in self.replies.values()]
        errors = {rank: _rank_error(cause) for rank, cause in causes.items()}
        follows = {rank: rank in self.recalled or error.is_consequence for rank, error in errors.items()}
        rank = min(follows, key=lambda one: follows[one])
        more = sum(not one for one in follows.values()) - 1
        others = f", as did {more} more" if more > 0 else ""
        fix = "Correct it and run it again."
        if self.renewed:
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


def call(
    lifetime: Lifetime,
    ranks: Sequence[int],
    ask: Callable[[Any], Any],
    look: Callable[[], None] = lambda: None,
) -> Call:
    """Ask ranks for something, and wait until all have answered."""
    # `ask` is given ipyparallel's view of a rank, and returns its pending result. `look` is called again and again
    # while the ranks work.
    with lifetime.calling:
        held = lifetime.processes
        if held is None:
            if lifetime.lost is not None:
                raise RankDiedError(lifetime.lost)
            raise ExecutionError("The cluster does not run.", fix="%ort_cluster -n 2, or Cluster(2).start().")
        renewed = False
        try:
            pending = {rank: ask(held.client[rank]) for rank in ranks}
            waiting = Waiting(held, pending, look)
            waiting.finish()
            if waiting.interrupt is not None or not all(one.successful() for one in pending.values()):
                renewed = _put_together(held, broken=waiting.broken)
        except RankDiedError as error:
            lifetime.give_up(error.lost)
            raise
        except (RanksStuckError, KeyboardInterrupt):
            lifetime.stop()
            raise
    if waiting.interrupt is not None:
        raise say(waiting.interrupt, "Stopped; the ranks have come back, and keep their variables.")
    return Call(pending, renewed, waiting.recalled)


def _put_together(held: Processes, *, broken: bool) -> bool:
    """Give the ranks a new process group, unless they stand at the same place in the one they have; say whether."""
    if not broken:
        asked = {rank: held.client[rank].apply_async(position) for rank in range(len(held.ranks))}
        Waiting(held, asked).finish()
        broken = len({one.get() for one in asked.values()}) > 1
    if broken:
        held.renew_group()
    return broken


def _rank_error(cause: BaseException) -> RankError:
    """Read what ipyparallel raises for an exception of another process."""
    name, value = getattr(cause, "ename", type(cause).__name__), getattr(cause, "evalue", str(cause))
    return RankError(name, value, getattr(cause, "traceback", "") or "")


class Waiting:
    """Follows one request to each rank until all have answered."""

    # Ranks that wait in a collective operation for one that has failed cannot be interrupted: they wait in C++. So
    # after a failure or an interrupt they are given some seconds, are sent a SIGINT, and then lose their connections,
    # which ends the operation with an error. Those that still run are sent another now and then: a rank that had not
    # yet begun its cell has ignored the first. The user's second interrupt ends the waiting. `look` is called at each
    # turn, to show what has been printed.

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
        """Wait until all ranks have answered."""
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


class RanksStuckError(ExecutionError):
    """Ranks did not come back, though they were interrupted and their connections broken."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(
            f"Ranks {', '.join(map(str, ranks))} did not stop, and the cluster was ended.",
            why="They were interrupted and their connections were broken, and they still ran after "
            f"{STUCK_SECONDS:g} s.",
            fix="Start the cluster again.",
        )
