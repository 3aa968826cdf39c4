"""Comparisons: runs held against each other, changes tried in turns, and engines beside ONNX Runtime in turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ortlab.analyses import memory as measuring
from ortlab.analyses.profiling import spent_on
from ortlab.engine.diagnosis import reason
from ortlab.errors import LedgerError, OptionError
from ortlab.options.catalogue import check_names
from ortlab.options.configuration import check_engine
from ortlab.records import comparison
from ortlab.records.runs import Run
from ortlab.records.verdicts import SLOW
from ortlab.runs.interrupts import interrupts_kept, say
from ortlab.studies.engine_comparison import EngineComparison
from ortlab.studies.sweep_run import each_value, sweep

if TYPE_CHECKING:
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.records.comparison import Comparison
    from ortlab.runs.bench import Bench
    from ortlab.studies.sweep import Point, Sweep


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
    """Compare configurations with a baseline: time with an interval and a verdict, step memory, loss.

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
    check_names(changes, compare)
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
    try:
        made = sweep(
            bench,
            points,
            n=count,
            rounds=TURNS if rounds is None else rounds,
            baseline=baseline,
            repeats=True,
            progress=progress,
        )
    except KeyboardInterrupt as interrupt:
        say(interrupt, str(interrupt).replace("the sweep", "the comparison", 1))
        raise
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


ENGINES: Final = ("eager", "checkpoint", "compile")
BUDGETS: Final = (0.5,)
"""Activation memory budgets that `torch.compile` is tried with, beside its own choice."""

ROUNDS: Final = 5
"""Rounds of `compare_engines`: an interval over rounds in turns needs three, and five to be narrow."""

_MEASURED_STEPS: Final = 2


@interrupts_kept()
def compare_engines(
    bench: Bench,
    n: int | None = None,
    *,
    rounds: int = ROUNDS,
    engines: Iterable[str] = ENGINES,
    budgets: Iterable[float] | None = None,
    also: Iterable[Mapping[str, object]] = (),
    memory: bool | None = None,
    phases: bool = False,
    progress: bool = True,
) -> EngineComparison:
    """Run the last step on ONNX Runtime as it is set, and on what else could run it, from the same start.

    The candidates are PyTorch, PyTorch with each layer checkpointed, `torch.compile`, and `torch.compile` with
    activation memory budgets. Rounds go forwards and backwards in turn, so that a drift of the machine favours
    none, and the step memory of each is measured in the first. A candidate that fails is recorded with the
    reason, and the others go on. Afterwards, also after a failure or an interrupt, weights, optimizer, random
    state, options and engine are as they were before the call.

    `torch.compile` takes minutes for a large model, once for each budget; that is no part of a step's time.

    Parameters
    ----------
    n
        Steps of each run; by default as many as the last step call had.
    rounds
        Runs of each candidate.
    engines
        The candidates: "eager", "checkpoint", "compile", with what they are told, as for `set`.
    budgets
        Activation memory budgets from 0 to 1; 0.5 if "compile" is among the engines.
    also
        Other configurations to stand in the same table, as `set` takes them: `[{"memory_level": 1},
        lab.budget("70%").switches]`. They run on ONNX Runtime unless they name another engine.
    memory
        Whether to measure step memory, as for `step`: once for each candidate.
    phases
        Whether to measure the memory of each candidate phase by phase, too, as `memory` does, which takes some
        more steps: `Candidate.memory`.
    progress
        Whether to show a progress bar on a terminal.

    Returns
    -------
    EngineComparison
        The record. Its runs are in `lab.runs`, and their sweep in `lab.sweeps`.

    Raises
    ------
    OptionError
        If a budget or a configuration makes no sense. Nothing has run then.
    StepError
        If no step has run yet, or a step is running.
    KeyboardInterrupt
        If the user interrupts. The runs made so far are kept in `lab.sweeps[-1]`.

    Examples
    --------
    >>> lab.compare_engines(budgets=[0.5, 0.2], also=[{"memory_level": 1}]).table()
    """
    bench.check_usable("compare engines")
    experiment = bench.last_experiment()
    points = _points(engines, budgets, also)
    known = len(bench.sweeps)
    try:
        with bench.as_before(experiment):
            made = sweep(
                bench, points, n=n, rounds=rounds, baseline=points[0], memory=memory, progress=progress
            )
            found = EngineComparison(made)
            _say_details(bench, found, progress=progress)
            if phases:
                _measure_candidates(bench, found, progress=progress)
    except KeyboardInterrupt as interrupt:
        if len(bench.sweeps) > known:
            say(interrupt, _stopped(bench.sweeps[known]))
        raise
    return found


def _say_details(bench: Bench, found: EngineComparison, *, progress: bool) -> None:
    ours = found.baseline.point
    slow = ours.configuration if found.times_of_pytorch > SLOW else None
    if slow is not None and (spent := spent_on(bench, slow, progress=progress)):
        found.details[ours.number] = f"most of its step goes to {spent}"
    for point in found.sweep.points:
        if point.measured and point.configuration is not None and point.value("engine") != "ort":
            bench.configure(point.configuration)
            if detail := bench.status.detail:
                found.details[point.number] = detail


def _measure_candidates(bench: Bench, found: EngineComparison, *, progress: bool) -> None:
    measured = [point for point in found.sweep.points if point.measured]
    with bench.progress.task(len(measured), show=progress) as bar:
        for done, point in enumerate(measured):
            bar.begin(f"Memory of {found.name(point)}", done)
            try:
                found.memories[point.number] = _measure_candidate(bench, point)
            except Exception as error:  # noqa: BLE001 - whatever is raised is a result of the candidate
                found.no_memory[point.number] = reason(error)


def _measure_candidate(bench: Bench, point: Point) -> MemoryMeasurement:
    assert point.configuration is not None  # noqa: S101 - it was run
    bench.configure(point.configuration)
    return measuring.memory(bench, n=_MEASURED_STEPS)


def _stopped(made: Sweep) -> str:
    """Say in one line what Ctrl-C has left of the candidates."""
    kept = (
        f"{made.runs_done} of {made.runs_planned} runs; kept as lab.sweeps[-1]. The lab is as it was before"
    )
    if made.runs_done < made.runs_planned:
        return f"Stopped after {kept}; go on with %ort_sweep --resume, or lab.sweep(resume=lab.sweeps[-1])."
    return f"Stopped while the memory of the engines was measured, after {kept}; ask again for the memory."


def _points(
    engines: Iterable[str], budgets: Iterable[float] | None, also: Iterable[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Return what each candidate changes, ONNX Runtime as it is set first."""
    points: list[dict[str, object]] = [{"engine": "ort"}]
    for one in _listed(also, "other configurations", '[{"memory_level": 1}]'):
        if not isinstance(one, Mapping):
            raise OptionError(
                f"A configuration is a dict of values by option, not {one!r}.",
                fix='For example lab.compare_engines(also=[{"memory_level": 1}]).',
            )
        points.append({"engine": "ort", **one})
    chosen = [check_engine(one) for one in _listed(engines, "engines", '["eager", "checkpoint"]')]
    if budgets is None:
        budgets = BUDGETS if "compile" in chosen else ()
    listed = _listed(budgets, "activation memory budgets", "[0.5, 0.2]")
    chosen += [check_engine(f"compile:{budget}") for budget in listed]
    return points + [{"engine": one} for one in dict.fromkeys(chosen) if one != "ort"]


def _listed(given: object, what: str, example: str) -> list[object]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise OptionError(f"The {what} are a list, not {given!r}.", fix=f"For example {example}.")
    return list(given)
