"""A sweep: its points laid out, then run from one start through all, and back to where the lab was."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.installation import versions
from ortlab.errors import LedgerError, OptionError, StepError
from ortlab.options.options import check_needs
from ortlab.runs.interrupts import interrupts_kept
from ortlab.studies.study import check_same_ground, kept
from ortlab.studies.sweep import Sweep
from ortlab.studies.sweep_grid import Changes, read_grid, read_point
from ortlab.studies.sweep_points import Point, same_work
from ortlab.studies.sweep_runs import make_runs

if TYPE_CHECKING:
    from ortlab.options.configuration import Configuration
    from ortlab.options.options import Need
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment

_MEMORY_ROUNDS: Final = 2  # that measure step memory


@interrupts_kept()
def sweep(
    bench: Bench,
    grid: object = None,
    *,
    n: int | None = None,
    rounds: int = 1,
    baseline: Mapping[str, object] | None = None,
    resume: Sweep | None = None,
    memory: bool | None = None,
    repeats: bool = False,
    progress: bool = True,
) -> Sweep:
    """Try many configurations from the start of the last step call, and leave the lab as it was.

    Parameters
    ----------
    grid
        Values by option, as in `{"memory_level": [0, 1, 2], "engine": ["ort", "eager"]}`: every combination is a
        point. Or the points themselves, as in `[{"memory_level": 1}, {"engine": "eager"}]`. What a point does not
        name stays as the lab is set.
    n
        Steps of each run; by default as many as the last step call had.
    rounds
        Runs of each point. Every other round goes backwards, so that a drift of the machine favours no point. From
        three rounds on, times are compared round by round. With one, a point is "faster" or "slower" only where a
        control shows that the machine did not drift between the runs; `lab.compare` takes six.
    baseline
        What the point changes that the others are held against; by default nothing: the lab as it is set. It is
        run as one more point if it is none of the grid.
    resume
        A sweep that was interrupted, from `lab.sweeps` or `Sweep.load`: the runs that are missing are made.
        Points that failed are not tried again.
    memory
        Whether to measure step memory, as for `step`: once for each point.
    repeats
        Whether a point that does the same as the baseline is run beside it, which tells what noise there is.
    progress
        Whether to show a progress bar on a terminal.

    Returns
    -------
    Sweep
        The record, also in `lab.sweeps`; its runs are in `lab.runs`. A point that fails stands in it with the
        reason, as does one whose options contradict each other.

    Raises
    ------
    OptionError
        If the grid makes no sense as a whole: no points, an unknown option, a value of the wrong type. Nothing
        has run then.
    StepError
        If no step has run yet, or a step is running.
    LedgerError
        If the sweep cannot be resumed, because nothing is missing or the start is another.
    KeyboardInterrupt
        If the user interrupts. The runs made so far are kept in `lab.sweeps[-1]`.
    """
    bench.check_usable("sweep")
    experiment = bench.last_experiment().times(n)
    if resume is None:
        made = lay_out(
            grid,
            bench.configuration,
            bench.have,
            baseline=baseline,
            rounds=rounds,
            repeats=repeats,
            number=len(bench.sweeps) + 1,
            model=bench.name,
            count=experiment.count,
            start_digest=experiment.start.digest,
        )
    else:
        if (grid, n, rounds, baseline) != (None, None, 1, None):
            raise OptionError(
                "A sweep that is resumed has its points, steps, rounds and baseline already.",
                fix="lab.sweep(resume=...) alone.",
            )
        made = resume
        check_resumable(made, experiment.start.digest, versions())
        experiment = experiment.times(made.count)
    return _swept(bench, made, experiment, memory=memory, progress=progress)


def _swept(
    bench: Bench, made: Sweep, experiment: Experiment, *, memory: bool | None, progress: bool
) -> Sweep:
    def trial(point: Point) -> Run:
        tried = point.configuration
        assert tried is not None  # noqa: S101 - points without are never run
        check_needs(tried.options, bench.have)
        bench.configure(tried)
        experiment.start.put_back()
        # Memory does not drift, but one reading may hold what something else took just then: two rounds measure.
        settled = len(point.runs) >= _MEMORY_ROUNDS or any(run.no_step_memory for run in point.runs)
        known = min(point.runs, key=lambda run: run.step_memory_bytes or 0) if settled else memory
        return bench.run(experiment, progress=False, sweep=made.number, memory=known)

    with (
        kept(bench.sweeps, made, "lab.sweeps", lambda name: _interrupted(made, name), is_empty=lambda: False),
        bench.as_before(experiment),
    ):
        make_runs(made, trial, bench.progress, show=progress)
    return made


def _interrupted(sweep: Sweep, kept_as: str) -> str:
    """Say in one line what is kept of a sweep that was interrupted, and how to go on."""
    return (
        f"Stopped the sweep after {sweep.runs_done} of {sweep.runs_planned} runs; kept as {kept_as}. "
        f"The lab is as it was before; go on with %ort_sweep --resume, or lab.sweep(resume={kept_as})."
    )


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

    The grid is as `read_grid` takes it, and its points change `present`. `baseline` is what the point changes that the
    others are held against; None for `present` as it is. If it is not among the points, it is one more, number 0. With
    `repeats`, points that do the same are run all the same, beside a baseline of its own. `facts` are other fields of
    `Sweep`.

    Raises OptionError if the grid or the baseline makes no sense as a whole, or no point of the grid can run; StepError
    if the number of rounds is no whole number from 1 on.
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


def check_resumable(sweep: Sweep, start_digest: str, present: Mapping[str, str]) -> None:
    """Raise LedgerError if a sweep is complete, or was made from another start or with other versions."""
    if sweep.complete:
        raise LedgerError(
            "There is nothing to resume: every point of this sweep is done.",
            fix="Start another: lab.sweep({...}).",
        )
    for made_with in ({}, *(run.versions for point in sweep.points for run in point.runs)):
        check_same_ground(sweep, "sweep", start_digest, made_with, present)


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
