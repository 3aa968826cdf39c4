"""Ctrl-C that is not lost, does no harm, and is answered in one line."""

from __future__ import annotations

import _thread
import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

_TWICE_SECONDS: Final = 1.0
"""A second Ctrl-C that comes so soon after the first means the same one."""

_SOON_SECONDS: Final = 0.02
"""After which time an interrupt that came in a finaliser is raised again: that one has returned by then."""

_TOO_LATE: Final = "Ctrl-C came too late to stop anything: what you asked for is done, and kept."

_pending = False
_raised = 0  # how many interrupts have been raised
_raised_at = -_TWICE_SECONDS


@contextmanager
def interrupts_kept(*, errors: bool = True) -> Iterator[Callable[[], None]]:
    """Raise an interrupt that got lost, and yield the function that does so."""
    # Python raises `KeyboardInterrupt` wherever the main thread is. In a finaliser, in a callback from C++ that frees a
    # tensor, and in imports under a bare ``except`` of another library nobody passes it on, and the program runs on; in
    # a callback whose result C++ code needs, another error follows. So the handler of the signal is wrapped: it writes
    # the interrupt down before it raises it, and whoever runs many steps calls the yielded function before each. An
    # error that leaves this context while an interrupt is written down is its consequence, and leaves as that
    # interrupt, unless `errors` is False because somebody inside answers interrupts. An interrupt that leaves this
    # context has been heard, and is forgotten. A second Ctrl-C while the first is on its way out is the same one. One
    # that comes while something is put back (`protected`) is raised after that, and one that nobody has heard at the
    # latest where this context ends.
    global _pending, _raised_at  # noqa: PLW0603 - signals are the process's
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGINT)
    # Python lets only the main thread set handlers, and only it is interrupted.
    is_main = threading.current_thread() is threading.main_thread()
    wraps = callable(handler) and is_main
    around = getattr(handler, "notes_interrupts", False)
    if wraps and not around:
        _pending = False  # of an earlier call, which came to its end all the same
        _raised_at = -_TWICE_SECONDS
    if is_main:  # another thread's end would put back what was there before the main thread's
        sys.unraisablehook = _raising_again(hook)
    if wraps and not around:  # one of the contexts is enough to write interrupts down
        signal.signal(signal.SIGINT, _noting(handler))
    try:
        yield _raise_lost
        if not around and is_main:
            _raise_lost(_TOO_LATE)
    except KeyboardInterrupt:
        _pending = False
        raise
    except Exception as error:
        if not (errors and _pending and is_main):
            raise
        _pending = False
        raise KeyboardInterrupt from error
    finally:
        if wraps and not around:
            signal.signal(signal.SIGINT, handler)
        if is_main:
            sys.unraisablehook = hook


def _noting(handler: Any) -> Callable[[int, FrameType | None], None]:
    """Return a handler that writes interrupts down, and passes on all but the second of two quick ones."""

    def note(number: int, frame: FrameType | None) -> None:
        global _pending, _raised, _raised_at  # noqa: PLW0603
        _pending = True
        now = time.monotonic()
        if now - _raised_at >= _TWICE_SECONDS and not _is_held(frame):
            _raised, _raised_at = _raised + 1, now
            handler(number, frame)

    note.notes_interrupts = True  # type: ignore[attr-defined] # the handler itself says who is there already
    return note


_protected: Final[set[CodeType]] = set()
_BORDERS: Final = tuple(
    method.__code__ for method in (_GeneratorContextManager.__enter__, _GeneratorContextManager.__exit__)
)

_protected.add(inspect.unwrap(interrupts_kept).__code__)

Function = TypeVar("Function", bound=Callable[..., Any])


def protected(function: Function) -> Function:
    """Let Ctrl-C that comes in this function, or what it calls, wait until it has come to its end."""
    # For what puts something back: half of it would be neither the one state nor the other. It holds inside
    # `interrupts_kept`, which raises the interrupt later.
    _protected.add(inspect.unwrap(function).__code__)
    return function


def _is_held(frame: FrameType | None) -> bool:
    """Tell whether a frame is inside a protected function, or where a context of ours begins or ends."""
    while frame is not None:
        if frame.f_code in _protected:
            return True
        around = frame.f_back
        if (
            frame.f_code in _BORDERS
            and around
            and str(around.f_globals.get("__name__")).startswith(("ortlab.", "contextlib"))
        ):
            return True
        frame = around
    return False


def _raising_again(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a hook that raises an interrupt again that came in a finaliser, where nobody hears it."""

    def again(unraisable: Any) -> None:
        global _raised_at  # noqa: PLW0603
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _raised_at = -_TWICE_SECONDS
            # From another thread: raised in here, it would end this hook, and Python would print that.
            _thread.start_new_thread(_interrupt_soon, (_raised,))
        else:
            hook(unraisable)

    return again


def _interrupt_soon(number: int) -> None:
    time.sleep(_SOON_SECONDS)
    if _pending and number == _raised:  # nobody has raised it meanwhile
        _thread.interrupt_main()


def _raise_lost(words: str = "") -> None:
    global _pending, _raised, _raised_at
    if _pending and threading.current_thread() is threading.main_thread():
        _pending, _raised, _raised_at = False, _raised + 1, time.monotonic()
        raise say(KeyboardInterrupt(), words) if words else KeyboardInterrupt


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends, such as one that puts weights back, and raise it then."""
    # Where the block is itself an answer to Ctrl-C, another one means the same and is dropped.
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
        handler(signal.SIGINT, came[0])


@contextmanager
def answered(words: str) -> Iterator[None]:
    """Give an interrupt that leaves the block these words, unless something inside has given it others."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:
            say(interrupt, words)
        raise


def say(interrupt: KeyboardInterrupt, words: str) -> KeyboardInterrupt:
    """Let an interrupt say in one line what is kept and how to go on; IPython shows that line and no traceback."""
    interrupt.args = (words,)
    interrupt._render_traceback_ = partial(list, [words])  # type: ignore[attr-defined] # IPython's protocol
    return interrupt
