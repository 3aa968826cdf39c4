"""How far a long call has come: one line with a bar, under the running cell or on the terminal, and in the panel."""

from __future__ import annotations

import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, Final, Protocol

REDRAW_SECONDS: Final = 0.2
"""Shortest time between two drawings while steps run: each is a message to the browser, and a step may take 2 ms."""

_QUICK_SECONDS: Final = 0.3
"""A call that ends sooner leaves its cell without a bar."""

_LEFT_AFTER_SECONDS: Final = 1.0
"""How long must have been measured before the time left is more than a guess."""

Tell = Callable[[str, float], None]
"""Told of each drawn line: its words and the fraction that is done; empty words end it."""


class Task:
    """One call, or one part of a call, and how much of it is done; `Progress.task` makes it."""

    # `total` and `done` count units such as steps or runs; where `total` is None, `report` gives the fraction. `evenly`
    # says that each unit takes about as long as another, so that the time left can be told. `outermost` says that the
    # task is part of no other: its first and its last step are always drawn.

    def __init__(
        self,
        draw: Callable[[float], None],
        what: str,
        total: int | None,
        done: int,
        *,
        evenly: bool,
        outermost: bool,
    ) -> None:
        self.what = what
        self.total = total
        self.done = done
        self.evenly = evenly
        self._draw = draw
        self._outermost = outermost
        self._fraction = 0.0
        self._loss: float | None = None
        self._ms = self._counted = 0.0
        self._step_ms: float | None = None
        self._began, self._origin = time.monotonic(), self.fraction

    @property
    def fraction(self) -> float:
        """How much is done, from 0 to 1; parts that run now are not counted."""
        return self._fraction if self.total is None else min(1.0, self.done / max(1, self.total))

    def begin(self, what: str, done: int | None = None) -> None:
        """Go on to the next unit and say what it is; `done` says how many came before, where that has changed."""
        self.what = what
        self.done = self.done if done is None else done
        self._draw(0.0)

    def report(self, what: str, fraction: float) -> None:
        """Say what goes on and, where units are not counted, how much is done; empty words change neither."""
        if what:
            self.what, self._fraction = what, fraction
            self._draw(0.0)

    def step(self, loss: float | None, step_ms: float) -> None:
        """Count a training step that has just ended; most are not drawn."""
        self.done += 1
        self._loss = loss
        self._ms += step_ms
        self._counted += 1
        if self.done == 1:  # it pays for the build and for first allocations, which the others do not
            self._began, self._origin = time.monotonic(), self.fraction
        self._draw(0.0 if self._outermost and self.done in {1, self.total} else REDRAW_SECONDS)

    def words(self) -> str:
        """Say where the task stands: "Step 37 of 2,000, loss 6.2146, 12.3 ms a step", or what it was told."""
        if not self._counted and self._step_ms is None:
            return self.what
        from ortlab import units

        if self._counted:  # the mean of the steps since the last drawing
            self._step_ms, self._ms, self._counted = self._ms / self._counted, 0.0, 0.0
        of = f" of {units.count(self.total)}" if self.total is not None else ""
        loss = f", loss {units.loss(self._loss)}" if self._loss is not None else ""
        step = f"Step {units.count(self.done)}{of}{loss}, {units.duration(self._step_ms)} a step"
        return f"{self.what}: {step}" if self.what else step

    def left_s(self, fraction: float) -> float:
        """Return the seconds that are left at the pace so far; nan where that cannot be told."""
        elapsed, gone = time.monotonic() - self._began, fraction - self._origin
        if not self.evenly or elapsed < _LEFT_AFTER_SECONDS or gone <= 0.0 or fraction >= 1.0:
            return math.nan
        return elapsed / gone * (1.0 - fraction)


class Progress:
    """The line of one lab, or of one call without a lab: tasks within a task are parts of it, and share its bar."""

    # `tell` is told of each line that is drawn, besides the cell or the terminal.

    def __init__(self, tell: Tell = lambda _words, _fraction: None) -> None:
        self._tell = tell
        self._tasks: list[Task] = []
        self._stage = ""
        self._view: _View | None = None
        self._drawn_at = 0.0

    @contextmanager
    def task(
        self,
        total: int | None = None,
        *,
        what: str = "",
        done: int = 0,
        evenly: bool = False,
        show: bool = True,
    ) -> Iterator[Task]:
        """Open a task for a block: a bar of its own, or a part of the bar of the task around it; see `Task`."""
        # `show` says whether the cell or the terminal shows a bar, where no task is open yet; the panel always does.
        outermost = not self._tasks
        if outermost:
            self._view = _view() if show else None
        task = Task(self._draw, what, total, done, evenly=evenly, outermost=outermost)
        self._tasks.append(task)
        try:
            if what:
                self._draw(0.0)
            yield task
        finally:
            self._tasks.remove(task)
            self._stage = ""
            if outermost:
                view, self._view = self._view, None
                if view is not None:
                    view.close()
                self._tell("", 1.0)

    def report(self, what: str, fraction: float) -> None:
        """Pass on what goes on inside the innermost task; without one, only the panel hears of it."""
        if self._tasks:
            self._tasks[-1].report(what, fraction)
        else:
            self._tell(what, fraction)

    def stage(self, what: str, fraction: float) -> None:
        """Pass on which stage of a build begins; empty words end the build."""
        if not self._tasks:
            self._tell(what, fraction)
            return
        self._stage = what
        if what:
            self._draw(0.0)

    def _draw(self, since: float) -> None:
        """Draw the line, unless it was drawn less than so many seconds ago."""
        now = time.monotonic()
        # The last step of somebody else's loop ends when no task is open any more.
        if now - self._drawn_at < since or not self._tasks:
            return
        fraction, counted = 0.0, 1.0
        for task in self._tasks:  # what is done of the running unit is done of the task around it
            fraction += counted * task.fraction
            counted /= task.total or math.inf
        words = ": ".join(filter(None, [*(task.words() for task in self._tasks), self._stage]))
        left = self._tasks[0].left_s(fraction)
        if not math.isnan(left):
            from ortlab import units

            words += f", {units.duration(1000 * left)} left"
        self._tell(words, fraction)
        if self._view is not None:
            self._view.draw(words, fraction)
        self._drawn_at = now


# ---- where it is seen ----------------------------------------------------------------------------------------------


class _View(Protocol):
    def draw(self, words: str, fraction: float) -> None:
        """Show the line."""

    def close(self) -> None:
        """Remove it."""


class _Terminal:
    """The bar of tqdm, which draws on terminals only and removes itself."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=1.0,
            bar_format="{percentage:3.0f} %|{bar:20}| {desc}",
            leave=False,
            disable=None,
            dynamic_ncols=True,
        )

    def draw(self, words: str, fraction: float) -> None:
        self._bar.n = fraction
        self._bar.set_description_str(words)

    def close(self) -> None:
        self._bar.close()


_HTML: Final = (
    '<div style="display: flex; align-items: center; gap: 0.8em; font-variant-numeric: tabular-nums; '
    'font-family: var(--jp-ui-font-family, sans-serif); color: var(--jp-ui-font-color1, inherit)">'
    '<progress max="1" value="{fraction:.4f}" aria-label="{words}" style="width: 14em; flex: none; '
    'accent-color: var(--jp-brand-color1, #1976d2)"></progress><span>{words}</span></div>'
)


class _Cell:
    """A bar in the output of the running cell; at the end the output is empty, and a notebook keeps no trace of it."""

    # An output cannot be removed alone: `clear_output` would take what the user's code has printed with it. One without
    # data is neither drawn nor compared by anything.

    def __init__(self, publish: Callable[..., None]) -> None:
        self._publish = publish
        self._transient = {"display_id": uuid.uuid4().hex}
        self._opened = time.monotonic()
        self._shown = False

    def draw(self, words: str, fraction: float) -> None:
        if not self._shown and time.monotonic() - self._opened < _QUICK_SECONDS:
            return
        data = {"text/plain": words, "text/html": _HTML.format(words=escape(words), fraction=fraction)}
        self._publish(data, transient=self._transient, update=self._shown)
        self._shown = True

    def close(self) -> None:
        if self._shown:
            self._publish({}, transient=self._transient, update=True)


def _view() -> _View | None:
    """Return where the person who started the call looks: the running cell or the terminal; None if nobody looks."""
    ipython = sys.modules.get("IPython")  # whoever has a notebook has imported it
    shell: Any = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return _Terminal()
    publisher = shell.display_pub
    # nbclient, nbval and papermill run notebooks with nobody there to ask, and keep each output; a click in the panel
    # has no cell, and `%%capture` keeps what it gets.
    parent: dict[str, Any] = shell.get_parent() if hasattr(shell, "get_parent") else {}
    request = parent.get("content", {})
    if not request.get("allow_stdin") or not hasattr(publisher, "pub_socket"):
        return None
    return _Cell(publisher.publish)
