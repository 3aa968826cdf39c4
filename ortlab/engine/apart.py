"""Executions of an engine beside those that it has: built anew in a block, and forgotten at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ortlab.engine import exports
from ortlab.engine.built_sessions import BuiltSessions

if TYPE_CHECKING:
    from ortlab.engine.ort import OrtEngine

_STATE: Final = (
    "_sessions",
    "_failed",
    "_starts_over",
    "executed_by",
    "fallback_reason",
    "rebuild_reason",
    "options",
)


@contextmanager
def built_apart(engine: OrtEngine, **changes: object) -> Iterator[Callable[[], None]]:
    """Let an engine build anew, with changed options, what it needs in the block, and give it its state back.

    Yields a function that frees the sessions of the block, so that the next call makes one of the graph that is there.
    """
    before = {name: getattr(engine, name) for name in _STATE}
    engine._sessions, engine._failed, engine._starts_over = BuiltSessions(), None, False
    # Files of exports and graphs are the user's: nothing of the block goes there.
    engine.options = engine.options.replace(export_cache_dir="", save_onnx=False, fallback=False, **changes)
    try:
        with exports.set_aside(engine._module):

            def free() -> None:
                engine._sessions.release()

            try:
                yield free
            finally:
                free()
                exports.forget(engine._module)
    finally:
        for name, value in before.items():
            setattr(engine, name, value)
