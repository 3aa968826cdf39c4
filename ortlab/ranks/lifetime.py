"""The life of a cluster's processes: started, watched between two calls, ended; and how a rank was lost."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ortlab.ranks.processes import Processes
from ortlab.ranks.waiting import RankDiedError

if TYPE_CHECKING:
    from ortlab.ranks.cluster_loss import Lost

_WATCH_SECONDS: Final = 0.5


class Lifetime:
    """The processes of one cluster, which end with this object and with the interpreter at the latest.

    `tell` is called with a sentence when a rank dies between two calls.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.processes: Processes | None = None
        self.lost: Lost | None = None  # the rank that has died since the last start
        # Held during a call. The watch looks only between calls: a call itself notices that a rank has died.
        self.calling = threading.Lock()
        self._tell = tell
        self._end: weakref.finalize[[Processes], Lifetime] | None = None
        self._changing = threading.Lock()

    def start(self, ranks: int, threads: int, backend: str) -> None:
        """Start the processes and the watch; does nothing if they run. Raises what `Processes` raises."""
        if self.processes is not None:
            return
        self.lost = None
        self.processes = held = Processes(ranks, threads, backend)
        self._end = weakref.finalize(self, Processes.end, held)
        watch = threading.Thread(
            target=_watch, args=(weakref.ref(self), held), daemon=True, name="ortlab-cluster"
        )
        watch.start()

    def stop(self) -> None:
        """End the processes, and wait until they have ended; does nothing if none run."""
        with self._changing:
            end = self._taken()
        if end is not None:
            end()

    def give_up(self, lost: Lost) -> None:
        """End the other ranks after one was lost."""
        self.lost = lost
        self.stop()

    def look(self, held: Processes) -> bool:
        """End the ranks if one of these processes has died while nobody called; return whether to look again."""
        if not self.calling.acquire(blocking=False):
            return self.processes is held
        try:
            with self._changing:
                lost = held.lost("between two calls") if self.processes is held else None
                if lost is None:
                    return self.processes is held
                self.lost, end = lost, self._taken()
            if end is not None:
                end()
        finally:
            self.calling.release()
        self._tell(str(RankDiedError(lost)))
        return False

    def _taken(self) -> Callable[[], object] | None:
        """Forget the processes, and return what ends them."""
        end, self.processes, self._end = self._end, None, None
        return end


def _watch(lifetime: weakref.ref[Lifetime], held: Processes) -> None:
    while True:
        time.sleep(_WATCH_SECONDS)
        living = lifetime()
        if living is None or not living.look(held):
            return
        del living
