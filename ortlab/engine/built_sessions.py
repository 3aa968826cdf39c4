"""The sessions that a module has: the last one of each mode, and some for other calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.engine.exports import BuiltGraph, KeptExport
    from ortlab.options.options import Options

_EARLIER_KEPT: Final = 3
"""Sessions for other calls than the last one; each has its own graph, and none has the weights.

The two steps of a GAN alternate, and so do batches of one and of several; and two calls that are unlike may come before
one backward.
"""


@dataclass(frozen=True, eq=False)
class Built:
    """An execution that runs calls of one kind, with what it was made for and of."""

    kept: KeptExport
    graph: BuiltGraph
    options: Options
    deterministic: bool
    execution: Execution


class BuiltSessions:
    """The sessions of one module."""

    def __init__(self) -> None:
        self._last: dict[bool, Built] = {}
        self._earlier: list[Built] = []
        self._held: tuple[Built, ...] = ()

    def last(self, *, training: bool | None = None) -> Built | None:
        """Return what ran last in a mode; without a mode in training, or else in inference. None if nothing did."""
        if training is None:
            return self._last.get(True) or self._last.get(False)
        return self._last.get(training)

    def earlier(self, *, training: bool) -> Sequence[Built]:
        """Return what ran in a mode before, and is kept."""
        return [one for one in self._earlier if one.execution.training == training]

    def exports(self) -> list[KeptExport]:
        """Return the export of what ran last in each mode."""
        return [built.kept for built in self._last.values()]

    def keep(self, built: Built, usable: Callable[[Built], bool]) -> None:
        """Make `built` what runs in its mode, and keep what ran before, whose backward may be to come.

        `built` is new, or one of `earlier`. Of the earlier sessions, those that `usable` refuses, and all but the
        latest `_EARLIER_KEPT` of each kind, are freed.
        """
        training = built.execution.training
        before = self._last.get(training)
        self._last[training] = built
        self._earlier = [one for one in self._earlier if one is not built]
        if before is not None and before is not built:
            self._earlier.append(before)
        self._release_unless(usable)

    @contextmanager
    def beside(self, usable: Callable[[Built], bool]) -> Iterator[None]:
        """Free none of the present sessions while the block runs; what ran last before it is what runs next after it.

        After the block, sessions that `usable` refuses are freed.
        """
        before, last = self._held, dict(self._last)
        self._held = (*before, *self._last.values(), *self._earlier)
        try:
            yield
        finally:
            self._held = before
            self._earlier += [one for mode, one in self._last.items() if one is not last.get(mode)]
            self._last = last
            self._earlier = [one for one in self._earlier if one not in last.values()]
            self._release_unless(usable)

    def _release_unless(self, usable: Callable[[Built], bool]) -> None:
        """Free the earlier sessions that no call could use, and of the others all but the latest of each kind."""
        latest: list[Built] = []
        # Those without an arena are for measuring: they leave the others their room.
        for arena in (True, False):
            alike = [one for one in self._earlier if one.options.cpu_memory_arena == arena and usable(one)]
            latest += alike[-_EARLIER_KEPT:]
        self.release_earlier(keep=lambda one: one in latest)

    def release_earlier(self, keep: Callable[[Built], bool] = lambda _: False) -> None:
        """Free the earlier sessions, but for those to keep."""
        kept = [one for one in self._earlier if one in self._held or keep(one)]
        for one in self._earlier:
            if one not in kept:
                one.execution.release_session()
        self._earlier = kept

    def release_last(self, *, training: bool) -> None:
        """Free what ran last in a mode, if anything did."""
        built = self._last.pop(training, None)
        if built is not None and built not in self._held:
            built.execution.release_session()

    def release(self) -> None:
        """Free all of them."""
        for training in (True, False):
            self.release_last(training=training)
        self.release_earlier()
