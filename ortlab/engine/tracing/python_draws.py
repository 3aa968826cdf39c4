"""Refuse an export whose forward draws random numbers from Python or numpy: the graph would hold the first draw.

No trace sees these generators, so their states are compared. A draw that decides nothing passes, as that of a layer
drop with probability 0, and so do draws of a forward that seeds the generator itself, as BigBird's: both are the same
in every step.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from ortlab.engine.patching import with_attributes
from ortlab.engine.random_state import GENERATORS, put_state, state_of
from ortlab.engine.tracing.baked_in import global_names
from ortlab.engine.tracing.source_lines import (
    ORTLAB,
    TORCH,
    in_words,
    is_model_code,
    model_frame,
    words_of,
)
from ortlab.engine.tracing.traced_values import is_certain_of_uniform
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from ortlab.engine.tracing.reached import Reached


class PythonDraws:
    """What the two runs of one export draw: ORTModule runs a forward once, and then traces it."""

    def __init__(self) -> None:
        self._after_first: Any = None  # the states after the first run; None if it drew nothing

    @contextmanager
    def watched(self, module: torch.nn.Module, reached: Reached) -> Iterator[None]:
        """Watch one run of the forward in the block; raise BuildError where a trace would hold a draw."""
        generators = (random, np.random, *_generators(module, reached))
        before = _states(generators)
        if not torch._C._get_tracing_state():
            yield
            after = _states(generators)
            self._after_first = None if _same(before, after) else after
        elif self._after_first is None:
            yield
            if not _same(before, _states(generators)):
                refuse("")
        else:
            try:
                yield from self._traced(generators)
            finally:
                for generator, state in zip(generators, before, strict=True):
                    put_state(generator, state)

    def _traced(self, generators: tuple[Any, ...]) -> Iterator[None]:
        for generator in generators:  # so that only a forward that seeds it leaves it as its first run did
            generator.random()
        start = _states(generators)
        lines = _Lines(generators)
        try:
            with (
                lines.followed(),
                with_attributes(random, (), **_stand_ins(random)),
                with_attributes(np.random, (), **_stand_ins(np.random)),
            ):
                yield
        except BuildError:
            raise
        except Exception as error:
            if lines.place:  # what is drawn may be more than the stand-ins can be
                refuse(lines.place, error)
            raise
        for at_start, after_first, at_end in zip(start, self._after_first, _states(generators), strict=True):
            if not _same(at_start, at_end) and not _same(after_first, at_end):
                refuse(lines.place)


def refuse(place: str, cause: Exception | None = None) -> NoReturn:
    """Raise BuildError for a draw at a line of the model, which is empty where it is not known."""
    raise BuildError(
        f"A random number that Python or numpy draws cannot be exported{f': {place}' if place else '.'}",
        why="The graph would hold the first draw, and decide in every step as in the first.",
        fix="Draw before the call and hand the draw over as an argument of forward (each value of a flag gets a graph "
        "of its own), draw with torch as a tensor that is not turned into a number (torch.where), set its probability "
        "to 0, or wrap the modules that do not draw: ortlab.wrap(model, only=[...]).",
    ) from cause


def _generators(module: torch.nn.Module, reached: Reached) -> list[Any]:
    """Return the generators that a model or an object that its forward reaches holds, or that its code names."""
    tables = [*(vars(part) for part in module.modules()), *reached.tables]
    values = [value for table in tables for value in table.values()]
    for function in reached.functions:
        values += [function.__globals__.get(name) for name in global_names(function.__code__)]
    # What draws from the system has no state; `Clocks` sees it.
    found = [
        one for one in values if isinstance(one, GENERATORS) and not isinstance(one, random.SystemRandom)
    ]
    return list({id(one): one for one in found}.values())


def _states(generators: tuple[Any, ...]) -> list[Any]:
    return [*map(state_of, generators)]


def _same(one: Any, other: Any) -> bool:
    """Tell whether two states are equal; numpy's hold arrays."""
    if isinstance(one, dict):
        return all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and one and not isinstance(one[0], int):
        return all(map(_same, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


# --- the line that draws ------------------------------------------------------------------------------------------


class _Lines:
    """Finds the line of the model after which a generator is in another state."""

    def __init__(self, generators: tuple[Any, ...]) -> None:
        self.place = ""
        self._generators = generators
        self._before: Any = None
        self._last: tuple[FrameType, int] | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the lines that this thread executes in the block, beside a debugger that does so."""
        before = sys.gettrace()
        self._before = _states(self._generators)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)
            self._look()

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        own = is_model_code(name) and name != random.__file__
        return self._line(frame, event, _) if own and not self.place else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        self._look()
        caller = frame.f_back if event == "return" else frame
        while caller is not None and caller.f_code.co_filename.startswith((TORCH, ORTLAB)):
            caller = caller.f_back
        self._last = None if caller is None else (caller, caller.f_lineno)
        return self._line

    def _look(self) -> None:
        if not self.place and self._last is not None and not _same(self._before, _states(self._generators)):
            frame, line = self._last
            self.place = words_of(frame.f_code.co_filename, line)


# --- draws that decide nothing ------------------------------------------------------------------------------------


class _Drawn:
    """Stands for a number from [0, 1) in a trace: it may only be compared, with a limit that decides alone."""

    def _decide(self, name: str, other: object) -> bool:
        if not is_certain_of_uniform(name, other):
            _refuse_here()
        return bool(getattr(0.5, f"__{name}__")(other))

    def __lt__(self, other: object) -> bool:
        return self._decide("lt", other)

    def __le__(self, other: object) -> bool:
        return self._decide("le", other)

    def __gt__(self, other: object) -> bool:
        return self._decide("gt", other)

    def __ge__(self, other: object) -> bool:
        return self._decide("ge", other)

    def _refuse(self, *_: object) -> NoReturn:
        _refuse_here()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = (
        _refuse
    )
    __float__ = __int__ = __bool__ = __neg__ = __eq__ = __ne__ = __hash__ = __getattr__ = _refuse  # type: ignore[assignment]


def _refuse_here() -> NoReturn:
    frame = model_frame()
    refuse("" if frame is None else in_words(frame))


def _stand_ins(module: Any) -> dict[str, Callable[..., Any]]:
    """Return what stands in for the functions of `random` or `numpy.random` that draw one number from [0, 1)."""
    # Once the forward has seeded the generator, numbers are drawn.
    thread, seeded = threading.get_ident(), False

    def stand_in(original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            one = not kwargs and (not args or (original.__name__ == "uniform" and args == (0, 1)))
            if one and not seeded and threading.get_ident() == thread:
                return _Drawn()
            return original(*args, **kwargs)

        return draw

    def seed(*args: Any, **kwargs: Any) -> None:
        nonlocal seeded
        seeded = seeded or threading.get_ident() == thread
        original_seed(*args, **kwargs)

    original_seed = module.seed
    names = ("random", "uniform", "rand", "random_sample")
    return {"seed": seed} | {name: stand_in(getattr(module, name)) for name in names if hasattr(module, name)}
