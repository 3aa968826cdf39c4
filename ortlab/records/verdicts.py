"""Verdicts: what may be said of measured runs, when not, and what a reader must know before believing their numbers.

A verdict on time is given in two cases only. Either the configurations ran in turns, several rounds of them, so that a
drift of the machine meets both sides alike; or the runs were made one after another, and a control shows that the
machine was the same in both. The control is the optimizer's step, which is the same code in every run, and what other
programs took of the processors meanwhile: one on the other core slows down a matrix product and not the optimizer.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ortlab.records.runs import Run, Step

FASTER: Final = "faster"
SLOWER: Final = "slower"
NO_DIFFERENCE: Final = "no difference shown"
UNSTEADY: Final = "too unsteady to tell"
NOT_COMPARABLE: Final = "not comparable"
TOO_FEW: Final = "too few steps to tell"
LESS_MEMORY: Final = "less memory"
MORE_MEMORY: Final = "more memory"
CONFIDENCE: Final = 0.95
RESAMPLES: Final = 2000
MINIMUM_STEPS: Final = 3
"""Warm steps that an interval needs."""

MINIMUM_ROUNDS: Final = 3
"""Rounds in turns that an interval over rounds needs."""

MARGIN: Final = 0.03
"""Share of a step's time by which the whole interval has to lie beyond equal times.

Chosen: between two measurements of the same switches buffers lie elsewhere, and a session was created anew. With it
`bench/verdicts.py` found no verdict in 20 comparisons of equal settings.
"""

ALIKE: Final = 0.1
"""Share of a step's time within which the whole interval has to lie before two times are called alike.

Chosen: an interval from -35 % to 53 % shows no difference, and no likeness either: it is too wide to tell.
"""

_SURE: Final = 0.99
"""Confidence at which equal times have to be excluded, too: a table holds many comparisons."""

MEMORY_MARGIN: Final = 0.02
_MEMORY_NOISE: Final = 1 << 20
"""What the step memory of repeated runs may differ by, as chosen: a share, and bytes that Python takes and gives."""

_DRIFT: Final = 1.1
"""How far the optimizer's step may be from equal, at either end of its interval."""

_OTHERS_DIFFER, _OTHERS_BUSY = 0.1, 0.25
"""Shares of the processors: between the runs, and at most, that other programs may take."""

_SWAPPED_PAGES: Final = 8
"""Pages that a step may have to read from a disk; more of them, and the time is the disk's."""

_FAULTS_ALIKE, _FEW_FAULTS = 1.5, 500
"""Page faults of a step that count as settled: so many times what is usual at the end of the run, and so many more."""


SLOW: Final = 1.3
"""From how many times PyTorch's time on a record says what ONNX Runtime spends it on."""


class Timed:
    """What has a ratio of times, `time`, and shows it under names of its own."""

    time: TimeRatio

    @property
    def time_ratio(self) -> float:
        """Step time over the baseline's, no unit; 0.9 is a tenth less time, nan if the baseline was not measured."""
        return self.time.ratio

    @property
    def time_low(self) -> float:
        """Lower end of the 95 % interval of the ratio; nan with too few steps."""
        return self.time.low

    @property
    def time_high(self) -> float:
        """Upper end of the 95 % interval of the ratio; nan with too few steps."""
        return self.time.high


@dataclass(frozen=True)
class TimeRatio:
    """The step time of a configuration over that of the baseline, and what may be said of it."""

    ratio: float  # 0.9 is a tenth less time
    low: float  # ends of the 95 % interval; nan where there are too few steps or rounds
    high: float
    verdict: str  # a constant of this module, FASTER to TOO_FEW; UNSTEADY: more rounds would tell
    reason: str = ""  # why it is not comparable, one sentence without a full stop
    in_turns: bool = False  # whether the interval is over rounds, not over steps of runs one after another


def settled(run: Run) -> tuple[Step, ...]:
    """Return the warm steps of a run from the one on at which page faults a step have settled."""
    # PyTorch's heap is trimmed in another engine's turn, and its first step then takes up to twice as long. A step
    # counts from where a step asks for as many pages as is usual in the second half of the run; if faults keep falling
    # until the end, the last step is left.
    warm = run.warm_steps
    faults = [step.page_faults for step in warm]
    usual = [count for count in faults[len(faults) // 2 :] if count is not None]
    if not usual or None in faults:
        return warm
    most = _FAULTS_ALIKE * statistics.median(usual) + _FEW_FAULTS
    first = next((at for at, count in enumerate(faults) if count is not None and count <= most), 0)
    return warm[first:]


def never_settled(run: Run) -> bool:
    """Tell whether page faults a step had not settled in the first half of a run of some steps."""
    return len(run.warm_steps) > MINIMUM_STEPS and len(settled(run)) < len(run.warm_steps) / 2


def step_ms(run: Run) -> float:
    """Return the median time of a settled step, in ms."""
    return statistics.median(step.total_ms for step in settled(run))


def compare_times(base: Sequence[Run], runs: Sequence[Run]) -> TimeRatio:
    """Compare the times of a configuration with those of the baseline; each side has one run for each round."""
    # With fewer than three rounds the runs count as made one after another.
    rounds = min(len(base), len(runs))
    if rounds >= MINIMUM_ROUNDS:
        return _in_turns(base[:rounds], runs[:rounds])
    return _one_after_another(base, runs)


def times_of_pytorch(engine: str, base: str, time: TimeRatio) -> float:
    """Return how many times PyTorch's time ONNX Runtime takes, where the two are compared and a verdict is shown."""
    # `time` is of the engine over that of the base. Returns nan where these are no such two, or there is no verdict.
    if (engine, base, time.verdict) in {("ort", "eager", SLOWER), ("ort", "eager", FASTER)}:
        return time.ratio
    if (engine, base, time.verdict) in {("eager", "ort", SLOWER), ("eager", "ort", FASTER)}:
        return 1 / time.ratio
    return math.nan


def memory_verdict(base: int | None, other: int | None) -> str:
    """Say whether step memory is less or more, in bytes; empty where it is the same, or a side has none."""
    if base is None or other is None or abs(other - base) <= max(MEMORY_MARGIN * base, _MEMORY_NOISE):
        return ""
    return LESS_MEMORY if other < base else MORE_MEMORY


def interval(values: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % bootstrap confidence interval of a ratio of medians of times, in any one unit."""
    # Both are nan with fewer than 3 times on a side.
    if min(len(values), len(base)) < MINIMUM_STEPS:
        return math.nan, math.nan
    import numpy as np
    from scipy.stats import bootstrap

    def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(np.median(a, axis=axis) / np.median(b, axis=axis))

    result = bootstrap(
        (np.asarray(values), np.asarray(base)),
        ratio,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        paired=False,
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


# ---- in turns -----------------------------------------------------------------------------------------------------
def _in_turns(base: Sequence[Run], runs: Sequence[Run]) -> TimeRatio:
    """Compare round by round: what the machine does in a round, it does to both sides of a pair."""
    from scipy.stats import t

    logs = [math.log(step_ms(one) / step_ms(other)) for one, other in zip(runs, base, strict=True)]
    middle = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))

    def ends(confidence: float) -> tuple[float, float]:
        reach = error * float(t.ppf((1 + confidence) / 2, len(logs) - 1))
        return math.exp(middle - reach), math.exp(middle + reach)

    low, high = ends(CONFIDENCE)
    reason = _swapping((*base, *runs))
    verdict = NOT_COMPARABLE if reason else _beyond(low, high)
    surely = ends(_SURE)
    if verdict in (FASTER, SLOWER) and surely[0] <= 1.0 <= surely[1]:
        verdict = UNSTEADY
    return TimeRatio(math.exp(middle), low, high, verdict, reason, in_turns=True)


# ---- one after another --------------------------------------------------------------------------------------------
def _one_after_another(base: Sequence[Run], runs: Sequence[Run]) -> TimeRatio:
    one, other = _times(base, "total_ms"), _times(runs, "total_ms")
    ratio = statistics.median(other) / statistics.median(one)
    low, high = interval(other, one)
    if math.isnan(low):
        return TimeRatio(ratio, low, high, TOO_FEW)
    reason = _swapping((*base, *runs)) or _others(base, runs)
    if reason:
        return TimeRatio(ratio, low, high, NOT_COMPARABLE, reason)
    reason, slowest, quickest = _control(base, runs)
    if reason:
        return TimeRatio(ratio, low, high, NOT_COMPARABLE, reason)
    # What the control may have moved is no effect of a switch.
    return TimeRatio(ratio, low, high, _beyond(low / quickest, high / slowest))


def _beyond(low: float, high: float) -> str:
    """Say what an interval shows: as a whole it has to lie beyond the margin, or near equal times."""
    if high < 1 / (1 + MARGIN):
        return FASTER
    if low > 1 + MARGIN:
        return SLOWER
    excluded = (high < 1 or low > 1) and (low < 1 / (1 + MARGIN) or high > 1 + MARGIN)
    alike = low >= 1 / (1 + ALIKE) and high <= 1 + ALIKE
    return NO_DIFFERENCE if alike and not excluded else UNSTEADY


def _times(runs: Sequence[Run], part: str) -> list[float]:
    return [getattr(step, part) for run in runs for step in settled(run)]


def _control(base: Sequence[Run], runs: Sequence[Run]) -> tuple[str, float, float]:
    """Compare the optimizer's steps: return why they are no control, and the interval of their ratio."""
    one, other = _times(base, "optimizer_ms"), _times(runs, "optimizer_ms")
    nothing = (1.0, 1.0)
    if not (min(one) > 0 and min(other) > 0):
        return ("no optimizer's step shows that the machine was as fast in both runs", *nothing)
    if base[0].optimizers != runs[0].optimizers:
        return ("the runs have different optimizers, so that none shows how fast the machine was", *nothing)
    low, high = interval(other, one)
    if low >= 1 / _DRIFT and high <= _DRIFT:
        return ("", low, high)
    before, after = (f"{statistics.median(times):.3g} ms" for times in (one, other))
    moved = "the machine was not as fast in both"
    if low <= 1 <= high:
        moved = "too unsteady to tell how fast the machine was"
    reason = (
        f"the optimizer's step, the same code in both, took {after} in run {runs[0].number} and {before} in run "
        f"{base[0].number}: {moved}"
    )
    return (reason, *nothing)


def _others(base: Sequence[Run], runs: Sequence[Run]) -> str:
    """Say that other programs took the processors in one of two runs on a CPU, if they did."""
    known = [run for run in (*base, *runs) if run.others_cores is not None and run.device == "cpu"]
    taken = [run.others_cores or 0.0 for run in known]
    cores = os.cpu_count() or 1
    if not taken or (
        max(taken) <= _OTHERS_BUSY * cores and max(taken) - min(taken) <= _OTHERS_DIFFER * cores
    ):
        return ""
    most, least = (known[taken.index(chosen(taken))] for chosen in (max, min))
    return (
        f"other programs used {max(taken):.1f} of {cores} cores in run {most.number} and {min(taken):.1f} in run "
        f"{least.number}"
    )


def _swapping(runs: Sequence[Run]) -> str:
    """Say that a run read its memory from a disk, if one did."""
    for run in runs:
        pages = statistics.median(step.swapped_pages or 0 for step in run.warm_steps)
        if pages > _SWAPPED_PAGES:
            return f"run {run.number} read {pages:,.0f} pages a step from disk: the machine swaps"
    return ""


FELL_BACK: Final = "fell back"
"""The verdict on a run that PyTorch executed, in part or as a whole: no result of ONNX Runtime or of a switch."""


def cautions(run: Run, *, repeats: bool = True) -> tuple[str, ...]:
    """Say what must be known of a run, a clause each; usually nothing.

    Without `repeats`, it is not said that the run cannot be repeated.
    """
    found = []
    if run.is_partial:
        found.append(f"is partial: Ctrl-C stopped it after {len(run.steps):,} of {run.planned_steps:,} steps")
    if run.fell_back:
        found.append(
            f"was executed by PyTorch, not ORT{fallen_share(run)}: {run.fallback_reason or 'no reason was recorded'}"
        )
    if run.mode == "evaluation" and any(step.backward_ms for step in run.steps):
        found.append(
            "trained in eval mode: without dropout, and with the running statistics of batch normalisation"
        )
    if run.unkept and repeats:
        found.append(f"cannot be repeated from its start: nothing puts back {'; '.join(run.unkept)}")
    strange = first_strange_loss(run)
    if strange is not None:
        found.append(f"has a loss of {run.losses[strange - 1]} from step {strange} on")
    return tuple(found)


def fallen_share(run: Run) -> str:
    """Say in how many of its steps a run fell back, if not in all: ", in 3 of 10 steps"; else an empty text."""
    fallen, steps = len(run.fallback_steps), len(run.steps)
    return f", in {fallen} of {steps} steps" if fallen < steps else ""


def first_strange_loss(run: Run) -> int | None:
    """Return the number of the first step, from 1 on, whose loss is nan or infinite; None if there is none."""
    for number, loss in enumerate(run.losses, start=1):
        if loss is not None and not math.isfinite(loss):
            return number
    return None
