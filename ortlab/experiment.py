"""What a rerun repeats: a step, how often it runs, and the point it starts from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ortlab.errors import StepError
from ortlab.snapshot import Snapshot, is_stateful

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Experiment:
    """A training step, to be run a number of times from one start.

    Attributes
    ----------
    step
        One training step.
    count
        How many times it runs.
    start
        Weights, optimizers and random state to start from.
    source
        The step's source, as far as it is known.
    """

    step: Callable[[], object]
    count: int
    start: Snapshot
    source: str = ""

    @classmethod
    def begin(
        cls,
        module: torch.nn.Module,
        step: Callable[[], object],
        count: int,
        watch: Iterable[object],
        source: str,
    ) -> Experiment:
        """Make an experiment that starts where everything stands now.

        Raises
        ------
        StepError
            If the step cannot be called, or the count is no whole number from 1 on.
        """
        if not callable(step):
            raise StepError(
                f"A step must be something to call, not a {type(step).__name__}.",
                fix="Pass a function: lab.step(lambda: train(batch), n=20).",
            )
        check_count(count)
        stateful = [thing for thing in (*watch, *mentioned(step)) if is_stateful(thing)]
        return cls(step, count, Snapshot(module, stateful), source)

    def times(self, count: int | None) -> Experiment:
        """Return the same experiment with another number of steps; None leaves it.

        Raises
        ------
        StepError
            If the count is no whole number from 1 on.
        """
        if count is None:
            return self
        check_count(count)
        return replace(self, count=count)


def check_count(count: object) -> None:
    """Refuse what is no number of steps.

    Raises
    ------
    StepError
        If it is no whole number from 1 on.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise StepError(f"The number of steps must be a whole number from 1 on, not {count!r}.")


def mentioned(step: Callable[..., object]) -> list[object]:
    """Return the objects that a function names: in its closure, its globals, and what a method belongs to."""
    owner = getattr(step, "__self__", None)
    function = inspect.unwrap(getattr(step, "__func__", step))
    if not inspect.isfunction(function):
        return [owner]
    variables = inspect.getclosurevars(function)
    return [owner, *variables.nonlocals.values(), *variables.globals.values()]
