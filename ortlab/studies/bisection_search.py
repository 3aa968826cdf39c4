"""The search for the smallest sets of changes that show an effect, over a test that answers yes, no or "cannot tell".

What comes out is what delta debugging promises (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing
Input", 2002): a set that shows the effect, and no longer does without any one of its members. It is found by bisection
instead of by subsets and complements: the first changes in some order that show the effect together end with a culprit,
which is then held fast while those before it are bisected. One culprit among n takes log2(n) + 1 tests, each further
one that acts together with it as many again. Nothing has to be monotone: each bisection keeps a set that does not show
the effect, and one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Test = Callable[[frozenset[str]], bool | None]
"""Whether a set of changes shows the effect; None if it cannot be told, as of changes that contradict each other."""


@dataclass(frozen=True)
class Culprits:
    """A smallest set of changes that shows the effect.

    Attributes
    ----------
    names
        The changes, in the order of search.
    together
        Groups of at least two of them that could not be told apart: no set that holds only a part gave an answer.
    """

    names: tuple[str, ...]
    together: tuple[tuple[str, ...], ...] = ()


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
