"""A sweep: from one start through many configurations, and back to where the lab was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ortlab.engine.versions import versions
from ortlab.errors import OptionError
from ortlab.options.options import check_needs
from ortlab.runs.interrupts import interrupts_kept
from ortlab.studies.sweep_layout import check_resumable, lay_out
from ortlab.studies.sweep_runs import make_runs

if TYPE_CHECKING:
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment
    from ortlab.studies.sweep import Sweep
    from ortlab.studies.sweep_points import Point

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
        check_resumable(made, start_digest=experiment.start.digest, versions=versions())
        experiment = experiment.times(made.count)
    if all(made is not known for known in bench.sweeps):
        made.number = len(bench.sweeps) + 1
        bench.sweeps.append(made)
    return _swept(bench, made, experiment, memory=memory, progress=progress)


def _swept(
    bench: Bench, made: Sweep, experiment: Experiment, *, memory: bool | None, progress: bool
) -> Sweep:
    position = next(i for i, known in enumerate(bench.sweeps) if known is made)

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

    with bench.as_before(experiment):
        make_runs(made, trial, bench.progress, kept_as=f"lab.sweeps[{position}]", show=progress)
    return made
