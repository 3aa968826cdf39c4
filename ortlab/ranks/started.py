"""The processes that a cluster has started, by itself or through ipyparallel: noted, and ended in any state."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any, Final

_KILL_SECONDS: Final = 15.0


class Started:
    """Those processes below this one whose environment has a mark, whoever has started them.

    Parameters
    ----------
    mark
        Environment variables that they, and what they start, have and no other process has.
    """

    def __init__(self, mark: Mapping[str, str]) -> None:
        self._mark = mark.items()
        self._noted: list[Any] = []

    def note(self) -> None:
        """Take up what has come; a process whose parent has ended could not be found later."""
        import psutil

        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if one not in self._noted and self._mark <= one.environ().items():
                    self._noted.append(one)

    def end(self, seconds: float, only: Collection[int] | None = None) -> None:
        """Ask processes to end, and kill those that have not after a time.

        Parameters
        ----------
        seconds
            That time.
        only
            Ids of the processes that are meant; all that were noted if not given.
        """
        import psutil

        meant = [one for one in self._noted if only is None or one.pid in only]
        for one in meant:
            with contextlib.suppress(psutil.Error):
                one.terminate()  # psutil signals no other process that has got the same id
        _, alive = psutil.wait_procs(meant, timeout=seconds)
        for one in alive:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(alive, timeout=_KILL_SECONDS)
