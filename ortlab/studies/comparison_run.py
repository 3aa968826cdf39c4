"""Comparisons: runs of the ledger held against each other, and changes that are tried in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ortlab.analyses.profiling import spent_on
from ortlab.errors import LedgerError, OptionError
from ortlab.records import comparison
from ortlab.records.runs import Run
from ortlab.studies.sweep_run import each_value, sweep

if TYPE_CHECKING:
    from ortlab.records.comparison import Comparison
    from ortlab.runs.bench import Bench

TURNS: Final = 6
"""Rounds of `compare`: an interval over rounds narrows slowly at first."""

_TURN_STEPS: Final = 8
"""Steps of a turn: some of them go until page faults have settled; see `ortlab.records.verdicts.settled`."""


def compare(
    bench: Bench,
    /,
    *runs: int | Run | Mapping[str, object],
    baseline: int | Run | Mapping[str, object] | None = None,
    rerun: bool = False,
    n: int | None = None,
    rounds: int | None = None,
    progress: bool = True,
    **changes: object,
) -> Comparison:
    """Hold configurations against a baseline: time with an interval and a verdict, step memory, loss.

    With changes, `lab.compare(engine="eager", memory_level=[1, 2])`, the last step is run from its start on the lab
    as it is set and on each candidate, in turns: every `option=value` is a candidate of its own, and so is every
    value of a list. A drift of the machine then meets all alike. Without changes, runs of the ledger are held
    against each other as they are; times of runs that were made one after another get a verdict only where a
    control shows that the machine did not drift between them.

    Parameters
    ----------
    *runs
        Runs of the ledger, by number; all but those of sweeps if none is given. Or candidates with several changes,
        a dict each: `lab.compare({"memory_level": 1, "opset": 16})`.
    baseline
        The run that the others are held against, by default the first. With changes: what the baseline changes, by
        default nothing, the lab as it is set.
    rerun
        Whether to run the configurations of these runs again, in turns, from the start of the last step.
    n
        With changes or `rerun`: steps of each turn, by default as many as the last step call had, at most 8. The
        first ones do not count, until page faults have settled.
    rounds
        With changes or `rerun`: turns of each configuration, 6 by default. Below 3 there is no interval over them.
    progress
        Whether to show a progress bar on a terminal.
    **changes
        Options with a value or a list of values to try; `engine` may be among them.

    Returns
    -------
    Comparison
        `summary` is its result in a sentence. New runs are in `lab.runs`, their sweep in `lab.sweeps`; the lab is
        as it was before.

    Raises
    ------
    LedgerError
        If a run is not there, there are fewer than two, or nothing could be run.
    OptionError
        If a candidate makes no sense. Nothing has run then.
    StepError
        If no step has run yet, or a step is running.
    KeyboardInterrupt
        If the user interrupts. The runs made so far are kept in `lab.sweeps[-1]`.

    Examples
    --------
    >>> print(lab.compare(memory_level=1).summary)
    memory_level=1 needs 58 % less step memory and 21 % more time (95 % interval 17 % to 26 %) than the baseline.
    """
    named = [_run_of(bench, one) for one in runs if not isinstance(one, Mapping)]
    tried = [one for one in runs if isinstance(one, Mapping)]
    if changes or tried:
        if named or rerun:
            raise OptionError(
                "Runs and changes cannot be compared in one call.",
                why="Runs are compared as they were made, and changes are tried now.",
                fix="lab.compare(memory_level=1) tries a change; lab.compare(1, 3, rerun=True) repeats runs.",
            )
        if baseline is not None and not isinstance(baseline, Mapping):
            baseline = _changes_of(bench, _run_of(bench, baseline))
        points = [
            *tried,
            *({name: one} for name, values in changes.items() for one in each_value(name, values)),
        ]
        return _compared_in_turns(bench, points, baseline, n, rounds, progress=progress)
    single = [run for run in bench.runs if not run.sweep]
    if isinstance(baseline, Mapping):
        raise OptionError(
            "A baseline of changes needs candidates to try.",
            fix="lab.compare(memory_level=1, baseline={'engine': 'eager'})",
        )
    base = None if baseline is None else _run_of(bench, baseline)
    if not rerun:
        if n is not None or rounds is not None:
            raise OptionError(
                "n and rounds are of what is run, and nothing is.",
                fix="lab.compare(rerun=True, rounds=6)",
            )
        return comparison.compare(named or single, base)
    chosen = named or single
    first = base or (chosen[0] if chosen else None)
    if first is None:
        raise LedgerError("There is no run to repeat.", fix="Run a step first: %%ort_step, or lab.step(fn).")
    candidates = [_changes_of(bench, run) for run in chosen if run is not first]
    if not candidates:
        raise LedgerError(
            "There is only one run, so there is nothing to compare it with.",
            fix="Name what to compare it with: lab.compare(memory_level=1), lab.compare(engine='eager').",
        )
    return _compared_in_turns(bench, candidates, _changes_of(bench, first), n, rounds, progress=progress)


def _compared_in_turns(
    bench: Bench,
    points: Sequence[Mapping[str, object]],
    baseline: Mapping[str, object] | None,
    n: int | None,
    rounds: int | None,
    *,
    progress: bool,
) -> Comparison:
    bench.check_usable("compare")
    count = min(bench.last_experiment().count, _TURN_STEPS) if n is None else n
    made = sweep(
        bench,
        points,
        n=count,
        rounds=TURNS if rounds is None else rounds,
        baseline=baseline,
        repeats=True,
        progress=progress,
    )
    found = comparison.compare_in_turns(made)
    configurations = {run.number: point.configuration for point in made.points for run in point.runs}
    spent = {
        one.run.number: spent_on(bench, configuration, progress=progress)
        for one in found.slow
        if (configuration := configurations[one.run.number]) is not None
    }
    return replace(found, spent=spent)


def _run_of(bench: Bench, run: int | Run) -> Run:
    """Return a run of the ledger by its number; a run is taken as it is."""
    return run if isinstance(run, Run) else bench.runs.run(run)


def _changes_of(bench: Bench, run: Run) -> dict[str, object]:
    """Return what `set` would have to be told for the configuration of a run."""
    changed = bench.options.changed(run.options)
    return {"engine": run.engine, **{name: getattr(run.options, name) for name in changed}}
