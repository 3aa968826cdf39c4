"""The search for the largest parts of a model that pass a test: from the top down, into what does not pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A module in the tree of a model.

    Attributes
    ----------
    path
        As `named_modules` gives it; "" for the model.
    weight
        How much it matters: the numbers in its trainable parameters.
    callable
        Whether it is called in a forward, so that it could be wrapped.
    children
        The modules directly in it.
    """

    path: str
    weight: int
    callable: bool
    children: tuple[Part, ...] = ()

    def inside(self) -> Iterator[Part]:
        """Yield it and all that is in it."""
        yield self
        for child in self.children:
            yield from child.inside()


def largest(
    root: Part, passes: Callable[[Part], bool], *, guilty: Callable[[str], bool], least: int
) -> list[Part]:
    """Find the largest parts that pass.

    Parameters
    ----------
    root
        The model, which does not pass.
    passes
        The test; it may be long.
    guilty
        Tells whether a module is known to be a reason why nothing that holds it passes.
    least
        Weight below which a part is not worth a test.

    Returns
    -------
    list of Part
        None lies in another.
    """
    found = []
    for child in root.children:
        if child.weight < least:
            continue
        free = not any(guilty(one.path) for one in child.inside())
        if child.callable and free and passes(child):
            found.append(child)
        else:
            found += largest(child, passes, guilty=guilty, least=least)
    return found


def number_of_tests(root: Part, *, guilty: Callable[[str], bool], least: int) -> int:
    """Return how many tests there are if all of them are passed."""
    tests: list[Part] = []

    def passes(part: Part) -> bool:
        tests.append(part)
        return True

    largest(root, passes, guilty=guilty, least=least)
    return len(tests)
