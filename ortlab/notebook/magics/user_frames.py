"""Which part of a traceback is the user's code: what they can mend, without the frames that called it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MACHINERY = ("ortlab", "torch", "onnxruntime", "ipyparallel")
"""Packages whose frames lie between a magic and the user's model."""


def since_cell(frames: TracebackType | None, shell: InteractiveShell) -> TracebackType | None:
    """Cut a traceback down to what a cell's code did: from the first frame in the user's namespace on.

    Returns the whole traceback if no frame of it is the user's.
    """
    found = frames
    while found is not None:
        if found.tb_frame.f_globals is shell.user_global_ns:
            return found
        found = found.tb_next
    return frames


def place(error: BaseException, shell: InteractiveShell) -> str:
    """Say in which line of the user's code the causes of an error arose; "" if in none."""
    machinery = tuple(
        str(Path(spec.origin).parent) for spec in map(find_spec, _MACHINERY) if spec and spec.origin
    )
    for cause in _causes(error):
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if not frame.filename.startswith(machinery):
                label, name = shell.compile.format_code_name(frame.filename) or ("File", frame.filename)
                return f"{label} {name}, line {frame.lineno}, in {frame.name}: {frame.line}"
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes, the first one first: it is nearest to the user's code."""
    cause = error.__cause__ or error.__context__
    if cause is not None:
        yield from _causes(cause)
        yield cause
