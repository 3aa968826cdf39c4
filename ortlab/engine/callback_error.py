"""The exception of a Python callback, kept until the ONNX Runtime call that it broke has returned.

ORT calls back into Python through C function pointers, and no exception crosses those: a failed callback
can only make its kernel fail, and ORT then raises its own error, which knows nothing of the cause. So the
callback leaves the exception here, and whoever called ORT asks for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ortlab.errors import ExecutionError, OrtlabError

_lock = threading.Lock()
_first: BaseException | None = None


def keep_error(operator: str, error: BaseException) -> None:
    """Keep the exception of a callback, unless one is kept: what follows the first is its consequence.

    `operator` is the operator or ``autograd.Function`` that failed, as the user knows it.
    """
    global _first  # noqa: PLW0603 - ORT may call back from any of its threads, so this is the process's
    with _lock:
        if _first is None:
            _first = _explain(operator, error)


def take_error() -> BaseException | None:
    """Return the exception that a callback left, and forget it; None if nothing failed.

    Call it after every ORT call that failed, and before one whose failure will be looked at. It returns an
    `ExecutionError` that names the operator, with the original exception as its ``__cause__``; `KeyboardInterrupt` and
    `SystemExit`, which the user meant, and errors of ortlab come as they are.
    """
    global _first
    with _lock:
        error, _first = _first, None
    return error


@contextmanager
def border_watched() -> Iterator[None]:
    """Lose no exception at the border to C while ORT runs, and raise what a callback left if ORT has come to its end.

    A signal that arrives while C++ code runs is raised where Python goes on, which is the first instruction of the next
    callback: before its own code can keep the exception. ctypes hands that to `sys.unraisablehook`, and ORT goes on
    with an output that was never written.
    """
    before = sys.unraisablehook

    def keep(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, Exception):
            before(unraisable)
        else:
            keep_error("", unraisable.exc_value or unraisable.exc_type())

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before
    error = take_error()
    if error is not None:
        raise error


def _explain(operator: str, error: BaseException) -> BaseException:
    if not isinstance(error, Exception) or isinstance(error, OrtlabError):  # which says more than this would
        return error
    explained = ExecutionError(
        f"{operator} failed: {type(error).__name__}: {error}",
        why="ONNX Runtime calls this operator in PyTorch, and PyTorch raised the error.",
        fix="The traceback of the original error is above; correct the operator or its inputs there.",
    )
    explained.__cause__ = error
    return explained
