"""The page of a bisection: whom it names, what each trial says, and what the numbers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row
from ortlab.studies.bisection import (
    LOSS,
    NO_CHANGE,
    NOT_COMPARABLE,
    PARITY,
    PEAK_BYTES,
    RESPONSIBLE,
    STEP_MS,
    TOO_NOISY,
    UNFINISHED,
)

if TYPE_CHECKING:
    from ortlab.studies.bisection import Bisection, Culprits, Trial

_NOUNS: Final = {
    LOSS: "the losses",
    PARITY: "the distance to PyTorch",
    STEP_MS: "the step time",
    PEAK_BYTES: "the peak memory",
}

_MEANINGS: Final = {
    LOSS: ("loss difference", "measured: largest relative difference to the baseline's losses, step by step"),
    PARITY: ("from PyTorch", "measured: largest relative difference of losses and updated parameters"),
    STEP_MS: ("time", "measured: step time over the baseline's in the same pair, with 95 % interval"),
    PEAK_BYTES: ("peak", "measured: peak of a step, and its ratio to the baseline's"),
}


def bisection_page(bisection: Bisection) -> Page:
    """Say which switches cause a change, what was run to find out, and how to go on if it was interrupted."""
    blocks: list[Block] = []
    if bisection.outcome == UNFINISHED:
        blocks.append(
            Note(
                f"Interrupted after {units.count(len(bisection.trials))} trials. "
                "Go on: lab.bisect(resume=...), or %ort_bisect --resume.",
                Mark.WARN,
            )
        )
    mark = {RESPONSIBLE: Mark.WARN, NO_CHANGE: Mark.GOOD, NOT_COMPARABLE: Mark.WARN}.get(
        bisection.outcome, Mark.PLAIN
    )
    words = sentences(bisection)
    blocks += [
        Note(sentence, mark if number < max(1, len(bisection.culprits)) else Mark.PLAIN)
        for number, sentence in enumerate(words)
    ]
    if bisection.trials:
        table = _table(bisection)
        blocks.append(Folded("What was tried", blocks=(table,), is_open=len(bisection.trials) <= 12))  # noqa: PLR2004
    blocks.append(_sources(bisection))
    about = _NOUNS.get(bisection.metric, bisection.metric)
    changes = units.many(bisection.changes, "change")
    return Page(f"Bisection {bisection.number} of {bisection.model}: {about}, {changes}", tuple(blocks))


def _table(bisection: Bisection) -> Table:
    name, meaning = _MEANINGS.get(bisection.metric, (bisection.metric, "what the function said of the run"))
    columns = (
        Column("trial", numeric=True),
        Column("changes", meaning="what stood besides the baseline's switches"),
        Column(name, numeric=True, meaning=meaning),
        Column("shows the change"),
        Column("why it failed"),
    )
    rows = tuple(_row(bisection, number, trial) for number, trial in enumerate(bisection.trials, start=1))
    return Table("", columns, rows)


def _row(bisection: Bisection, number: int, trial: Trial) -> tuple[Cell, ...]:
    culprit = any(frozenset(one.names) == frozenset(trial.names) for one in bisection.culprits)
    shown = bisection.shows(trial) if trial.names else False
    words = {True: "yes", False: "no", None: "cannot be told"}[shown]
    mark = Mark.WARN if culprit else Mark.PLAIN
    return row(
        units.count(number),
        Cell(units.fold(name_of(bisection, trial), 200), mark),
        Cell(value_of(bisection, trial), Mark.BAD if trial.failure else Mark.PLAIN),
        Cell("the culprit" if culprit else words, mark if culprit else Mark.QUIET)
        if trial.names and bisection.outcome in (RESPONSIBLE, UNFINISHED)
        else Cell("-", Mark.QUIET),
        units.fold(trial.failure),
    )


def _sources(bisection: Bisection) -> Note:
    """Say once, under the table, what the numbers are and what they are not."""
    steps = units.many(bisection.count, "step")
    runs = f"{units.count(bisection.runs)} runs of {steps} from one start"
    if bisection.metric == PEAK_BYTES:
        runs = f"{units.count(bisection.runs)} measurements from one start"
    lines = [f"Measured: {runs}. Baseline: {bisection.against!r}."]
    if bisection.outcome == RESPONSIBLE:
        lines.append(
            "A set is a culprit if it shows at least half of the whole change, and less without any one of its members."
        )
    if bisection.metric == STEP_MS:
        lines.append("Times: pairs of neighbouring runs, 95 % t interval of the mean of their log ratios.")
    if bisection.metric == PEAK_BYTES:
        lines.append(
            "On a CPU, ONNX Runtime's arena is off while memory is measured, so cpu_memory_arena changes nothing here."
        )
    if bisection.metric == PARITY:
        lines.append(
            "Dropout draws other masks in PyTorch than in ONNX Runtime: set it to 0 for this metric."
        )
    return Note("\n".join(lines), Mark.QUIET)


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
