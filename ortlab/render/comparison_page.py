"""The page of a comparison of runs, and the words of a verdict wherever configurations are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.records.comparison import MEASURE_IN_TURNS, short_name
from ortlab.records.verdicts import (
    ALIKE,
    FASTER,
    FELL_BACK,
    LESS_MEMORY,
    MARGIN,
    MEMORY_MARGIN,
    MORE_MEMORY,
    NO_DIFFERENCE,
    NOT_COMPARABLE,
    SLOWER,
)
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row
from ortlab.render.run_pages import LAST_LOSS, LISTED, STEP_MEMORY, TIMES, listed, sources

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ortlab.records.comparison import Comparison, Contrast
    from ortlab.studies.sweep import Outcome

_GOOD: Final = {FASTER, LESS_MEMORY}
_WORSE: Final = {SLOWER, MORE_MEMORY}
BASELINE: Final = Cell("baseline", Mark.QUIET)
MEMORY_MEASURED: Final = (
    "Step memory: measured, how far a step rises above its start; of two rounds the lower reading."
)

TIME_RATIO: Final = Column(
    "time", numeric=True, meaning="measured: step time over the baseline's, with 95 % interval"
)
VERDICT: Final = Column(
    "verdict", meaning="what may be said; nothing where the machine may have drifted between the runs"
)
MEMORY_CHANGE: Final = Column("memory", numeric=True, meaning="measured: step memory against the baseline's")
LOSS_DIFFERENCE: Final = Column(
    "loss difference", numeric=True, meaning="measured: largest relative one, step by step"
)
STEP_OF_ROUNDS: Final = Column(
    "step", numeric=True, meaning="measured: median wall time of a warm step, all rounds together"
)
COMPARED: Final = (
    TIME_RATIO,
    VERDICT,
    STEP_OF_ROUNDS,
    STEP_MEMORY,
    MEMORY_CHANGE,
    LAST_LOSS,
    LOSS_DIFFERENCE,
)
"""Columns of points that were held against a baseline; `compared_cells` gives the cells."""


def compared_cells(one: Outcome, memory_ratio: float | None, *, is_base: bool) -> tuple[Cell, ...]:
    """Say in the columns of `COMPARED` what was measured of a point, with its memory over the baseline's."""
    point = one.point
    ratio = units.ratio(1.0) if is_base else units.ratio_interval(one.time_ratio, one.time_low, one.time_high)
    return row(
        ratio,
        BASELINE if is_base and not point.fell_back else verdict_cell(one.verdict, one.memory),
        units.duration(point.step_ms),
        units.size(point.step_memory_bytes),
        "-" if is_base else units.change(memory_ratio),
        units.loss(point.runs[-1].losses[-1]),
        "-" if is_base else units.difference(one.loss_difference),
    )


def verdict_cell(time: str, memory: str = "") -> Cell:
    """Say what holds of time and of memory; what is not comparable has no colour, and neither has a trade."""
    # `time` is an `ortlab.records.verdicts.TimeRatio.verdict` or `FELL_BACK`, `memory` a `memory_verdict` of that
    # module.
    if time == FELL_BACK:
        return Cell(time, Mark.BAD)
    said = [words for words in (time, memory) if words and (words != NO_DIFFERENCE or not memory)]
    good, worse = _GOOD & {*said}, _WORSE & {*said}
    traded = (good and worse) or (memory and time == NOT_COMPARABLE)
    mark = Mark.PLAIN if traded else Mark.GOOD if good else Mark.WARN if worse else Mark.QUIET
    return Cell(", ".join(said), mark)


def reasons(found: Iterable[tuple[str, str]], call: str) -> list[Block]:
    """Say why times are not comparable, each reason once, and the call that would tell."""
    # `found` has names of what was compared, each with its reason, empty where there is none.
    names: dict[str, list[str]] = {}
    for name, reason in found:
        if reason:
            names.setdefault(reason, []).append(name)
    return [
        Note(f"Times are not comparable ({', '.join(who)}): {reason}. To tell: {call}.", Mark.WARN)
        for reason, who in names.items()
    ]


# ---- runs against a baseline ----------------------------------------------------------------------------------------


_NAME = Column("run", meaning="what differs from the baseline; the runs in full are below")
_SHORT_STEP_MS = 2.0


def slow_words(times: float, spent: str = "", name: str = "ONNX Runtime") -> str:
    """Say that ONNX Runtime takes much longer than PyTorch, and what `spent` says that the time goes to."""
    name = f"{name[0].upper()}{name[1:]}"
    where = f"Most of its step goes to {spent}" if spent else "lab.profile() says where a step's time goes"
    return f"{name} takes {times:.2f} times PyTorch's time. {where}."


def slow_notes(comparison: Comparison) -> list[str]:
    """Say which configurations of ONNX Runtime take much longer than PyTorch, and what their time goes to."""
    return [
        slow_words(one.times, comparison.spent.get(one.run.number, ""), one.name) for one in comparison.slow
    ]


def _unsettled(comparison: Comparison) -> list[Block]:
    """Name the runs whose first steps could not be told from the others by their page faults."""
    if not comparison.unsettled:
        return []
    numbers = ", ".join(map(str, comparison.unsettled))
    runs, their = ("runs", "their") if len(comparison.unsettled) > 1 else ("run", "its")
    words = f"Page faults had not settled in {runs} {numbers}: some of {their} time is for memory."
    return [Note(f"{words} More steps, n=20, tell.", Mark.WARN)]


def comparison_page(comparison: Comparison) -> Page:
    """Say what came out in a sentence; then each run beside the baseline: time, step memory, loss."""
    base = comparison.baseline
    columns = (_NAME, TIMES[0], TIME_RATIO, STEP_MEMORY, MEMORY_CHANGE, VERDICT, LOSS_DIFFERENCE)
    rows = [_compared_base(comparison)] + [_compared(contrast) for contrast in comparison.contrasts]
    summary = comparison.summary
    why = ((contrast.name, contrast.time.reason) for contrast in comparison.contrasts)
    unsaid = [(name, reason) for name, reason in why if reason not in summary]
    blocks: list[Block] = [
        Note(summary, Mark.PLAIN),
        Table("", columns, tuple(rows)),
        *(Note(words, Mark.WARN) for words in slow_notes(comparison)),
        *_unsettled(comparison),
        *reasons(unsaid, MEASURE_IN_TURNS),
    ]
    blocks += [Note(f"{name}: not run. {reason}", Mark.BAD) for name, reason in comparison.failed]
    blocks += [
        Note(f"{_name(contrast)}: {'; '.join(contrast.remarks)}.", remark_mark(contrast))
        for contrast in comparison.contrasts
        if contrast.remarks
    ]
    runs = [
        *(comparison.runs or (base,)),
        *(run for contrast in comparison.contrasts for run in contrast.runs),
    ]
    if max(run.step_ms for run in runs) < _SHORT_STEP_MS:
        blocks.append(Note("A step takes less than 2 ms, and much of that is Python's own time.", Mark.WARN))
    blocks += [_how_compared(comparison), sources(runs)]
    blocks.append(
        Folded(
            "The runs in full", blocks=(Table("", LISTED, tuple(listed(run) for run in runs)),), repeats=True
        )
    )
    return Page("Comparison", tuple(blocks))


def _how_compared(comparison: Comparison) -> Note:
    """Say what the ratios and intervals are."""
    against = f"Ratios are against {comparison.name}, {short_name(comparison.baseline)}; below 1 is less."
    if comparison.in_turns:
        rounds = len(comparison.runs)
        how = (
            f"Brackets: 95 % interval over {rounds} rounds in turns, which a drift of the machine meets alike; steps "
            "count from where page faults have settled."
        )
    else:
        how = (
            "Brackets: 95 % bootstrap interval over warm steps of runs made one after another. A verdict is given "
            "where the optimizer's step, the same code in all runs, shows that the machine did not drift."
        )
    return Note(
        f"{against} {how} A difference counts beyond {100 * MARGIN:.0f} % of time, {100 * MEMORY_MARGIN:.0f} % of "
        f'memory; with "no difference" the whole interval lies within {100 * ALIKE:.0f} %.',
        Mark.QUIET,
    )


def _compared_base(comparison: Comparison) -> tuple[Cell, ...]:
    base = comparison.baseline
    name = "baseline" if base.sweep else f"#{base.number}"
    return row(
        Cell(f"{name} ({short_name(base)})", Mark.BAD if base.fell_back else Mark.PLAIN),
        units.duration(comparison.step_ms),
        units.ratio(1.0),
        units.size(comparison.step_memory_bytes),
        "-",
        BASELINE,
        "-",
    )


def _compared(contrast: Contrast) -> tuple[Cell, ...]:
    fallen = any(run.fell_back for run in contrast.runs)
    return row(
        Cell(_name(contrast), Mark.BAD if fallen else Mark.PLAIN),
        units.duration(contrast.step_ms),
        units.ratio_interval(contrast.time_ratio, contrast.time_low, contrast.time_high),
        units.size(contrast.step_memory_bytes),
        units.change(contrast.memory_ratio),
        verdict_cell(contrast.verdict, contrast.memory),
        units.difference(contrast.loss_difference),
    )


def _name(contrast: Contrast) -> str:
    """Name what is compared; what PyTorch executed for ORT says so in capitals."""
    if not any(run.fell_back for run in contrast.runs):
        return contrast.name
    number, _, changed = (
        contrast.name.partition(" ") if contrast.name.startswith("#") else ("", "", contrast.name)
    )
    changed = "" if changed in ("ort", "the same again") else f", {changed}"
    return f"{number} PYTORCH (fallback){changed}".strip()


def remark_mark(one: Contrast | Outcome) -> Mark:
    """Return how a remark on what was compared wants to be read: a fallback is no result."""
    return Mark.BAD if one.fell_back else Mark.WARN
