"""One call to ranks: all are asked, all answer, and where that broke their group they are put into a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlab.errors import ExecutionError
from ortlab.ranks.member import position
from ortlab.ranks.outputs import RankError
from ortlab.ranks.waiting import RankDiedError, RanksStuckError, Waiting
from ortlab.runs.interrupts import say

if TYPE_CHECKING:
    from ortlab.ranks.lifetime import Lifetime
    from ortlab.ranks.processes import Processes


@dataclass(frozen=True)
class Call:
    """A call that is over."""

    replies: Mapping[int, Any]  # ipyparallel's results, by rank
    renewed: bool  # whether the ranks have a new process group since
    recalled: frozenset[int] = frozenset()  # ranks that were told to stop, since another had failed

    def results(self) -> list[Any]:
        """Return what each rank returned, by rank.

        Raises ExecutionError where a rank has raised: of several errors, one that does not only follow from another.
        """
        causes = {rank: cause for rank, one in self.replies.items() if (cause := one.exception()) is not None}
        if not causes:
            return [one.get() for one in self.replies.values()]
        errors = {rank: _rank_error(cause) for rank, cause in causes.items()}
        follows = {rank: rank in self.recalled or error.is_consequence for rank, error in errors.items()}
        rank = min(follows, key=lambda one: follows[one])
        more = sum(not one for one in follows.values()) - 1
        others = f", as did {more} more" if more > 0 else ""
        fix = "Mend it and run it again."
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
    """Ask ranks for something, and wait until all have answered.

    `ask` is given ipyparallel's view of a rank, and returns its pending result. `look` is called again and again while
    the ranks work. Raises RankDiedError where a rank dies or has died before; RanksStuckError where ranks do not come
    back after another has failed, and the cluster has ended then; ExecutionError where the cluster does not run; and
    KeyboardInterrupt, once the ranks have come back or, on a second Ctrl-C, have ended.
    """
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
