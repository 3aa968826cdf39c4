"""What a blame says, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab.blame.blame import BLAMED, NO_CHANGE, TOO_NOISY
from ortlab.blame.metrics import LOSS, PARITY, PEAK_BYTES, STEP_MS
from ortlab.render import units

if TYPE_CHECKING:
    from ortlab.blame.blame import Blame
    from ortlab.blame.search import Culprits
    from ortlab.blame.trials import Trial

_NOUNS: Final = {
    LOSS: "the losses",
    PARITY: "the distance to PyTorch",
    STEP_MS: "the step time",
    PEAK_BYTES: "the peak memory",
}


def sentences(blame: Blame) -> tuple[str, ...]:
    """Say whom a blame names, what they do, and what is left without them."""
    whole = blame.whole
    if blame.outcome == BLAMED:
        return tuple(_causes(blame, one) for one in blame.culprits) + _rest(blame)
    if whole is None or blame.outcome not in (NO_CHANGE, TOO_NOISY):
        return ()
    count = "the change" if len(blame.changes) == 1 else f"all {units.count(len(blame.changes))} changes"
    measured = _measured(blame, whole)
    if blame.outcome == TOO_NOISY:
        pairs = units.count(len(whole.runs))
        found = f"Too noisy to tell: with {count}, {measured}, in {pairs} pairs of runs."
        return (f"{found} The interval holds 1, so nothing is shown: take more steps, or a quieter machine.",)
    return (f"No change to blame: with {count}, {measured}. {_none_up_to(blame)}",)


def name_of(blame: Blame, trial: Trial) -> str:
    """Name a set of changes in a table: "the baseline", "all changes", or the switches."""
    if not trial.names:
        return "the baseline"
    if len(trial.names) == len(blame.changes):
        return "all changes"
    return ", ".join(blame.words(name) for name in trial.names)


def value_of(blame: Blame, trial: Trial) -> str:
    """Write what the metric says of a trial."""
    if trial.failure or trial.value is None:
        return "failed"
    if blame.metric == STEP_MS:
        return units.ratio_interval(trial.value, trial.low, trial.high)
    if blame.metric == PEAK_BYTES:
        return f"{units.size(trial.amount)} ({units.ratio(trial.value)})"
    if blame.metric in (LOSS, PARITY):
        return units.difference(trial.value)
    return f"{trial.value:.6g}"


def _causes(blame: Blame, culprits: Culprits) -> str:
    whole, base, alone = blame.whole, blame.baseline, blame.of(culprits)
    named = [blame.words(name) for name in culprits.names]
    who, verb = _joined(named), "cause" if len(named) > 1 else "causes"
    if whole is not None and whole.failure:
        return f"{who} {verb} the failure{_only_together(culprits)}. {units.fold(whole.failure, 400)}"
    if base is not None and base.failure:
        lets = "let" if len(named) > 1 else "lets"
        why = units.fold(base.failure, 400)
        return f"{who} {lets} the step run{_only_together(culprits)}; without, it fails. {why}"
    noun = _NOUNS.get(blame.metric, blame.metric)
    found = f"{who} {verb} the change of {noun}{_only_together(culprits)}"
    if alone is None or whole is None:
        return f"{found}."
    if alone is whole:
        return f"{found}: {_measured(blame, alone)}."
    of_all = f"; with all {units.count(len(blame.changes))} changes {value_of(blame, whole)}"
    return f"{found}: by {'themselves' if len(named) > 1 else 'itself'}, {_measured(blame, alone)}{of_all}."


def _only_together(culprits: Culprits) -> str:
    if len(culprits.names) == 1:
        return ""
    if culprits.together:
        groups = "; ".join(_joined(list(group)) for group in culprits.together)
        return f", together (what each of {groups} does cannot be told apart)"
    return ", and only together"


def _rest(blame: Blame) -> tuple[str, ...]:
    rest = blame.rest
    if rest is None:
        return ()
    them = "it" if len(blame.culprits) == 1 and len(blame.culprits[0].names) == 1 else "them"
    if blame.whole is not None and blame.whole.failure:
        fails = blame.shows(rest)
        return (f"Without {them}, the other changes {'fail as well' if fails else 'run'}.",)
    others = (
        f"Without {them}, the other {units.count(len(rest.names))} changes"
        if len(rest.names) > 1
        else f"Without {them}, {blame.words(rest.names[0])}"
    )
    if rest.failure:
        return (f"{others} fail: {units.fold(rest.failure)}.",)
    shown = blame.shows(rest)
    verdict = {True: "; there are more culprits", False: "", None: "; noise hides whether that is a change"}[
        shown
    ]
    return (f"{others}: {_measured(blame, rest)}{verdict}.",)


def _measured(blame: Blame, trial: Trial) -> str:
    if blame.metric == LOSS:
        return f"losses differ from the baseline's by {_up_to(trial.value)}"
    base = blame.baseline
    if blame.metric == PARITY:
        of_base = f", with the baseline's switches {units.difference(base.value)}" if base else ""
        return f"losses and updated parameters differ from PyTorch's by {_up_to(trial.value)}{of_base}"
    if blame.metric == STEP_MS:
        return f"a step takes {units.times(trial.value, trial.low, trial.high)} what the baseline's takes"
    if blame.metric == PEAK_BYTES:
        of_base = f", and the baseline's {units.size(base.amount)}" if base else ""
        return f"the peak is {units.size(trial.amount)}{of_base}"
    of_base = f" instead of {value_of(blame, base)}" if base else ""
    return f"{blame.metric} is {value_of(blame, trial)}{of_base}"


def _up_to(value: float | None) -> str:
    return "nothing" if value == 0 else f"up to {units.difference(value)} (relative)"


def _none_up_to(blame: Blame) -> str:
    allowed = blame.least
    if blame.metric in (STEP_MS, PEAK_BYTES):
        return f"Up to {units.percent(allowed)} counts as none."
    kind = " (relative)" if blame.metric in (LOSS, PARITY) else ""
    return f"Up to {units.difference(allowed)}{kind} counts as none."


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
