"""What a rerun repeats: a step, how often it runs, and the point it starts from."""

from __future__ import annotations

import copy
import inspect
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import StepError
from ortlab.runs.snapshot import Snapshot, is_stateful

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Experiment:
    """A training step, to be run a number of times from one start."""

    step: Callable[[], object]
    count: int
    start: Snapshot
    source: str = ""  # of the step, as far as it is known

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

        Raises StepError where the step cannot be called, or the count is no whole number from 1 on.
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
        """Return the same experiment with another number of steps, which `check_count` checks; None leaves it."""
        if count is None:
            return self
        check_count(count)
        return replace(self, count=count)


def check_count(count: object) -> None:
    """Raise StepError for a number of steps that is no whole number from 1 on."""
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


_CONTAINERS: Final = (list, dict, set, deque)
"""Subclasses are left alone: nobody knows what filling them does."""

_DEEPEST: Final = 3


def iterator_of(step: Callable[..., object]) -> object | None:
    """Return an iterator that a step, or a function that it names, draws from; None if none is found.

    What is drawn from an iterator is gone, so steps that ortlab runs for its own sake must not draw.
    """
    return next((one for one in named_by(step) if hasattr(type(one), "__next__")), None)


@contextmanager
def leaving_no_trace(step: Callable[..., object]) -> Iterator[None]:
    """Let a step run in the block for ortlab's own sake: what it prints, assigns or appends is gone afterwards."""
    cell = getattr(step, "variables_kept", nullcontext)
    with cell(), _containers_kept(step), redirect_stdout(io.StringIO()):
        yield


@contextmanager
def _containers_kept(step: Callable[..., object]) -> Iterator[None]:
    """Put back, after the block, the content of lists, dicts, sets and deques that a step names."""
    held = [one for one in named_by(step) if type(one) in _CONTAINERS]
    before = [copy.copy(one) for one in held]
    try:
        yield
    finally:
        for one, content in zip(held, before, strict=True):
            one.clear()
            (one.update if isinstance(one, (dict, set)) else one.extend)(content)


def named_by(step: Callable[..., object]) -> list[Any]:
    """Return the objects that a step names, and those that the functions among them name, `_DEEPEST` levels deep."""
    named = getattr(step, "objects", None)  # a cell looks for itself
    if callable(named):
        return list(named())
    found: list[Any] = []
    looked = {id(step)}
    layer: list[object] = mentioned(step)
    for _ in range(_DEEPEST):
        found += layer
        functions = [one for one in layer if inspect.isfunction(one) and id(one) not in looked]
        looked |= {id(one) for one in functions}
        layer = [one for function in functions for one in mentioned(function)]
    return list({id(one): one for one in found}.values())
