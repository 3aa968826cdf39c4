"""The page of a blame: whom it names, what each trial says, and what the numbers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab.blame.blame import BLAMED, NO_CHANGE, UNFINISHED
from ortlab.blame.metrics import LOSS, PARITY, PEAK_BYTES, STEP_MS
from ortlab.render import units
from ortlab.render.blame_words import name_of, sentences, value_of
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.blame.blame import Blame
    from ortlab.blame.trials import Trial

_TITLES: Final = {
    LOSS: "the losses",
    PARITY: "the distance to PyTorch",
    STEP_MS: "the step time",
    PEAK_BYTES: "the peak memory",
}
_MEANINGS: Final = {
    LOSS: ("losses apart", "measured: largest relative difference to the baseline's losses, step by step"),
    PARITY: ("from PyTorch", "measured: largest relative difference of losses and updated parameters"),
    STEP_MS: ("time", "measured: step time over the baseline's in the same pair, with 95 % interval"),
    PEAK_BYTES: ("peak", "measured: peak of a step, and its ratio to the baseline's"),
}


def blame_page(blame: Blame) -> Page:
    """Say which switches cause a change, what was run to find out, and how to go on if it was interrupted."""
    blocks: list[Block] = []
    if blame.outcome == UNFINISHED:
        blocks.append(
            Note(
                f"Interrupted after {units.count(len(blame.trials))} trials. "
                "Go on: lab.blame(resume=...), or %ort_blame --resume.",
                Mark.WARN,
            )
        )
    mark = {BLAMED: Mark.WARN, NO_CHANGE: Mark.GOOD}.get(blame.outcome, Mark.PLAIN)
    words = sentences(blame)
    blocks += [
        Note(sentence, mark if number < max(1, len(blame.culprits)) else Mark.PLAIN)
        for number, sentence in enumerate(words)
    ]
    if blame.trials:
        table = _table(blame)
        blocks.append(Folded("What was tried", blocks=(table,), is_open=len(blame.trials) <= 12))  # noqa: PLR2004
    blocks.append(_sources(blame))
    about = _TITLES.get(blame.metric, blame.metric)
    changes = "1 change" if len(blame.changes) == 1 else f"{units.count(len(blame.changes))} changes"
    return Page(f"Blame {blame.number} of {blame.model}: {about}, {changes}", tuple(blocks))


def _table(blame: Blame) -> Table:
    name, meaning = _MEANINGS.get(blame.metric, (blame.metric, "what the function said of the run"))
    columns = (
        Column("trial", numeric=True),
        Column("changes", meaning="what stood besides the baseline's switches"),
        Column(name, numeric=True, meaning=meaning),
        Column("shows the change"),
        Column("why it failed"),
    )
    rows = tuple(_row(blame, number, trial) for number, trial in enumerate(blame.trials, start=1))
    return Table("", columns, rows)


def _row(blame: Blame, number: int, trial: Trial) -> tuple[Cell, ...]:
    culprit = any(frozenset(one.names) == frozenset(trial.names) for one in blame.culprits)
    shown = blame.shows(trial) if trial.names else False
    words = {True: "yes", False: "no", None: "cannot be told"}[shown]
    mark = Mark.WARN if culprit else Mark.PLAIN
    return row(
        units.count(number),
        Cell(units.fold(name_of(blame, trial), 200), mark),
        Cell(value_of(blame, trial), Mark.BAD if trial.failure else Mark.PLAIN),
        Cell("the culprit" if culprit else words, mark if culprit else Mark.QUIET)
        if trial.names and blame.outcome in (BLAMED, UNFINISHED)
        else Cell("-", Mark.QUIET),
        units.fold(trial.failure),
    )


def _sources(blame: Blame) -> Note:
    """Say once, under the table, what the numbers are and what they are not."""
    steps = f"{units.count(blame.count)} {'step' if blame.count == 1 else 'steps'}"
    runs = f"{units.count(blame.runs)} runs of {steps} from one start"
    if blame.metric == PEAK_BYTES:
        runs = f"{units.count(blame.runs)} measurements from one start"
    lines = [f"Measured: {runs}. Baseline: {blame.against!r}."]
    if blame.outcome == BLAMED:
        lines.append(
            "A set is a culprit if it shows at least half of the whole change, and less without any one of its members."
        )
    if blame.metric == STEP_MS:
        lines.append("Times: pairs of neighbouring runs, 95 % t interval of the mean of their log ratios.")
    if blame.metric == PEAK_BYTES:
        lines.append(
            "On a CPU, ONNX Runtime's arena is off while memory is measured, so cpu_memory_arena changes nothing here."
        )
    if blame.metric == PARITY:
        lines.append(
            "Dropout draws other masks in PyTorch than in ONNX Runtime: set it to 0 for this metric."
        )
    return Note("\n".join(lines), Mark.QUIET)
