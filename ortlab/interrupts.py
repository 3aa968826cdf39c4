"""Ctrl-C that is not lost: one that nobody raised is raised again before the next step."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_pending = False
_watched = False


@contextmanager
def interrupts_kept() -> Iterator[Callable[[], None]]:
    """Raise an interrupt that got lost, and yield the function that does so.

    Python raises `KeyboardInterrupt` wherever the main thread is. In a finaliser, in a callback from C++ that frees a
    tensor, and in imports under a bare ``except`` of another library nobody passes it on, and the program runs on.
    So the handler of the signal is wrapped: it writes the interrupt down before it raises it, and whoever runs many
    steps calls the yielded function before each. An interrupt that leaves this context has been heard, and is
    forgotten.

    Yields
    ------
    raise_lost
        Raises `KeyboardInterrupt` if one has arrived in this context, or in one around it, and has not left it.
    """
    global _pending, _watched  # noqa: PLW0603 - signals are the process's
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGINT)

    def again(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.interrupt_main()
        else:
            hook(unraisable)

    def note(number: int, frame: FrameType | None) -> None:
        global _pending  # noqa: PLW0603
        _pending = True
        if callable(handler):
            handler(number, frame)

    # Python lets only the main thread set handlers, and only it is interrupted.
    wraps = callable(handler) and threading.current_thread() is threading.main_thread()
    around = _watched
    if wraps and not around:
        _pending = False  # of an earlier call, which came to its end all the same
    sys.unraisablehook = again
    if wraps:
        _watched = True
        signal.signal(signal.SIGINT, note)
    try:
        yield _raise_lost
    except KeyboardInterrupt:
        _pending = False
        raise
    finally:
        if wraps:
            signal.signal(signal.SIGINT, handler)
            _watched = around
        sys.unraisablehook = hook


def _raise_lost() -> None:
    global _pending  # noqa: PLW0603
    if _pending and threading.current_thread() is threading.main_thread():
        _pending = False
        raise KeyboardInterrupt
