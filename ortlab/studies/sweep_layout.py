"""The layout of a sweep before anything runs: its points, those that cannot run, and the baseline."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ortlab.errors import LedgerError, OptionError, StepError
from ortlab.studies.sweep import Sweep
from ortlab.studies.sweep_grid import Changes, read_grid, read_point
from ortlab.studies.sweep_points import Point, same_work

if TYPE_CHECKING:
    from ortlab.options.configuration import Configuration
    from ortlab.options.options import Need


def lay_out(
    grid: object,
    present: Configuration,
    have: Collection[Need],
    *,
    baseline: Mapping[str, object] | None,
    rounds: int,
    repeats: bool = False,
    **facts: Any,
) -> Sweep:
    """Lay a sweep out; nothing runs.

    Parameters
    ----------
    grid
        As `ortlab.studies.sweep_grid.read_grid` takes it.
    present
        The lab's configuration, which the points change.
    have
        What is present: `ortlab.engine.installation.have()`.
    baseline
        What the point changes that the others are held against; None for `present` as it is. If it is not among the
        points, it is run as one more, number 0.
    rounds
        Runs of each point.
    repeats
        Whether points that do the same are run all the same, beside a baseline of its own.
    **facts
        More of what `Sweep` takes: `number`, `model`, `count`, `start_digest`.

    Raises
    ------
    OptionError
        If the grid or the baseline makes no sense as a whole, or no point of the grid can run.
    StepError
        If the number of rounds is no whole number from 1 on.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise StepError(f"The number of rounds must be a whole number from 1 on, not {rounds!r}.")
    points: list[Point] = []
    for number, changes in enumerate(read_grid(grid), start=1):
        points.append(_point(number, changes, present, have, [] if repeats else points))
    if all(point.configuration is None for point in points):
        raise OptionError("No point of this sweep can run.", why=points[0].skipped, fix="Change the grid.")
    base_changes = {} if baseline is None else read_point(baseline)
    base = present.tried(base_changes, have)
    position = None if repeats else next((i for i, point in enumerate(points) if _runs_as(point, base)), None)
    if position is None:
        points.insert(0, Point(0, base_changes, base))
        position = 0
    return Sweep(points=points, baseline=position, rounds=rounds, **facts)


def check_resumable(sweep: Sweep, *, start_digest: str, versions: Mapping[str, str]) -> None:
    """Refuse to go on with a sweep whose other runs would not be comparable.

    Parameters
    ----------
    sweep
        The sweep so far.
    start_digest
        Digest of the start of the lab's last step call.
    versions
        Versions of the packages that are imported now.

    Raises
    ------
    LedgerError
        If nothing is missing, the start is another, or other versions are installed.
    """
    if sweep.complete:
        raise LedgerError(
            "There is nothing to resume: every point of this sweep is done.",
            fix="Start another: lab.sweep({...}).",
        )
    if sweep.start_digest != start_digest:
        raise LedgerError(
            "This sweep cannot be resumed here: it started from another point.",
            why=f"Its runs start from {sweep.start_digest}, and the last step call from {start_digest} "
            "(digests of weights, buffers, optimizer and random state).",
            fix="Run the same step from the same weights and seed first, or start another sweep.",
        )
    for run in (run for point in sweep.points for run in point.runs):
        other = [name for name, version in run.versions.items() if versions.get(name) != version]
        if other:
            raise LedgerError(
                f"This sweep cannot be resumed here: {', '.join(other)} had other versions.",
                why="Times of two versions in one table would be taken for effects of the switches.",
                fix="Resume it in the environment it was made in, or start another sweep.",
            )


def _point(
    number: int, changes: Changes, present: Configuration, have: Collection[Need], before: list[Point]
) -> Point:
    try:
        configuration = present.tried(changes, have)
    except OptionError as error:
        return Point(number, changes, None, skipped=" ".join(filter(None, (error.what, error.why))))
    twin = next((point for point in before if _runs_as(point, configuration)), None)
    if twin is None:
        return Point(number, changes, configuration)
    why = (
        "" if configuration.engine == "ort" else f": {configuration.engine} reads no switches of ONNX Runtime"
    )
    return Point(number, changes, configuration, skipped=f"The same as point {twin.number}{why}.")


def _runs_as(point: Point, configuration: Configuration) -> bool:
    held = point.configuration
    return held is not None and not point.skipped and same_work(held, configuration)
