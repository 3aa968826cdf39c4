"""A second trace of a forward that fails because it is traced.

Code that asks ``torch.jit.is_tracing()`` may go another way in an export than in PyTorch: transformers makes a mask of
no padding there, which it leaves out otherwise. Mostly both come to the same, and the way of the trace is the better
one: it is good for every batch. Where it fails, as in Nyströmformer, whose landmarks are fewer than its mask has rows,
the forward is traced once more and is told that it is not. What it reads of values then is guarded as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from ortlab.engine.patching import with_attributes
from ortlab.engine.tracing.source_lines import is_model_code
from ortlab.errors import OrtlabError

T = TypeVar("T")

SAID: Final = (
    "The forward asks whether it is traced (torch.jit.is_tracing) and fails if it is; it was exported the way that "
    "PyTorch runs it. A batch for which it would go another way ends in an error."
)


def traced_as_it_runs(export: Callable[[], T], say: Callable[[str], object]) -> T:
    """Export a forward; once more, without telling it of the trace, if it has asked for that and failed."""
    jit: Any = torch.jit
    original = jit.is_tracing
    asked = False

    def noted() -> bool:
        nonlocal asked
        asked = asked or _asked_by_model()
        return bool(original())

    def hidden() -> bool:
        return not _asked_by_model() and bool(original())

    try:
        with with_attributes(jit, is_tracing=noted):
            return export()
    except OrtlabError:
        raise
    except Exception:
        if not asked:
            raise
        made = _untold(export, hidden)
        if made is None:
            raise  # the first failure says what is wrong
    say(SAID)
    return made


def _untold(export: Callable[[], T], hidden: Callable[[], bool]) -> T | None:
    """Export without telling the forward of the trace; return None if that fails, too."""
    jit: Any = torch.jit
    try:
        with with_attributes(jit, is_tracing=hidden):
            return export()
    except OrtlabError:
        raise
    except Exception:  # noqa: BLE001 - whatever it is
        return None


def _asked_by_model() -> bool:
    return is_model_code(sys._getframe(2).f_code.co_filename)
