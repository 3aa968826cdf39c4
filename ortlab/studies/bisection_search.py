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
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ortlab.engine.exhaustion import reason
from ortlab.errors import OptionError, StepError
from ortlab.options.configuration import Configuration
from ortlab.options.options import Options, check_needs
from ortlab.records.cautions import FELL_BACK
from ortlab.records.comparison import loss_difference
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

    from ortlab.options.options import Need
    from ortlab.records.runs import Run
    from ortlab.studies.bisection import Bisection

Test = Callable[[frozenset[str]], bool | None]
"""Whether a set of changes shows the effect; None if it cannot be told, as of changes that contradict each other."""


def smallest_sets(changes: Sequence[str], test: Test, *, most: int = 3) -> tuple[Culprits, ...]:
    """Return smallest sets of changes, each of which shows the effect by itself, as far as the rest still shows it.

    Parameters
    ----------
    changes
        All of them, in the order of bisection; together they show the effect, and none of them does not.
    test
        Asked at most once for each set.
    most
        How many sets are looked for at most.
    """
    found: list[Culprits] = []
    rest = list(changes)
    while rest and len(found) < most and (not found or test(frozenset(rest))):
        one = smallest_set(rest, test)
        found.append(one)
        rest = [name for name in rest if name not in one.names]
    return tuple(found)


def smallest_set(changes: Sequence[str], test: Test) -> Culprits:
    """Return a set of changes that shows the effect, and does not without any one member (or group).

    Parameters
    ----------
    changes
        Changes that show the effect together.
    test
        Tells of each set whether it shows the effect.
    """
    held: list[tuple[str, ...]] = []
    before = list(changes)
    while not _shows(test, held):
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


@dataclass(frozen=True)
class Access:
    """What a bisection does with the lab; each call goes back to the start and runs the steps with a configuration."""

    run: Callable[[Configuration], Run]
    distance: Callable[[Configuration], tuple[Run, float]]  # of losses and updated weights from PyTorch's
    peak: Callable[[Configuration], float]  # of a step, in bytes
    redrawn: Callable[[Configuration, int], Run]  # with another seed: the number is added to it
    have: Collection[Need]  # see `ortlab.engine.installation.have`


class _OwnError(Exception):
    """Carries an error in the user's function past what catches errors of a step."""

    def __init__(self, error: OptionError) -> None:
        super().__init__(str(error))
        self.error = error


class Investigation:
    """Fills in a bisection; trials that it has are not run again. `tell` is told which changes run next."""

    def __init__(
        self, bisection: Bisection, metric: Metric, access: Access, tell: Callable[[tuple[str, ...]], None]
    ) -> None:
        self._bisection = bisection
        self._metric = metric
        self._access = access
        self._tell = tell
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
                run = self._access.redrawn(self._configuration(()), seed)
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
            check_needs(self._options(names), self._access.have)
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
            return self._measured(names)
        except _OwnError as fault:
            raise fault.error from fault.error.__cause__
        except Exception as error:  # noqa: BLE001 - whatever a step raises is a result of the switches
            words = reason(error)
            kind = type(error).__name__
            return Trial(names, failure=words if words.startswith(kind) else f"{kind}: {words}")

    def _measured(self, names: tuple[str, ...]) -> Trial:
        metric, wished = self._metric, self._configuration(names)
        if metric.own is None and metric.name == STEP_MS:
            return self._timed(names)
        if metric.own is None and metric.name == PEAK_BYTES:
            self._bisection.runs += 1
            peak = self._access.peak(wished)
            base = self._bisection.baseline
            first = peak if base is None or base.amount is None else base.amount
            return Trial(names, peak / first, amount=peak)
        self._bisection.runs += 1
        if metric.own is None and metric.name == PARITY:
            run, value = self._access.distance(wished)
        else:
            run, value = self._access.run(wished), 0.0
        fallen = _fallen(names, run)
        if fallen is not None:
            return fallen
        base = self._bisection.baseline
        if metric.own is not None:
            value = self._own_value(run)
        elif metric.name == LOSS and base is not None and base.runs:
            apart = loss_difference(base.runs[0], run)
            if apart is None:
                raise StepError("The step reports no loss.", fix="Let it return the loss.")
            value = apart
        return Trial(names, value, runs=(run,))

    def _own_value(self, run: Run) -> float:
        """Ask the user's function; raises _OwnError where that fails, which is no result of the switches."""
        own, name = self._metric.own, self._metric.name
        assert own is not None  # noqa: S101 - the caller has looked
        fix = "It takes a run and returns a number: lambda run: run.losses[-1]."
        try:
            found = own(run)
        except Exception as error:
            what = f"The metric {name} failed: {type(error).__name__}: {error}"
            raise _OwnError(OptionError(what, fix=fix)) from error
        try:
            return float(found)
        except (TypeError, ValueError):
            raise _OwnError(OptionError(f"The metric {name} returned {found!r}.", fix=fix)) from None

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
                pair[is_base] = run = self._access.run(base if is_base else wished)
                fallen = _fallen(names, run)
                if fallen is not None:
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
        run = self._access.run(base)
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
