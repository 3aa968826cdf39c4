"""What a cell prints and shows on many ranks, in a notebook: the first rank at once, then all, rank by rank."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from IPython.display import display

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortlab.ranks.outputs import RankOutput

_ALIVE = "application/vnd.jupyter.widget-view+json"
"""A widget of another process; its text or HTML is shown in its place."""


class RankPrinter:
    """Shows the outputs of one cell; each line begins with the number of its rank."""

    def __init__(self) -> None:
        self._outputs: Sequence[RankOutput] = ()
        self._printed = 0

    def follow(self, outputs: Sequence[RankOutput]) -> None:
        """Print what the first rank has printed since the last call, whole lines only."""
        self._outputs = outputs
        if not outputs:
            return
        first = outputs[0]
        end = first.stdout.rfind("\n") + 1
        if end > self._printed:
            _write(first.rank, first.stdout[self._printed : end], sys.stdout)
            self._printed = end

    def finish(self) -> None:
        """Show the rest, rank by rank; of several errors the traceback of one."""
        for number, one in enumerate(self._outputs):
            _write(one.rank, one.stdout[self._printed if number == 0 else 0 :], sys.stdout)
            _write(one.rank, one.stderr, sys.stderr)
            for data in one.displays:
                shown = {mime: form for mime, form in data.items() if mime != _ALIVE}
                _show(one.rank, shown, is_open=number == 0)
        failed = [one for one in self._outputs if one.error is not None]
        # A rank that was only interrupted, or lost its connection, says less than the one that was first.
        first = min(failed, key=lambda one: one.is_consequence, default=None)
        if first is not None and first.error is not None:
            _write(first.rank, first.error.traceback, sys.stderr)


def _write(rank: int, text: str, stream: TextIO) -> None:
    for line in text.splitlines():
        print(f"[{rank}] {line}", file=stream)
    stream.flush()


def _show(rank: int, data: dict[str, Any], *, is_open: bool) -> None:
    """Show a value; of HTML, that of the first rank stands open, and the others' unfold."""
    plain = str(data.get("text/plain", ""))
    if set(data) <= {"text/plain"}:
        _write(rank, plain, sys.stdout)
        return
    head = f"rank {rank}"
    page = data.get("text/html")
    if page is None:
        display({"text/plain": head, "text/html": f"<strong>{head}</strong>"}, raw=True)
        display(data, raw=True)
        return
    opened = " open" if is_open else ""
    folded = f"<details{opened}><summary><strong>{head}</strong></summary>{page}</details>"
    display({"text/plain": f"{head}\n{plain}", "text/html": folded}, raw=True)
