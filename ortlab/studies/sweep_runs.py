"""The making of a sweep's runs: one after another, one bar over all of them, and failures written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ortlab.errors import OrtlabError

if TYPE_CHECKING:
    from ortlab.records.runs import Run
    from ortlab.runs.progress import Progress
    from ortlab.studies.sweep import Sweep
    from ortlab.studies.sweep_points import Point


def make_runs(sweep: Sweep, trial: Callable[[Point], Run], progress: Progress, *, show: bool) -> None:
    """Make the runs of a sweep that are missing; what fails is written down, and the sweep goes on.

    `trial` goes back to the start and runs the steps with a point's configuration.
    """
    with progress.task(sweep.runs_planned, done=sweep.runs_done, evenly=True, show=show) as bar:
        while (following := next(sweep.missing(), None)) is not None:
            number, position = following
            bar.total = sweep.runs_planned  # a point that failed has dropped its other runs
            bar.begin(_run_words(sweep, position, number), sweep.runs_done)
            try:
                run = trial(sweep.points[position])
            except Exception as error:  # noqa: BLE001 - whatever a step raises is a result of the point
                sweep.fail(position, reason(error))
            else:
                sweep.add(position, run)


def _run_words(sweep: Sweep, position: int, number: int) -> str:
    """Name the run of a point in a round: "Run 3 of 8 (memory_level=1, round 2 of 2)"."""
    rounds = f", round {number} of {sweep.rounds}" if sweep.rounds > 1 else ""
    return f"Run {sweep.runs_done + 1} of {sweep.runs_planned} ({sweep.name(sweep.points[position])}{rounds})"


def reason(error: BaseException) -> str:
    """Say in one line why a run failed."""
    if isinstance(error, OrtlabError):
        return " ".join(filter(None, (error.what, error.why)))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
