"""The search for the switches responsible: what is asked, and sets of changes that are run from one start."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from ortlab.engine.installation import versions
from ortlab.errors import LedgerError, OptionError
from ortlab.options.configuration import Configuration
from ortlab.options.options import Need, Options, check_needs, declaration
from ortlab.runs.interrupts import interrupts_kept
from ortlab.studies.bisection import METRICS, STEP_MS, UNFINISHED, Bisection, Metric, Own
from ortlab.studies.bisection_search import Investigation
from ortlab.studies.study import check_rounds, check_same_ground, kept

if TYPE_CHECKING:
    from ortlab.options.switches import Value
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment

ROUNDS: Final = 4
"""Pairs of runs in which a set of changes is timed at first."""

_TIMED_STEPS: Final = 5


@interrupts_kept()
def bisect(
    bench: Bench,
    metric: str | Own = "loss",
    *,
    changes: Mapping[str, object] | None = None,
    baseline: Mapping[str, object] | None = None,
    n: int | None = None,
    rounds: int = ROUNDS,
    tolerance: float | None = None,
    resume: Bisection | None = None,
    progress: bool = True,
) -> Bisection:
    """Find the smallest set of switches that causes a change of numbers, time or memory, or a failure.

    The last step is run with the baseline's switches and with all changes. If that makes a difference, sets of the
    changes are run until the culprits are found: one culprit takes some log2 of the number of changes, several that
    act only together take as many runs each. What is left without them is run, too, and searched if it shows the
    change as well. If the step fails with the changes, the cause of that is looked for. Each set of switches is run
    once. Afterwards, also after a failure or an interrupt, weights, gradients, optimizers, random state, engine and
    options are as they were before the call; nothing comes into the ledger.

    A model that draws random numbers, as dropout does, may draw others under other switches. So where the losses
    change, the baseline also runs with other seeds; a change within what these do names no culprit.

    Switches that 1.19.2 reads when it is imported act here in the process like all others.

    Parameters
    ----------
    metric
        "loss": the largest relative difference of the losses to the baseline's, step by step. "parity": the largest
        relative difference of losses and updated parameters to PyTorch's from the same start. "step_ms": the time
        of a step, in pairs of runs with the baseline, with an interval. "peak_bytes": the peak, as `memory`
        measures it. Or a function that takes a `Run` and returns a number or a truth.
    changes
        What may be responsible, by option, as `set` takes it; the baseline is then the lab as it is set.
    baseline
        The baseline, by option; what is not named stands as it is set. By default all switches at their defaults.
    n
        Steps of each run; by default as many as the last step call had, and at least 5 where they are timed.
    rounds
        Pairs of runs of each set that is timed; three times as many where the noise hides the answer.
    tolerance
        A change up to this is none: by default a relative 1e-5 of losses, 1e-4 of parity, 2 % of time and memory,
        and 0 of a function's number.
    resume
        A bisection that was interrupted, from `lab.bisections` or `Bisection.load`; it has its changes and steps.
    progress
        Whether to show a progress bar on a terminal.

    Returns
    -------
    Bisection
        The record, also in `lab.bisections`.

    Raises
    ------
    OptionError
        If nothing differs from the baseline, an option is unknown, or a value or the metric makes no sense. Nothing
        has run then.
    StepError
        If no step has run yet, a step is running, or the step fails with the switches and without.
    LedgerError
        If the bisection to resume started elsewhere, or is finished.
    KeyboardInterrupt
        If the user interrupts. The trials so far are kept in `lab.bisections[-1]`.

    Examples
    --------
    >>> lab.set(memory_level=1, aten_backward=False, compute_optimizer=False).bisect("loss", tolerance=0)
    >>> lab.bisect("step_ms", changes={"aten_backward": False, "intra_op_spinning": True})
    """
    bench.check_usable("look for switches responsible")
    experiment = bench.last_experiment()
    measured = Metric.read(metric, tolerance)
    if resume is not None:
        if (changes, baseline, n, tolerance) != (None, None, None, None):
            raise OptionError(
                "A bisection that is resumed has its changes, baseline, steps and tolerance already.",
                fix="lab.bisect(resume=...) alone; with the metric, where that is a function.",
            )
        check_resumable(resume, experiment.start.digest, versions())
        if resume.metric not in METRICS and measured.name != resume.metric:
            raise OptionError(
                f"This bisection was made with the function {resume.metric}.",
                fix=f"lab.bisect({resume.metric}, resume=...).",
            )
        own = measured.own if resume.metric not in METRICS else None
        measured, bisection = Metric(resume.metric, resume.tolerance, own), resume
    else:
        check_rounds(rounds, 2)  # for an interval
        least = _TIMED_STEPS if measured.own is None and measured.name == STEP_MS else 1
        count = experiment.times(max(experiment.count, least) if n is None else n).count
        base, differing = read_changes(Configuration("ort", bench.options), changes, baseline, bench.have)
        bisection = Bisection(
            len(bench.bisections) + 1,
            bench.name,
            measured.name,
            measured.tolerance,
            base,
            differing,
            count,
            rounds,
            experiment.start.digest,
            versions(),
        )
    return _bisected(bench, bisection, measured, experiment.times(bisection.count), show=progress)


def _bisected(
    bench: Bench, bisection: Bisection, metric: Metric, experiment: Experiment, *, show: bool
) -> Bisection:
    with (
        kept(
            bench.bisections,
            bisection,
            "lab.bisections",
            lambda: f"the search after {len(bisection.trials)} trials",
            "go on with %ort_bisect --resume, or lab.bisect(resume={})",
            is_empty=lambda: bisection.outcome == UNFINISHED and not bisection.culprits,
        ),
        bench.as_before(experiment),
        bench.progress.task(show=show) as bar,
    ):
        Investigation(bench, experiment, bisection, metric, bar).find()
    return bisection


def read_changes(
    present: Configuration,
    changes: Mapping[str, object] | None,
    baseline: Mapping[str, object] | None,
    have: Collection[Need],
) -> tuple[Options, dict[str, Value]]:
    """Return the baseline's switches, and the values that differ from them, by option."""
    # With `changes`, the baseline is `present`. With `baseline`, it is `present` changed so, without either the
    # defaults; then `present` is what differs. Options that act latest come first: what is tried first then needs no
    # new export.
    for given, word in ((changes, "changes"), (baseline, "baseline")):
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(
                f"{word} is a dict of values by option, not {given!r}.",
                fix='For example lab.bisect("loss", changes={"memory_level": 1}).',
            )
        if given is not None and "engine" in given:
            raise OptionError(
                "The engine is no switch of ONNX Runtime.",
                fix='To compare ONNX Runtime with PyTorch: lab.bisect("parity").',
            )
    if changes is not None and baseline is not None:
        raise OptionError(
            "changes and baseline do not go together.",
            why="With changes, the baseline is the lab as it is set.",
            fix="Leave one of the two out.",
        )
    base = whole = present.options
    if changes is not None:
        whole = present.changed(changes, have).options
    elif baseline is not None:
        base = present.changed(baseline, have).options
    else:
        base = _defaults(present.options)
    check_needs(base, have)
    names = sorted(whole.changed(base), key=lambda name: -declaration(name).effect)
    if not names:
        raise OptionError(
            "Nothing differs from the baseline, so there is nothing responsible.",
            why="" if changes or baseline else "All switches stand at their defaults.",
            fix='Name suspects: lab.bisect("loss", changes={"memory_level": 1, "aten_backward": False}).',
        )
    return base, {name: getattr(whole, name) for name in names}


def check_resumable(bisection: Bisection, start_digest: str, present: Mapping[str, str]) -> None:
    """Raise LedgerError if a bisection is finished, or was made from another start or with other versions."""
    if bisection.outcome != UNFINISHED:
        raise LedgerError("There is nothing to resume: this bisection is finished.", fix="Start another.")
    check_same_ground(bisection, "bisection", start_digest, bisection.versions, present)


def _defaults(present: Options) -> Options:
    """Return the defaults, except for where files go: that is no switch to be tried."""
    return dataclasses.replace(Options(), export_cache_dir=present.export_cache_dir)
