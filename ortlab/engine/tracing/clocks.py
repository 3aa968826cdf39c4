"""Refuse an export in which a time or a draw of the system decides: the graph would hold the first.

A forward may read a clock for its log. The seconds that it reads in a trace say where they come from: they may be
computed with, kept and printed, and a message names the line; a tensor or a branch that takes them is refused. Of dates
there is the message alone. What the system draws (`os.urandom`, `secrets`, generators without a seed) is refused at
once.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import threading
import time
import timeit
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import torch

from ortlab.engine.patching import with_attributes
from ortlab.engine.tracing.baked_in import global_names, names_in
from ortlab.engine.tracing.python_draws import refuse
from ortlab.engine.tracing.source_lines import in_words, words_of
from ortlab.engine.tracing.traced_values import flat
from ortlab.errors import BuildError, is_users

if TYPE_CHECKING:
    from ortlab.engine.tracing.reached import Reached

# --- what comes from a clock --------------------------------------------------------------------------------------


class Moment(float):
    """A time in seconds, or what is computed from one."""

    __slots__ = ()


class Count(int):
    """A time in whole numbers."""

    __slots__ = ()


_COMPUTING: Final = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow
    neg pos abs round floor ceil trunc""".split()  # noqa: SIM905
_DECIDING: Final = "lt le gt ge eq ne bool".split()  # noqa: SIM905


def _followed(value: Any) -> Any:
    """Return a number that says that it comes from a clock; everything else as it is."""
    if type(value) is float:
        return Moment(value)
    return Count(value) if type(value) is int else value


def _computing(base: Any, name: str) -> Callable[..., Any]:
    original = getattr(base, name)

    def compute(self: Any, *others: Any) -> Any:
        found = original(self, *others)
        if found is NotImplemented and base is int and isinstance(others[0], float):
            found = getattr(float, name)(float(self), *others)
        return _followed(found)

    return compute


def _deciding(base: Any, name: str) -> Callable[..., Any]:
    original = getattr(base, name)

    def decide(self: Any, *others: Any) -> Any:
        found = original(self, *others)
        if found is not NotImplemented and torch._C._get_tracing_state():
            _refuse_time()
        return found

    return decide


for _kind in (Moment, Count):
    for _names, _make in ((_COMPUTING, _computing), (_DECIDING, _deciding)):
        for _name in (f"__{one}__" for one in _names):
            setattr(_kind, _name, _make(_kind.__base__, _name))


def refuse_times(args: object) -> None:
    """Raise BuildError if a function of torch is given what comes from a clock."""
    if any(isinstance(one, (Moment, Count)) for one in flat(args)):
        _refuse_time()


def _refuse_time() -> NoReturn:
    raise BuildError(
        f"A time that the forward reads cannot be exported: {_place()}",
        why="The graph would hold the time of the export, and compute and decide with it in every step.",
        fix="Read the clock before the call and hand the time over as a tensor, keep what is only for a log out of "
        "tensors and branches, or wrap the modules that read no clock: ortlab.wrap(model, only=[...]).",
    )


def _place() -> str:
    """Return the line of the model that is executed, in words."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else in_words(frame)


# --- who gives it out ---------------------------------------------------------------------------------------------


class Clocks:
    """Stands in for the clocks, and for what draws without a seed, in the code that a forward reaches."""

    def __init__(self, reached: Reached) -> None:
        dates = (one.__code__ for one in reached.functions if _reads_dates(one.__code__))
        self.places = {words_of(code.co_filename, code.co_firstlineno): None for code in dates}
        """Where something is read that no graph holds."""
        self._functions = reached.functions
        self._thread = threading.get_ident()
        self._is_seeded = False  # whether what is made now is given a seed

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow what the code reads in the block; warn where it reads a clock for something else than a tensor."""
        places = self._stand_ins()
        others = {id(getattr(owner, name)): new for owner, found in places for name, new in found.items()}
        with ExitStack() as stack:
            for function in self._functions:
                table = function.__globals__
                for name in global_names(function.__code__):
                    if id(value := table.get(name)) in others:
                        stack.callback(table.__setitem__, name, value)
                        table[name] = others[id(value)]
            for owner, found in places:
                stack.enter_context(with_attributes(owner, (), **found))
            yield
        if self.places:
            warnings.warn(
                f"The forward reads the clock, at {'; '.join(self.places)}. ONNX Runtime does not run that line: it "
                "runs in the export only. What int(), math, numpy or the like makes of a time, and what comes from a "
                "date, stays as it is now.",
                stacklevel=2,
            )

    def _stand_ins(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return what stands in for attributes of modules and classes."""
        clocks = [name for name in _CLOCKS if hasattr(time, name)]
        system = [name for name in ("urandom", "getrandom") if hasattr(os, name)]
        return [
            (time, {name: self._reading(getattr(time, name)) for name in clocks}),
            (timeit, {"default_timer": self._reading(timeit.default_timer)}),
            (os, {name: self._drawing(getattr(os, name)) for name in system}),
            (random, {"_urandom": self._drawing(os.urandom)}),
            (random.Random, {"seed": self._seeding(random.Random.seed)}),
            (
                np.random,
                {"default_rng": self._seeding(np.random.default_rng), "RandomState": self._state_class()},
            ),
        ]

    def _is_called(self, *through: str) -> FrameType | None:
        """Return the frame that calls a stand-in if it is the model's, or its call goes through these files."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename in through and frame.f_code.co_name not in _TEXTS and frame.f_back:
            frame = frame.f_back
        own = is_users(frame.f_code.co_filename) or frame.f_code.co_name in _TEXTS
        if not own or threading.get_ident() != self._thread:
            return None
        # An autograd Function runs in each step as it is.
        of_functions = _forwards_of_functions()
        is_in_function = any(one.f_code in of_functions for one, _ in traceback.walk_stack(frame))
        return None if is_in_function else frame

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if args or not self._is_called():  # `localtime` may be given a time
                return found
            self.places[_place()] = None
            return _followed(found)

        return read

    def _drawing(self, original: Callable[..., bytes]) -> Callable[..., bytes]:
        def draw(*args: Any, **kwargs: Any) -> bytes:
            caller = None if self._is_seeded else self._is_called(random.__file__, secrets.__file__, __file__)
            if caller is not None and caller.f_code.co_name not in _TEXTS:
                refuse(_place())
            if caller is not None:
                self.places[_place()] = None
            return original(*args, **kwargs)

        return draw

    def _seeding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what refuses to seed from the system."""

        def seed(*args: Any, **kwargs: Any) -> Any:
            given = [one for one in (*args, *kwargs.values()) if not isinstance(one, random.Random)]
            if all(one is None for one in given) and self._is_called(random.__file__):
                refuse(_place())
            return original(*args, **kwargs)

        return seed

    def _state_class(self) -> type:
        """Return what stands in for `RandomState`: numpy seeds each from the system, then with the seed given."""
        original, clocks = np.random.RandomState, self

        class Kind(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                seeded = any(one is not None for one in (*args, *kwargs.values()))
                with with_attributes(clocks, _is_seeded=clocks._is_seeded or seeded):
                    return original(*args, **kwargs)

            def __instancecheck__(cls, one: object) -> bool:
                return isinstance(one, original)

        return Kind("RandomState", (original,), {})


def _reads_dates(code: CodeType) -> bool:
    names = names_in(code).all
    return bool(names & {"now", "utcnow", "today"} and names & {"datetime", "date"})


def _forwards_of_functions() -> set[CodeType]:
    """Return the code of the forward of each autograd Function; what calls it may be no code of Python."""
    found, kinds = set(), [torch.autograd.Function]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        forward = vars(kind).get("forward")
        code = getattr(getattr(forward, "__func__", forward), "__code__", None)
        if code is not None:
            found.add(code)
    return found


_CLOCKS: Final = (
    *("time", "perf_counter", "monotonic", "process_time", "thread_time", "localtime", "gmtime"),
    *("time_ns", "perf_counter_ns", "monotonic_ns", "process_time_ns", "thread_time_ns"),
)
_TEXTS: Final = frozenset(("token_hex", "token_urlsafe"))
"""Functions of `secrets` that draw names."""
