"""The making of a sweep's runs: one after another, one bar over all of them, and failures written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ortlab.errors import OrtlabError

if TYPE_CHECKING:
    from ortlab.configuration import Configuration
    from ortlab.runs import Run
    from ortlab.sweeps.sweep import Sweep


class SweepProgress:
    """One progress bar over all points and steps of a sweep.

    Parameters
    ----------
    sweep
        The sweep; what is done of it already counts.
    tell
        Told what is going on and which fraction of the sweep is done.
    show
        Whether to draw a bar where standard error is a terminal.
    """

    def __init__(self, sweep: Sweep, tell: Callable[[str, float], None], *, show: bool) -> None:
        from tqdm import tqdm

        self._sweep = sweep
        self._tell = tell
        self._where = ""
        self._steps = 0
        total = sweep.runs_planned * sweep.count
        done = sweep.runs_done * sweep.count
        # With disable=None tqdm draws on terminals only; a notebook shows the panel's bar instead.
        self._bar = tqdm(total=total, initial=done, unit="step", leave=False, disable=None if show else True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
        self._tell("", 1.0)

    def begin(self, position: int, number: int) -> None:
        """Go on to a run: the position of its point, and the number of its round."""
        sweep = self._sweep
        point = sweep.points[position]
        rounds = f", round {number} of {sweep.rounds}" if sweep.rounds > 1 else ""
        self._where = f"Run {sweep.runs_done + 1} of {sweep.runs_planned} ({sweep.name(point)}{rounds})"
        self._steps = 0
        self._bar.set_description(self._where)
        self.report("", 0.0)

    def step(self, text: str, fraction: float) -> None:
        """Pass on that a step of the present run is done."""
        steps = round(fraction * self._sweep.count)
        self._bar.update(steps - self._steps)
        self._steps = steps
        self.report(text, fraction)

    def report(self, text: str, _fraction: float) -> None:
        """Pass on what the present run is doing; the fraction that counts is that of the sweep."""
        done = self._sweep.runs_done * self._sweep.count + self._steps
        planned = max(1, self._sweep.runs_planned * self._sweep.count)
        self._tell(f"{self._where}: {text}" if text else self._where, min(1.0, done / planned))

    def end(self) -> None:
        """Count a run as done; one that failed drops the other runs of its point."""
        self._bar.total = self._sweep.runs_planned * self._sweep.count
        self._bar.update(self._sweep.runs_done * self._sweep.count - self._bar.n)
        self._steps = 0


def make_runs(
    sweep: Sweep, trial: Callable[[Configuration], Run], progress: SweepProgress, *, kept_as: str
) -> None:
    """Make the runs of a sweep that are missing; what fails is written down, and the sweep goes on.

    Parameters
    ----------
    sweep
        Filled in run by run.
    trial
        Goes back to the start and runs the steps with a configuration.
    progress
        Told about each run.
    kept_as
        Where the user finds the sweep after an interrupt.

    Raises
    ------
    KeyboardInterrupt
        If the user interrupts; it says how to go on. The runs made so far are in the sweep.
    """
    try:
        while (following := next(sweep.missing(), None)) is not None:
            number, position = following
            configuration = sweep.points[position].configuration
            assert configuration is not None  # noqa: S101 - those without are never missing
            progress.begin(position, number)
            try:
                run = trial(configuration)
            except Exception as error:  # noqa: BLE001 - whatever a step raises is a result of the point
                sweep.fail(position, reason(error))
            else:
                sweep.add(position, run)
            progress.end()
    except KeyboardInterrupt as interrupt:
        interrupt.args = (interrupted(sweep, kept_as),)
        raise


def reason(error: BaseException) -> str:
    """Say in one line why a run failed."""
    if isinstance(error, OrtlabError):
        return " ".join(filter(None, (error.what, error.why)))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def interrupted(sweep: Sweep, kept_as: str) -> str:
    """Say what is kept of a sweep that was interrupted, and how to go on."""
    return (
        f"The sweep stopped after {sweep.runs_done} of {sweep.runs_planned} runs; the lab is as it was before it.\n"
        f"Kept: {kept_as}\nGo on: lab.sweep(resume={kept_as}), or %ort_sweep --resume"
    )
