"""A sweep: its grid read and laid out, then run from one start through all points, and back to where the lab was."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.diagnosis import reason
from ortlab.engine.installation import versions
from ortlab.engine.patching import only_new_garbage
from ortlab.errors import LedgerError, OptionError, did_you_mean
from ortlab.options.catalogue import check_names
from ortlab.options.configuration import check_engine
from ortlab.options.options import check_needs, declaration, switches
from ortlab.runs.interrupts import interrupts_kept
from ortlab.studies.study import check_rounds, check_same_ground, kept
from ortlab.studies.sweep import Changes, Point, Sweep, same_work

if TYPE_CHECKING:
    from ortlab.options.configuration import Configuration
    from ortlab.options.options import Need
    from ortlab.options.switches import Value
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment

POINTS_MAX: Final = 1000
"""Points of one sweep. Each takes at least a session and some steps; more is a slip of the pen."""

_EXAMPLE: Final = 'lab.sweep({"memory_level": [0, 1, 2], "engine": ["ort", "eager"]})'


def read_grid(grid: object) -> list[Changes]:
    """Read a grid, or a list of points, into what each point changes; every name and value is checked."""
    # A grid has lists of values by option, "engine" among them; their combinations are the points, and the last option
    # varies fastest. A value may be text that spells one, as everywhere. An option that holds several texts
    # (`memory_plan`) takes a list of such lists. Contradictions between options are not looked for here.
    if isinstance(grid, Mapping):
        axes = {_name(name): _values(name, values) for name, values in grid.items()}
        _check_count(math.prod(map(len, axes.values())) if axes else 0)
        return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    if isinstance(grid, Sequence) and not isinstance(grid, (str, bytes)):
        _check_count(len(grid))
        return [read_point(point) for point in grid]
    raise OptionError(
        f"A sweep needs lists of values by option, or a list of points, not a {type(grid).__name__}.",
        fix=f"For example {_EXAMPLE}.",
    )


def read_point(point: object) -> Changes:
    """Read one point, values by option; raise OptionError for what is none."""
    if not isinstance(point, Mapping):
        raise OptionError(
            f"A point of a sweep is a dict of values by option, not {point!r}.",
            fix='For example lab.sweep([{"memory_level": 1}, {"engine": "eager"}]).',
        )
    return {_name(name): _value(name, value) for name, value in point.items()}


def _name(name: Any) -> str:
    known = ["engine", *(one.name for one in switches())]
    if str(name) not in known:
        fix = did_you_mean(name, known, cutoff=0.5) or "`ortlab.options.options.table()` lists all options."
        raise OptionError(f"There is no option {str(name)!r}.", fix=fix)
    return str(name)


def _value(name: str, value: object) -> Value:
    return check_engine(value) if name == "engine" else declaration(name).read(value)


def each_value(name: str, values: object) -> list[Value]:
    """Read one value of an option, or a list of them."""
    # An option that holds several texts takes a list of lists for several values; a list of texts is one value.
    known = _name(name)
    several = isinstance(values, (list, range)) and not (
        known != "engine"
        and isinstance(declaration(known).default, tuple)
        and all(isinstance(value, str) for value in values)
    )
    return _values(known, values if several else [values])


def _values(name: str, values: object) -> list[Value]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        values = [values]
    if not isinstance(values, Collection):
        raise OptionError(
            f"{name} needs a list of values, not a {type(values).__name__}.",
            why="Its values have to be counted before anything runs.",
            fix=f"Make a list of it: list({name}_values).",
        )
    if not values:
        raise OptionError(f"{name} has no values to try.", fix=f"For example {_EXAMPLE}.")
    return [_value(name, value) for value in values]


def _check_count(count: int) -> None:
    if not count:
        raise OptionError("The sweep has no points.", fix=f"For example {_EXAMPLE}.")
    if count > POINTS_MAX:
        raise OptionError(
            f"The sweep has {count:,} points.",
            why=f"Each needs a session and some steps; {POINTS_MAX:,} are the most that a sweep takes.",
            fix="Leave values out, or try one group of options after the other.",
        )


def _run_words(sweep: Sweep, position: int, number: int) -> str:
    """Name the run of a point in a round: "Run 3 of 8 (memory_level=1, round 2 of 2)"."""
    rounds = f", round {number} of {sweep.rounds}" if sweep.rounds > 1 else ""
    return f"Run {sweep.runs_done + 1} of {sweep.runs_planned} ({sweep.name(sweep.points[position])}{rounds})"


_MEMORY_ROUNDS: Final = 2  # that measure step memory


@interrupts_kept()
def sweep(
    bench: Bench,
    /,
    grid: object = None,
    *,
    n: int | None = None,
    rounds: int = 1,
    baseline: Mapping[str, object] | None = None,
    resume: Sweep | None = None,
    memory: bool | None = None,
    repeats: bool = False,
    progress: bool = True,
    **changes: object,
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
    **changes
        The grid as options, each with a value or a list of values: `lab.sweep(memory_level=[0, 1])`.

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
    check_names(changes, sweep)
    experiment = bench.last_experiment().times(n)
    if changes:
        if grid is not None:
            raise OptionError(
                "A grid and options by name cannot be swept in one call.",
                fix='lab.sweep({"memory_level": [0, 1], "engine": ["ort", "eager"]}), or both by name.',
            )
        grid = {name: each_value(name, values) for name, values in changes.items()}
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
    """Make the runs that are missing; what fails is written down, and the sweep goes on."""

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
        kept(
            bench.sweeps,
            made,
            "lab.sweeps",
            lambda: f"the sweep after {made.runs_done} of {made.runs_planned} runs",
            "go on with %ort_sweep --resume, or lab.sweep(resume={})",
        ),
        bench.as_before(experiment),
        only_new_garbage(),
        bench.progress.task(made.runs_planned, done=made.runs_done, evenly=True, show=progress) as bar,
    ):
        while (following := next(made.missing(), None)) is not None:
            number, position = following
            bar.total = made.runs_planned  # a point that failed has dropped its other runs
            bar.begin(_run_words(made, position, number), made.runs_done)
            number_of_run = bench.runs.next_number
            try:
                run = trial(made.points[position])
            except KeyboardInterrupt:
                # It may have come behind the end of a run, while somebody was told of it.
                for run in bench.runs[-1:]:
                    measured = memory is False or run.step_memory_bytes is not None
                    if run.number >= number_of_run and measured:
                        made.add(position, run)
                raise
            except Exception as error:  # noqa: BLE001 - whatever a step raises is a result of the point
                made.fail(position, reason(error))
            else:
                made.add(position, run)
    return made


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
    """Lay a sweep out; nothing runs."""
    # The grid is as `read_grid` takes it, and its points change `present`. `baseline` is what the point changes that
    # the others are held against; None for `present` as it is. If it is not among the points, it is one more, number 0.
    # With `repeats`, points that do the same are run all the same, beside a baseline of its own. `facts` are other
    # fields of `Sweep`.
    check_rounds(rounds, 1)
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
        return Point(number, changes, None, skipped=reason(error))
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
