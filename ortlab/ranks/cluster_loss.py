"""A rank that has ended though nobody asked it to: whether one lives, and how it ended."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any, Final

_STATUS_SECONDS: Final = 3
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Lost:
    """A rank that was lost."""

    rank: int
    process: int  # its id
    how: str  # "was killed by signal 9", "ended with status 1", or "has ended" where that is not known
    when: str  # "while it ran" or "between two calls"
    ranks: int  # how many the cluster had


def lives(pid: int) -> bool:
    """Say whether a process has not ended."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def how_ended(engine: Any) -> str:
    """Say how an engine has ended; `engine` is ipyparallel's own `psutil.Process` of it.

    A thread of ipyparallel waits for the process, and this object keeps the status.
    """
    import psutil

    deadline = time.monotonic() + _STATUS_SECONDS
    code = None
    while code is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)  # whoever asks first gets the status, and that is to be the thread
        with contextlib.suppress(psutil.Error):
            code = None if psutil.pid_exists(engine.pid) else engine.wait(timeout=0)
    if code is None:
        return "has ended"
    return f"was killed by signal {-int(code)}" if code < 0 else f"ended with status {int(code)}"
