"""The errors ortlab raises: each says what happened, why, and what to do next."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar


def did_you_mean(name: object, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> str:
    """Ask for the names that are most like one that is unknown, "Did you mean 'opset'?"; empty if none is like it."""
    near = difflib.get_close_matches(str(name), list(known), n=most, cutoff=cutoff)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else ""


class OrtlabError(Exception):
    """Base of every error that ortlab raises on purpose.

    Parameters
    ----------
    what
        What happened, one sentence.
    why
        Why it happened, one sentence; empty if `what` says it already.
    fix
        What the user can do next, one sentence or command.

    Attributes
    ----------
    what, why, fix : str
        The three parts, so that a widget can lay them out on their own.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        """Join the three parts, one line each."""
        lines = [self.what]
        if self.why:
            lines.append(f"Why: {self.why}")
        if self.fix:
            lines.append(f"Next: {self.fix}")
        return "\n".join(lines)


_Error = TypeVar("_Error", bound=OrtlabError)


def caused_by(error: _Error, fault: Exception) -> _Error:
    """Return an error that is of the class of the user's exception behind it, too, so that who catches that gets it.

    A class that cannot be mixed, and what steers Python itself, leaves the error as it is, with its cause.
    """
    kinds = type(error), type(fault)
    made = error
    if not isinstance(fault, (OrtlabError, StopIteration, StopAsyncIteration)):
        with contextlib.suppress(TypeError):
            both: Any = type(kinds[0].__name__, kinds, {"__module__": kinds[0].__module__})
            made = both.__new__(both)
            made.__dict__.update({**vars(fault), **vars(error)})
            made.args = fault.args
    made.__cause__ = fault
    return made


class InstallError(OrtlabError):
    """The installed packages cannot train with ONNX Runtime as they are."""


class OptionError(OrtlabError):
    """An option is unknown, has a value of the wrong type, or needs something that is missing."""


class WrapError(OrtlabError):
    """The object cannot be wrapped, or is wrapped already."""


class BuildError(OrtlabError):
    """Export, graph building or session creation failed; the model itself is untouched."""


class StepError(OrtlabError):
    """A training step cannot be run or measured; the lab is as it was before the call."""


class ExecutionError(OrtlabError):
    """ONNX Runtime failed while it executed the model."""


class FallbackWarning(UserWarning):
    """PyTorch executes a model that ONNX Runtime was asked for; `fallback` is on."""


class PlanWarning(UserWarning):
    """A recompute plan that was asked for is not applied, or `recompute` does nothing: the model has no such nodes."""


class LedgerError(OrtlabError):
    """A run was asked for that the ledger does not hold, or a ledger file cannot be read."""


class ArgumentError(OrtlabError):
    """What stands behind a magic cannot be read; IPython shows it as a UsageError."""


def is_users(file: str) -> bool:
    """Tell whether code in a file is the user's, or of a library that the user's model is made of."""
    standard = file.startswith(("<frozen ", _standard())) and "site-packages" not in file
    return not standard and not file.startswith(_machinery())


@functools.cache
def _standard() -> str:
    return f"{sysconfig.get_path('stdlib')}{os.sep}"


@functools.cache
def _machinery() -> tuple[str, ...]:
    """Return the folders of packages whose frames lie between a call and the user's model."""
    specs = map(find_spec, ("ortlab", "torch", "onnxruntime", "ipyparallel"))
    return tuple(f"{Path(spec.origin).parent}{os.sep}" for spec in specs if spec and spec.origin)


def warn(text: str, category: type[Warning]) -> None:
    """Give a warning at the line of the user's code that has called."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
