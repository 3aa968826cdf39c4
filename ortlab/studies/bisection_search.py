"""The search for the switches responsible: which sets of changes run, what each is measured by, what that leaves.

What comes out is what delta debugging promises (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing
Input", 2002): a set that shows the effect, and no longer does without any one of its members. It is found by bisection
instead of by subsets and complements: the first changes in some order that show the effect together end with a culprit,
which is then held fast while those before it are bisected. One culprit among n takes log2(n) + 1 tests, each further
one that acts together with it as many again. Nothing has to be monotone: each bisection keeps a set that does not show
the effect, and one that does.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from ortlab.analyses.memory import memory
from ortlab.engine.diagnosis import reason
from ortlab.errors import OptionError, StepError
from ortlab.options.configuration import Configuration
from ortlab.options.options import Options, check_needs
from ortlab.records.comparison import loss_difference
from ortlab.records.verdicts import FELL_BACK
from ortlab.runs.experiment import Snapshot
from ortlab.studies.bisection import (
    FLOORS,
    LOSS,
    NO_CHANGE,
    NOT_COMPARABLE,
    PARITY,
    PEAK_BYTES,
    RESPONSIBLE,
    STEP_MS,
    TOO_NOISY,
    Culprits,
    Metric,
    Trial,
    ratio_of_pairs,
)
from ortlab.studies.sweep import same_work

if TYPE_CHECKING:
    from collections.abc import Collection

    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment
    from ortlab.runs.progress import Task
    from ortlab.studies.bisection import Bisection, Own

Test = Callable[[frozenset[str]], bool | None]
"""Whether a set of changes shows the effect; None if it cannot be told, as of changes that contradict each other."""


def smallest_sets(changes: Sequence[str], test: Test, *, most: int = 3) -> tuple[Culprits, ...]:
    """Return at most `most` smallest sets of changes; each shows the effect, as far as the rest still shows it."""
    # The changes are in the order of bisection; together they show the effect, and none of them does not. The test is
    # asked at most once for each set.
    found: list[Culprits] = []
    rest = list(changes)
    while rest and len(found) < most and (not found or test(frozenset(rest))):
        one = smallest_set(rest, test)
        found.append(one)
        rest = [name for name in rest if name not in one.names]
    return tuple(found)


def smallest_set(changes: Sequence[str], test: Test) -> Culprits:
    """Return a set of changes that shows the effect, and does not without any one member (or group)."""
    held: list[tuple[str, ...]] = []
    before = list(changes)
    # All together show it, also where noise hides from the test that they do.
    while before and not _shows(test, held):
        low, high = _bisect(before, held, test)
        held.insert(0, tuple(before[low:high]))
        before = before[:low]
    held = _without_idle(held, test)
    names = tuple(name for group in held for name in group)
    return Culprits(names, tuple(group for group in held if len(group) > 1))


def _bisect(before: Sequence[str], held: Sequence[tuple[str, ...]], test: Test) -> tuple[int, int]:
    """Return how many of the first changes do not show the effect, and how many do, as near together as can be told."""
    low, high = 0, len(before)
    untold: set[int] = set()
    while (middle := _middle(low, high, untold)) is not None:
        answer = _answer(test, before[:middle], held)
        if answer is None:
            untold.add(middle)
        elif answer:
            high = middle
        else:
            low = middle
    return low, high


def _middle(low: int, high: int, untold: Iterable[int]) -> int | None:
    """Return the number nearest to the middle that has not been tried in vain; None if there is none left."""
    left = set(range(low + 1, high)) - set(untold)
    return min(left, key=lambda one: (abs(2 * one - low - high), one), default=None)


def _without_idle(held: list[tuple[str, ...]], test: Test) -> list[tuple[str, ...]]:
    """Leave out, one by one, what is not needed: where a test is not monotone, bisection may have kept it."""
    place = 0
    while place < len(held) and len(held) > 1:
        fewer = held[:place] + held[place + 1 :]
        if _shows(test, fewer):
            held, place = fewer, 0
        else:
            place += 1
    return held


def _shows(test: Test, held: Sequence[tuple[str, ...]]) -> bool:
    return bool(held) and _answer(test, (), held) is True


def _answer(test: Test, some: Sequence[str], held: Sequence[tuple[str, ...]]) -> bool | None:
    return test(frozenset([*some, *(name for group in held for name in group)]))


_SEEDS: Final = 2
"""Other seeds that the baseline runs with, to see what random numbers do to its losses."""

_MORE: Final = 3
"""Times the rounds that a time may take until it can be told."""


class Investigation:
    """Fills in a bisection, each trial from one start; trials that it has are not run again."""

    def __init__(
        self, bench: Bench, experiment: Experiment, bisection: Bisection, metric: Metric, bar: Task
    ) -> None:
        self._bench = bench
        self._experiment = experiment
        self._bisection = bisection
        self._metric = metric
        self._bar = bar
        self._reference = Reference(bench.module)
        self._untried: set[frozenset[str]] = set()

    def find(self) -> None:
        """Run the needed trials and write down what came out; raises StepError if the step fails either way."""
        bisection = self._bisection
        base, whole = self._trial(frozenset()), self._trial(frozenset(bisection.changes))
        if base.failure and whole.failure:
            raise StepError(
                "The step fails with these switches and without them, so none of them is responsible.",
                why=base.failure,
                fix="Let it run once first: lab.set(engine='eager').rerun().",
            )
        if not base.failure and not whole.failure:
            if self._is_repeated and not bisection.repeats:
                bisection.repeats.append(self._taken(()))
            assert base.value is not None  # noqa: S101 - it did not fail
            changed = self._metric.is_change(whole, base.value, bisection.floor)
            if changed is not True:
                bisection.outcome = TOO_NOISY if changed is None else NO_CHANGE
                return
            if self._is_within_what_is_drawn(whole, base):
                bisection.outcome = NOT_COMPARABLE
                return
        bisection.culprits = smallest_sets(tuple(bisection.changes), self._ask)
        bisection.outcome = RESPONSIBLE

    def _is_within_what_is_drawn(self, whole: Trial, base: Trial) -> bool:
        """Say whether other random numbers, such as dropout's masks, change the losses as much as the switches do."""
        bisection = self._bisection
        if self._metric.name != LOSS or self._metric.own is not None or not base.runs:
            return False
        if bisection.drawn is None:
            bisection.drawn = 0.0
            for seed in range(1, _SEEDS + 1):
                self._tell(())
                bisection.runs += 1
                run = self._run(self._configuration(()), seed)
                if run.data_digest != base.runs[0].data_digest:
                    break  # the batches are drawn, too: losses of others tell nothing about masks
                bisection.drawn = max(bisection.drawn, loss_difference(base.runs[0], run) or 0.0)
        assert whole.value is not None  # noqa: S101 - it did not fail
        return whole.value <= FLOORS * bisection.drawn

    @property
    def _is_repeated(self) -> bool:
        """Whether a second run of the baseline tells what equal runs differ by; pairs have an interval instead."""
        return self._metric.name != STEP_MS or self._metric.own is not None

    def _ask(self, names: frozenset[str]) -> bool | None:
        if names in self._untried:
            return None
        if self._bisection.trial(names) is None and self._refused(names):
            self._untried.add(names)
            return None
        return self._bisection.shows(self._trial(names), self._metric)

    def _refused(self, names: frozenset[str]) -> bool:
        """Say whether a set of changes contradicts itself, or cannot act here."""
        try:
            check_needs(self._options(names), self._bench.have)
        except OptionError:
            return True
        return False

    def _options(self, names: Collection[str]) -> Options:
        # Not `Options.replace`: a switch below one that is off does nothing, and is then as good as the baseline.
        changes = {name: value for name, value in self._bisection.changes.items() if name in names}
        return dataclasses.replace(self._bisection.against, **changes)  # type: ignore[arg-type]

    def _configuration(self, names: Collection[str]) -> Configuration:
        return Configuration("ort", self._options(names))

    def _trial(self, names: frozenset[str]) -> Trial:
        """Return the trial of a set, run now unless it, or one that does the same, was run before."""
        bisection = self._bisection
        known = bisection.trial(names)
        if known is not None:
            return known
        ordered = tuple(name for name in bisection.changes if name in names)
        wished = self._configuration(names)
        twin = next(
            (one for one in bisection.trials if same_work(self._configuration(one.names), wished)), None
        )
        made = replace(twin, names=ordered, runs=()) if twin is not None else self._taken(ordered)
        bisection.trials.append(made)
        return made

    def _taken(self, names: tuple[str, ...]) -> Trial:
        self._tell(names)
        try:
            made = self._measured(names)
        except Exception as error:  # noqa: BLE001 - whatever a step raises is a result of the switches
            words = reason(error)
            kind = type(error).__name__
            return Trial(names, failure=words if words.startswith(kind) else f"{kind}: {words}")
        # An error in the user's function is no result of the switches.
        own = self._metric.own
        return (
            made if own is None or made.failure else replace(made, value=self._own_value(own, made.runs[0]))
        )

    def _tell(self, names: tuple[str, ...]) -> None:
        """Show which changes run next."""
        # How many trials there will be is known only for a single culprit.
        bisection, done = self._bisection, len(self._bisection.trials)
        expected = math.ceil(math.log2(len(bisection.changes) + 1)) + 4
        if not names:
            what = "the baseline"
        elif len(names) == len(bisection.changes):
            what = "all changes"
        else:
            of_all = f"{len(names)} of {len(bisection.changes)} changes"
            what = bisection.words(names[0]) if len(names) == 1 else of_all
        self._bar.report(f"Trial {done + 1}: {what}", done / max(expected, done + 2))

    def _run(self, tried: Configuration, seed: int = 0) -> Run:
        """Go back to the start and run the steps; with a seed from 1 on, the model draws other random numbers."""
        bench, experiment = self._bench, self._experiment
        bench.configure(tried)
        experiment.start.put_back()
        if seed:
            torch.manual_seed(torch.initial_seed() + seed)
            experiment = replace(experiment, start=Snapshot(bench.module, experiment.start.stateful))
        return bench.run_apart(experiment)

    def _measured(self, names: tuple[str, ...]) -> Trial:
        metric, wished, base = self._metric, self._configuration(names), self._bisection.baseline
        kind = "" if metric.own is not None else metric.name
        if kind == STEP_MS:
            return self._timed(names)
        self._bisection.runs += 1
        if kind == PEAK_BYTES:
            self._bench.configure(wished)
            peak = float(memory(self._bench).peak_bytes)
            first = peak if base is None or base.amount is None else base.amount
            return Trial(names, peak / first, amount=peak)
        if kind == PARITY and not self._reference.known:
            self._reference.take(self._run(replace(wished, engine="eager")))
        run, value = self._run(wished), 0.0
        if fallen := _fallen(names, run):
            return fallen
        if kind == PARITY:
            value = self._reference.distance(run)
        elif kind == LOSS and base is not None and base.runs:
            apart = loss_difference(base.runs[0], run)
            if apart is None:
                raise StepError("The step reports no loss.", fix="Let it return the loss.")
            value = apart
        return Trial(names, value, runs=(run,))

    def _own_value(self, own: Own, run: Run) -> float:
        """Ask the user's function."""
        name = self._metric.name
        fix = "It takes a run and returns a number: lambda run: run.losses[-1]."
        try:
            found = own(run)
        except Exception as error:
            what = f"The metric {name} failed: {type(error).__name__}: {error}"
            raise OptionError(what, fix=fix) from error
        try:
            return float(found)
        except (TypeError, ValueError):
            raise OptionError(f"The metric {name} returned {found!r}.", fix=fix) from None

    def _timed(self, names: tuple[str, ...]) -> Trial:
        """Run pairs of the baseline and a set of changes, more of them while the noise hides the answer."""
        bisection = self._bisection
        base, wished = self._configuration(()), self._configuration(names)
        if not names:
            return self._first_timed(base)
        runs: list[Run] = []
        befores: list[float] = []
        trial = Trial(names)
        for number in range(_MORE * bisection.rounds):
            pair = {}
            for is_base in (True, False) if number % 2 == 0 else (False, True):
                bisection.runs += 1
                pair[is_base] = run = self._run(base if is_base else wished)
                if fallen := _fallen(names, run):
                    return fallen
            runs.append(pair[False])
            befores.append(pair[True].step_ms)
            if (number + 1) % bisection.rounds:
                continue
            ratio, low, high = ratio_of_pairs([run.step_ms for run in runs], befores)
            trial = Trial(
                names, ratio, low, high, statistics.median(run.step_ms for run in runs), runs=tuple(runs)
            )
            if self._can_be_told(trial):
                break
        return trial

    def _first_timed(self, base: Configuration) -> Trial:
        self._bisection.runs += 1
        run = self._run(base)
        return _fallen((), run) or Trial((), 1.0, 1.0, 1.0, run.step_ms, runs=(run,))

    def _can_be_told(self, trial: Trial) -> bool:
        bisection, assumed = self._bisection, 1.0
        if bisection.whole is None:
            return self._metric.is_change(trial, assumed, 0.0) is not None
        return bisection.shows(trial, self._metric) is not None


def _fallen(names: tuple[str, ...], run: Run) -> Trial | None:
    if not run.fell_back:
        return None
    words = run.fallback_reason or "no reason was recorded"
    return Trial(names, failure=f"{FELL_BACK}: {words}", runs=(run,))


class Reference:
    """What PyTorch made of the steps: its run, and the parameters that the run left in the module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._run: Run | None = None
        self._parameters: list[torch.Tensor] = []

    @property
    def known(self) -> bool:
        """Whether PyTorch has run the steps."""
        return self._run is not None

    def take(self, run: Run) -> None:
        """Keep what PyTorch's run has just left behind."""
        self._run = run
        self._parameters = [one.detach().clone() for one in self._module.parameters()]

    def distance(self, run: Run) -> float:
        """Return how far a run's losses, and the parameters that it has just left behind, are from PyTorch's."""
        # It is the largest relative difference: of a loss against itself, of a parameter against its largest entry.
        # Infinite where one of the two is no number.
        assert self._run is not None  # noqa: S101 - the caller takes it first
        largest = loss_difference(self._run, run) or 0.0
        for ours, theirs in zip(self._module.parameters(), self._parameters, strict=True):
            largest = max(largest, _apart(ours.detach(), theirs))
        return largest


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference over the largest finite number of `theirs`; nan beside nan is no difference."""
    if not theirs.numel() or torch.equal(ours, theirs):
        return 0.0
    difference = (ours.double() - theirs.double()).abs()
    alike = (ours == theirs) | (ours.isnan() & theirs.isnan())
    largest = float(torch.where(alike, 0.0, difference).max())
    finite = torch.where(theirs.isfinite(), theirs.double().abs(), 0.0)
    found = largest / max(float(finite.max()), 1e-12)
    return math.inf if math.isnan(found) else found
