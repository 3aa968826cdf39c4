"""The page of a bisection: whom it names, what each trial says, and what the numbers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.render.bisection_words import name_of, sentences, value_of
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row
from ortlab.studies.bisection import NO_CHANGE, NOT_COMPARABLE, RESPONSIBLE, UNFINISHED
from ortlab.studies.bisection_metrics import LOSS, PARITY, PEAK_BYTES, STEP_MS

if TYPE_CHECKING:
    from ortlab.studies.bisection import Bisection
    from ortlab.studies.bisection_trials import Trial

_TITLES: Final = {
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
    about = _TITLES.get(bisection.metric, bisection.metric)
    changes = "1 change" if len(bisection.changes) == 1 else f"{units.count(len(bisection.changes))} changes"
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
    steps = f"{units.count(bisection.count)} {'step' if bisection.count == 1 else 'steps'}"
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
