"""What a bisection says, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.studies.bisection import NO_CHANGE, NOT_COMPARABLE, RESPONSIBLE, TOO_NOISY
from ortlab.studies.bisection_metrics import LOSS, PARITY, PEAK_BYTES, STEP_MS

if TYPE_CHECKING:
    from ortlab.studies.bisection import Bisection
    from ortlab.studies.bisection_search import Culprits
    from ortlab.studies.bisection_trials import Trial

_NOUNS: Final = {
    LOSS: "the losses",
    PARITY: "the distance to PyTorch",
    STEP_MS: "the step time",
    PEAK_BYTES: "the peak memory",
}


def sentences(bisection: Bisection) -> tuple[str, ...]:
    """Say which switches a bisection names, what they do, and what is left without them."""
    whole = bisection.whole
    if bisection.outcome == RESPONSIBLE:
        return (
            tuple(_causes(bisection, one) for one in bisection.culprits)
            + _rest(bisection)
            + _drawn(bisection)
        )
    if whole is None or bisection.outcome not in (NO_CHANGE, TOO_NOISY, NOT_COMPARABLE):
        return ()
    count = (
        "the change" if len(bisection.changes) == 1 else f"all {units.count(len(bisection.changes))} changes"
    )
    measured = _measured(bisection, whole)
    if bisection.outcome == TOO_NOISY:
        pairs = units.count(len(whole.runs))
        found = f"Too noisy to tell: with {count}, {measured}, in {pairs} pairs of runs."
        return (f"{found} The interval holds 1, so nothing is shown: take more steps, or a quieter machine.",)
    if bisection.outcome == NOT_COMPARABLE:
        drawn = units.difference(bisection.drawn or 0.0)
        return (
            f"Not comparable: with {count}, {measured}, and other random numbers alone change them by up to {drawn}.",
            (
                "The model draws random numbers (dropout), and other switches may draw others. Set dropout to 0 and "
                "ask again, or ask lab.parity(), which turns it off."
            ),
        )
    return (f"No change responsible: with {count}, {measured}. {_none_up_to(bisection)}",)


def name_of(bisection: Bisection, trial: Trial) -> str:
    """Name a set of changes in a table: "the baseline", "all changes", or the switches."""
    if not trial.names:
        return "the baseline"
    if len(trial.names) == len(bisection.changes):
        return "all changes"
    return ", ".join(bisection.words(name) for name in trial.names)


def value_of(bisection: Bisection, trial: Trial) -> str:
    """Write what the metric says of a trial."""
    if trial.failure or trial.value is None:
        return "failed"
    if bisection.metric == STEP_MS:
        return units.ratio_interval(trial.value, trial.low, trial.high)
    if bisection.metric == PEAK_BYTES:
        return f"{units.size(trial.amount)} ({units.ratio(trial.value)})"
    if bisection.metric in (LOSS, PARITY):
        return units.difference(trial.value)
    return f"{trial.value:.6g}"


def _causes(bisection: Bisection, culprits: Culprits) -> str:
    whole, base, alone = bisection.whole, bisection.baseline, bisection.of(culprits)
    named = [bisection.words(name) for name in culprits.names]
    who, verb = _joined(named), "cause" if len(named) > 1 else "causes"
    if whole is not None and whole.failure:
        return f"{who} {verb} the failure{_only_together(culprits)}. {units.fold(whole.failure, 400)}"
    if base is not None and base.failure:
        lets = "let" if len(named) > 1 else "lets"
        why = units.fold(base.failure, 400)
        return f"{who} {lets} the step run{_only_together(culprits)}; without, it fails. {why}"
    noun = _NOUNS.get(bisection.metric, bisection.metric)
    found = f"{who} {verb} the change of {noun}{_only_together(culprits)}"
    if alone is None or whole is None:
        return f"{found}."
    if alone is whole:
        return f"{found}: {_measured(bisection, alone)}."
    of_all = f"; with all {units.count(len(bisection.changes))} changes {value_of(bisection, whole)}"
    return (
        f"{found}: by {'themselves' if len(named) > 1 else 'itself'}, {_measured(bisection, alone)}{of_all}."
    )


def _only_together(culprits: Culprits) -> str:
    if len(culprits.names) == 1:
        return ""
    if culprits.together:
        groups = "; ".join(_joined(list(group)) for group in culprits.together)
        return f", together (what each of {groups} does cannot be told apart)"
    return ", and only together"


def _rest(bisection: Bisection) -> tuple[str, ...]:
    rest = bisection.rest
    if rest is None:
        return ()
    them = "it" if len(bisection.culprits) == 1 and len(bisection.culprits[0].names) == 1 else "them"
    if bisection.whole is not None and bisection.whole.failure:
        fails = bisection.shows(rest)
        return (f"Without {them}, the other changes {'fail as well' if fails else 'run'}.",)
    others = (
        f"Without {them}, the other {units.count(len(rest.names))} changes"
        if len(rest.names) > 1
        else f"Without {them}, {bisection.words(rest.names[0])}"
    )
    if rest.failure:
        return (f"{others} fail: {units.fold(rest.failure)}.",)
    shown = bisection.shows(rest)
    verdict = {True: "; there are more culprits", False: "", None: "; noise hides whether that is a change"}[
        shown
    ]
    return (f"{others}: {_measured(bisection, rest)}{verdict}.",)


def _drawn(bisection: Bisection) -> tuple[str, ...]:
    if not bisection.drawn:
        return ()
    drawn = units.difference(bisection.drawn)
    return (
        (
            f"The model draws random numbers (dropout): with other ones the baseline's losses differ by up to {drawn}, "
            "which is less."
        ),
    )


def _measured(bisection: Bisection, trial: Trial) -> str:
    if bisection.metric == LOSS:
        return f"losses differ from the baseline's by {_up_to(trial.value)}"
    base = bisection.baseline
    if bisection.metric == PARITY:
        of_base = f", with the baseline's switches {units.difference(base.value)}" if base else ""
        return f"losses and updated parameters differ from PyTorch's by {_up_to(trial.value)}{of_base}"
    if bisection.metric == STEP_MS:
        return f"a step takes {units.times(trial.value, trial.low, trial.high)} what the baseline's takes"
    if bisection.metric == PEAK_BYTES:
        of_base = f", and the baseline's {units.size(base.amount)}" if base else ""
        return f"the peak is {units.size(trial.amount)}{of_base}"
    of_base = f" instead of {value_of(bisection, base)}" if base else ""
    return f"{bisection.metric} is {value_of(bisection, trial)}{of_base}"


def _up_to(value: float | None) -> str:
    return "nothing" if value == 0 else f"up to {units.difference(value)} (relative)"


def _none_up_to(bisection: Bisection) -> str:
    allowed = bisection.least
    if bisection.metric in (STEP_MS, PEAK_BYTES):
        return f"Up to {units.percent(allowed)} counts as none."
    kind = " (relative)" if bisection.metric in (LOSS, PARITY) else ""
    return f"Up to {units.difference(allowed)}{kind} counts as none."


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
