"""One progress bar over a hunt: what is tried and timed now, and how much of what is known to come is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ortlab.hunting.following import remaining
from ortlab.hunting.points import plans_name

if TYPE_CHECKING:
    from ortlab.hunting.batch_hunt import BatchHunt
    from ortlab.hunting.following import Task

_WORDS = {"try": "trying", "time": "timing", "choose": "reading the plans"}


class HuntProgress:
    """One progress bar over a hunt.

    Parameters
    ----------
    hunt
        The hunt.
    tell
        Told what is going on and which fraction of what is known to come is done.
    show
        Whether to draw a bar where standard error is a terminal.
    """

    def __init__(self, hunt: BatchHunt, tell: Callable[[str, float], None], *, show: bool) -> None:
        from tqdm import tqdm

        self._hunt = hunt
        self._tell = tell
        self._where = ""
        self._done = 0
        # How many points there will be is not known before one does not fit, so the bar has no end.
        self._bar = tqdm(unit="run", leave=False, disable=None if show else True)

    def begin(self, task: Task) -> None:
        """Go on to a task."""
        what = _WORDS[task.kind]
        point = f"batch {task.size}, {plans_name(task.plans)}: {what}" if task.size else what
        self._where = f"{point}, round {task.round} of {self._hunt.rounds}" if task.kind == "time" else point
        self._bar.set_description(self._where)
        self.report("", 0.0)

    def report(self, text: str, _fraction: float) -> None:
        """Pass on what the present run is doing."""
        ahead = remaining(self._hunt) + 1
        self._tell(f"{self._where}: {text}" if text else self._where, self._done / (self._done + ahead))

    def end(self) -> None:
        """Count a task as done."""
        self._done += 1
        self._bar.update()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
        self._tell("", 1.0)
