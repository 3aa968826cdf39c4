"""Runs held against a baseline: time with its interval and a verdict, step memory, loss, and one sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ortlab.errors import LedgerError
from ortlab.options.options import Options, setting_words
from ortlab.records.runs import least_step_memory, names, part_columns
from ortlab.records.verdicts import (
    FASTER,
    FELL_BACK,
    MINIMUM_STEPS,
    NO_DIFFERENCE,
    NOT_COMPARABLE,
    SLOW,
    SLOWER,
    UNSTEADY,
    Timed,
    TimeRatio,
    cautions,
    compare_times,
    memory_verdict,
    never_settled,
    times_of_pytorch,
)
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.records.runs import Run
    from ortlab.studies.sweep import Sweep

MEASURE_IN_TURNS: Final = "lab.compare(rerun=True)"
"""The call that tells what runs made one after another cannot tell."""

_OPTIONS_NAMED: Final = 2


@dataclass(frozen=True)
class Contrast(Timed):
    """One configuration against the baseline."""

    run: Run  #: The run; of several in turns the first
    name: str  #: What differs from the baseline, short: "memory_level=1"
    time: TimeRatio  #: The ratio of the times, with its interval and verdict
    memory_ratio: float | None  #: Step memory over the baseline's, no unit; None where a side has none
    #: Largest relative difference of the losses, step by step, or None where losses are missing.
    loss_difference: float | None
    #: What a reader must know before believing the numbers: other data, other start, fallback, ...
    remarks: tuple[str, ...]
    fell_back: bool  #: Whether PyTorch executed any step of the run or of the baseline that ORT was asked for
    runs: tuple[Run, ...]  #: All its runs, one for each round
    memory: str  #: "less memory" or "more memory"; empty where step memory is the same, or is not known

    @property
    def verdict(self) -> str:
        """Say what may be said of the time; see `ortlab.records.verdicts`. Where a side fell back, nothing else."""
        return FELL_BACK if self.fell_back else self.time.verdict

    @property
    def step_memory_bytes(self) -> int | None:
        """Step memory, in bytes; None where it was not measured."""
        return least_step_memory(self.runs)

    @property
    def step_ms(self) -> float:
        """Median time of a warm step over all its runs, in ms."""
        return _step_ms(self.runs)


@dataclass(frozen=True)
class Slow:
    """A configuration of ONNX Runtime that takes much longer than PyTorch."""

    run: Run  # of several in turns the first
    name: str  # "the baseline", "memory_level=1"
    times: float  # how many times PyTorch's time


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """A baseline and the configurations held against it; `Lab.compare` makes it."""

    baseline: Run  #: The baseline's run; of several in turns the first
    contrasts: tuple[Contrast, ...]  #: The others, in order
    runs: tuple[Run, ...] = ()  #: All runs of the baseline, one for each round
    failed: tuple[tuple[str, str], ...] = ()  #: Name and reason of each configuration that could not be run
    #: By number of a run on ONNX Runtime that takes much longer than PyTorch's: what its time goes to.
    spent: Mapping[int, str] = field(default_factory=dict)

    @property
    def unsettled(self) -> tuple[int, ...]:
        """Numbers of the runs in which page faults a step had not settled, so that memory is a part of their times."""
        every = (*(self.runs or (self.baseline,)), *(run for one in self.contrasts for run in one.runs))
        return tuple(run.number for run in every if never_settled(run))

    @property
    def slow(self) -> tuple[Slow, ...]:
        """Each configuration of ONNX Runtime that takes more than 1.3 times PyTorch's time, the worst first."""
        found = []
        for one in self.contrasts:
            times = times_of_pytorch(one.run.engine, self.baseline.engine, one.time)
            if times > SLOW and not one.fell_back:
                ours = one.run if one.run.engine == "ort" else self.baseline
                found.append(Slow(ours, self.name if ours is self.baseline else one.name, times))
        return tuple(sorted(found, key=lambda one: -one.times))

    @property
    def in_turns(self) -> bool:
        """Whether the configurations ran in turns, in several rounds."""
        return any(contrast.time.in_turns for contrast in self.contrasts)

    @property
    def name(self) -> str:
        """What the baseline is called: "the baseline", or "run 1"."""
        return "the baseline" if self.baseline.sweep else f"run {self.baseline.number}"

    @property
    def step_memory_bytes(self) -> int | None:
        """Step memory of the baseline, in bytes; None where it was not measured."""
        return least_step_memory(self.runs or (self.baseline,))

    @property
    def step_ms(self) -> float:
        """Median time of a warm step of the baseline, over all its runs, in ms."""
        return _step_ms(self.runs or (self.baseline,))

    @property
    def summary(self) -> str:
        """What came out, in a sentence or two that can be quoted; of many configurations, the best two."""
        return " ".join(_sentence(contrast, self.name) for contrast in self._leading())

    def table(self) -> pd.DataFrame:
        """One row per configuration, the baseline first; ratios are against the baseline."""
        import pandas as pd

        rows: list[dict[str, object]] = [_row(self, None)]
        rows += [_row(self, contrast) for contrast in self.contrasts]
        return pd.DataFrame(rows)

    def _leading(self) -> list[Contrast]:
        """Return the contrasts that the summary is of: all of two, or the one of least memory and the fastest."""
        if len(self.contrasts) <= 2:  # noqa: PLR2004 - as many as a reader takes in
            return list(self.contrasts)
        valid = [one for one in self.contrasts if not one.fell_back] or list(self.contrasts)
        smallest = min(valid, key=lambda one: math.inf if one.memory_ratio is None else one.memory_ratio)
        told = [one for one in valid if one.verdict in (FASTER, SLOWER, NO_DIFFERENCE)] or valid
        fastest = min(told, key=lambda one: one.time_ratio)
        return [smallest] if smallest is fastest else [smallest, fastest]


def compare(runs: Sequence[Run], baseline: Run | None = None) -> Comparison:
    """Hold runs that were made one after another against a baseline (the first one if none is named).

    Raises
    ------
    LedgerError
        If there is nothing to compare.
    """
    if not runs:
        raise LedgerError("There is no run to compare.", fix="Run a step first: %%ort_step, or lab.step(fn).")
    base = baseline if baseline is not None else runs[0]
    others = [run for run in runs if run is not base]
    if not others:
        raise LedgerError(
            "There is only one run, so there is nothing to compare it with.",
            fix="Name what to compare it with, and both are run in turns: lab.compare(memory_level=1), "
            "lab.compare(engine='eager').",
        )
    return Comparison(
        base,
        tuple(_contrast((base,), (run,), f"#{run.number} {difference(base, run)}") for run in others),
        (base,),
    )


def compare_in_turns(sweep: Sweep) -> Comparison:
    """Hold the points of a sweep against its baseline."""
    base, others = sweep.baseline, [point for point in sweep.points if point is not sweep.baseline]
    failed = tuple(
        (sweep.name(point), point.failure or point.skipped) for point in others if not point.measured
    )
    if not base.measured or len(failed) == len(others):
        name, why = ("the baseline", base.failure) if not base.measured else failed[0]
        raise LedgerError(
            f"There is nothing to compare: {name} could not be run.",
            why=why,
            fix="Correct that, or compare something else; lab.sweeps[-1] has what was run.",
        )
    return Comparison(
        base.runs[0],
        tuple(
            _contrast(base.runs, point.runs, difference(base.runs[0], point.runs[0]))
            for point in others
            if point.measured
        ),
        base.runs,
        failed,
    )


def difference(base: Run, run: Run) -> str:
    """Name a run by what differs from another: "eager", "memory_level=1", "3 recompute plans"; short."""
    if run.engine != "ort":
        return run.engine if run.engine != base.engine else f"{run.engine} again"
    other = base.options if base.engine == "ort" else Options()
    # A level takes the place of the baseline's plans, which need not be said.
    changed = [
        name for name in other.changed(run.options) if name != "memory_plan" or not run.options.memory_level
    ]
    named = ", ".join(_settings(run, changed))
    if base.engine != "ort":
        return ", ".join(filter(None, ("ort", named)))
    return named or "the same again"


def short_name(run: Run) -> str:
    """Name a baseline by what differs from the default switches: "ort", "ort, memory_level=1", "eager"."""
    if run.engine != "ort":
        return run.engine
    return ", ".join(["ort", *_settings(run, Options().changed(run.options))])


def loss_difference(base: Run, run: Run) -> float | None:
    """Return the largest relative difference of the losses, step by step; None where no step has both."""
    return largest_difference(zip(base.losses, run.losses, strict=False))


def largest_difference(losses: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Return the largest relative difference of two losses of a step; None where no step has both."""
    # Losses that are both nan, or both infinite with one sign, are equal; one of them alone is infinitely far.
    return max((_apart(a, b) for a, b in losses if a is not None and b is not None), default=None)


def same_losses(one: Run, other: Run) -> bool:
    """Tell whether two runs have the same losses, step by step; a loss that is nan is the same as another."""
    return len(one.losses) == len(other.losses) and all(
        a == b or (a is not None and b is not None and _apart(a, b) == 0.0)
        for a, b in zip(one.losses, other.losses, strict=True)
    )


def remarks(base: Run, run: Run) -> list[str]:
    """Say what a reader must know before believing a comparison of two runs; usually nothing."""
    # An iterator that the batches come from is what the other data are said for, below.
    same_data = run.data_digest == base.data_digest
    found = [
        f"run {one.number} {caution}" for one in (base, run) for caution in cautions(one, repeats=same_data)
    ]
    found += [
        f"run {one.number} did not call the wrapped part {names(one.coverage.uncalled)}"
        for one in (base, run)
        if one.coverage.called and one.coverage.uncalled
    ]
    if run.start_digest != base.start_digest:
        found.append("other start: weights, optimizer or random state differ")
    if run.mode != base.mode:
        found.append(f"other mode: {run.mode} and {base.mode}")
    if len(run.steps) != len(base.steps):
        found.append(f"other number of steps: {len(run.steps)} and {len(base.steps)}")
    elif not same_data:  # of another number of steps, the data are never the same
        found.append("other data: the model did not see the same inputs")
    if run.device != base.device:
        found.append(f"other device: {run.device} and {base.device}")
    return found


# ---- parts --------------------------------------------------------------------------------------------------------


def _contrast(base: Sequence[Run], runs: Sequence[Run], name: str) -> Contrast:
    before, after = least_step_memory(base), least_step_memory(runs)
    fell_back = any(run.fell_back for run in (*base, *runs))
    if base[0].device != runs[0].device:  # what an allocator hands out is no resident set
        after = None
    return Contrast(
        runs[0],
        name,
        compare_times(base, runs),
        after / before if before and after is not None and not fell_back else None,
        loss_difference(base[0], runs[0]),
        tuple(dict.fromkeys(remark for run in runs for remark in remarks(base[0], run))),
        fell_back,
        tuple(runs),
        "" if fell_back else memory_verdict(before, after),
    )


def _step_ms(runs: Sequence[Run]) -> float:
    return statistics.median(step.total_ms for run in runs for step in run.warm_steps)


def _apart(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def _settings(run: Run, names: Sequence[str]) -> list[str]:
    """Name the first of the switches `names` with their values in a run, and how many more there are."""
    words = [setting_words(name, getattr(run.options, name)) for name in names[:_OPTIONS_NAMED]]
    more = len(names) - _OPTIONS_NAMED
    return [*words, f"{more} more"] if more > 0 else words


def _sentence(contrast: Contrast, baseline: str) -> str:
    """Say what a configuration needs against the baseline, as one would quote it."""
    name = contrast.name
    if name.startswith("#"):
        number, _, changed = name[1:].partition(" ")
        name = f"Run {number} ({changed})"
    name = f"T{name[1:]}" if name.startswith("the ") else name
    if contrast.fell_back:
        return f"{name} and {baseline} cannot be compared: PyTorch executed steps that ONNX Runtime was asked for."
    needs, same = [], ""
    if contrast.memory and contrast.memory_ratio is not None:
        needs.append(f"{_change(contrast.memory_ratio)} step memory")
    elif contrast.memory_ratio is not None:
        same = "the same step memory"
    if contrast.verdict in (FASTER, SLOWER):
        needs.append(f"{_change(contrast.time_ratio)} time ({_interval(contrast)})")
        same = same and f" It needs {same}."
        return f"{name} needs {' and '.join(needs)} than {baseline}.{same}"
    memory = f"needs {needs[0]} than {baseline}" if needs else same and f"needs {same} as {baseline}"
    if contrast.verdict == NO_DIFFERENCE:
        shown = f"shows no difference in time{'' if memory else f' from {baseline}'} ({_interval(contrast)})"
        return f"{name} {' and '.join(filter(None, (memory, shown)))}."
    if contrast.verdict == UNSTEADY:
        shown = (
            "is too unsteady in time to tell"
            if contrast.time_low <= 1 <= contrast.time_high
            else f"takes {'more' if contrast.time_ratio > 1 else 'less'} time, it seems, too unsteadily to tell"
        )
        rounds = "; more rounds would show it" if contrast.time.in_turns else ""
        return f"{name} {' and '.join(filter(None, (memory, shown)))} ({_interval(contrast)}{rounds})."
    why = f"there are fewer than {MINIMUM_STEPS} warm steps"
    turn = "Take more steps: n=20."
    if contrast.verdict == NOT_COMPARABLE:
        why, turn = contrast.time.reason, f"Run them in turns: {MEASURE_IN_TURNS}."
    if memory:
        return f"{name} {memory}. The times are not comparable: {why}. {turn}"
    return f"The times of {name} and {baseline} are not comparable: {why}. {turn}"


def _change(ratio: float) -> str:
    """Write a ratio as a change: "21 % more", "58 % less"; ten times and more as "11 times more"."""
    if ratio >= 10:  # noqa: PLR2004
        return f"{ratio - 1:.0f} times more"
    return f"{_percent(abs(ratio - 1))} {'less' if ratio < 1 else 'more'}"


def _interval(contrast: Contrast) -> str:
    ends = [contrast.time_low - 1, contrast.time_high - 1]
    if ends[1] < 0:  # "18 % less time (95 % interval 15 % to 21 %)"
        ends = [-ends[1], -ends[0]]
    low, high = map(_percent, ends)
    return f"95 % interval {low} to {high}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _fallen_words(runs: Sequence[Run]) -> str:
    return " (PyTorch, fallback)" if any(run.fell_back for run in runs) else ""


def _row(comparison: Comparison, contrast: Contrast | None) -> dict[str, object]:
    side: Comparison | Contrast = contrast or comparison
    runs = contrast.runs if contrast else comparison.runs or (comparison.baseline,)
    warm = [step for run in runs for step in run.warm_steps]
    ratio = contrast.memory_ratio if contrast else 1.0
    return {
        "run": (contrast.name if contrast else comparison.name) + _fallen_words(runs),
        "title": runs[0].title,
        "step [ms]": side.step_ms,
        **part_columns(warm, side.step_ms),
        "time ratio": contrast.time_ratio if contrast else 1.0,
        "low": contrast.time_low if contrast else 1.0,
        "high": contrast.time_high if contrast else 1.0,
        "verdict": contrast.verdict if contrast else "baseline",
        "step memory [bytes]": side.step_memory_bytes,
        "memory difference": None if ratio is None else ratio - 1,
        "memory verdict": contrast.memory if contrast else "",
        "last loss": runs[-1].losses[-1],
        "loss difference": contrast.loss_difference if contrast else 0.0,
        "runs": tuple(run.number for run in runs),
        "why not comparable": contrast.time.reason if contrast else "",
        "remarks": "; ".join(contrast.remarks) if contrast else "",
    }
