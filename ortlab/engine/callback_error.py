"""The exception of a Python callback, kept until the ONNX Runtime call that it broke has returned.

ORT calls back into Python through C function pointers, and no exception crosses those: a failed callback
can only make its kernel fail, and ORT then raises its own error, which knows nothing of the cause. So the
callback leaves the exception here, and whoever called ORT asks for it.
"""

from __future__ import annotations

import threading

from ortlab.errors import ExecutionError

_lock = threading.Lock()
_first: BaseException | None = None


def keep_error(operator: str, error: BaseException) -> None:
    """Keep the exception of a callback, unless one is kept: what follows the first is its consequence.

    Parameters
    ----------
    operator
        The operator or ``autograd.Function`` that failed, as the user knows it.
    error
        What it raised.
    """
    global _first  # noqa: PLW0603 - ORT may call back from any of its threads, so this is the process's
    with _lock:
        if _first is None:
            _first = _explain(operator, error)


def take_error() -> BaseException | None:
    """Return the exception that a callback left, and forget it.

    Call it after every ORT call that failed, and before one whose failure will be looked at.

    Returns
    -------
    error
        An `ExecutionError` that names the operator, with the original exception as its ``__cause__``;
        `KeyboardInterrupt` and `SystemExit` themselves, because the user meant those; None if nothing failed.
    """
    global _first
    with _lock:
        error, _first = _first, None
    return error


def _explain(operator: str, error: BaseException) -> BaseException:
    if not isinstance(error, Exception):
        return error
    explained = ExecutionError(
        f"{operator} failed: {type(error).__name__}: {error}",
        why="ONNX Runtime calls this operator in PyTorch, and PyTorch raised the error.",
        fix="The traceback of the original error is above; mend the operator or its inputs there.",
    )
    explained.__cause__ = error
    return explained
