"""Replace functions of other packages for good; attributes, context variables and what is garbage while a block runs.

onnxruntime 1.19.2 is the last release of its training module, so its faults are repaired from outside: a
function is replaced by one that calls it. Everything that ortlab replaces goes through :func:`replace`,
which makes each replacement idempotent.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

_done: set[tuple[str, str, str]] = set()


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``make(original)``, unless `make` has been applied there before."""
    # Several replacements of one function nest; the one applied last is called first.
    place = f"{owner.__module__}.{owner.__qualname__}" if inspect.isclass(owner) else owner.__name__
    key = (place, name, f"{make.__module__}.{make.__qualname__}")
    if key in _done:
        return
    original = getattr(owner, name)
    replacement = update_wrapper(make(original), original)
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(replacement) if static else replacement)
    _done.add(key)


@contextmanager
def with_attributes(owner: Any, names: Iterable[str] = (), **values: object) -> Iterator[None]:
    """Give an object other attributes in the block; at its end these, and those in `names`, are as they were."""
    before = {name: getattr(owner, name) for name in (*names, *values)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def set_to(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Let a context variable have a value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Let collections of garbage in the block look at objects of the block only."""
    # Among all objects of a process with transformers one takes a fifth of a second: most of the export of a small
    # model.
    if not _frozen.by_us and not _frozen.by_others:
        _frozen.by_others = gc.get_freeze_count() >= _FROZEN_BY_PYTHON
    freezes = not _frozen.by_us and not _frozen.by_others
    if freezes:
        gc.freeze()
        _frozen.by_us = True
    try:
        yield
    finally:
        if freezes:
            _frozen.by_us = False
            gc.unfreeze()


@dataclass
class _Frozen:
    """Whether a block here, or somebody else, keeps objects frozen: to count them takes as long as a collection."""

    by_us: bool = False
    by_others: bool = False  # whoever has frozen objects keeps them


_frozen: Final = _Frozen()

_FROZEN_BY_PYTHON: Final = 1000
"""Python 3.12 freezes some hundred objects when it starts."""
