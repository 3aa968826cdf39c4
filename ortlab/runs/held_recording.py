"""A recording under a ceiling of memory, which is up while steps run and down while something is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ortlab.runs.recording import Recording

if TYPE_CHECKING:
    from ortlab.options.options import Options
    from ortlab.records.runs import Initialization, Run, Step


class HeldRecording(Recording):
    """Executes an experiment once, under a ceiling that `hold` puts up.

    A build is not held to the limit: C++ code that builds graphs does not survive a lack of memory, and it needs
    about as much for a small batch as for a large one. `pending` says whether the engine builds something first.
    `settle` prepares the heap before steps and between them, so that the resident set follows the live buffers.
    """

    def __init__(
        self, *facts: Any, hold: Callable[[], None], settle: Callable[[], object], pending: bool
    ) -> None:
        super().__init__(*facts)
        self._hold = hold
        self._settle = settle
        self._pending = pending

    def run(self, number: int, options: Options, *, show: bool, partial: bool = False) -> Run:
        """Execute the steps and write the run down; see `Recording.run`."""
        self._settle()
        if not self._pending:
            self._hold()
        return super().run(number, options, show=show, partial=partial)

    def built(self, done: Initialization) -> None:
        """Write down that the engine has just built something, and put the ceiling up before it runs."""
        with self._stopwatch.excluded():
            self._settle()
        super().built(done)
        self._hold()

    def _step(self) -> Step:
        step = super()._step()
        self._settle()
        return step
