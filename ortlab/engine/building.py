"""Builds beside the one that runs, for an analysis: an engine that only builds, and a build that is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ortlab.engine import kept_builds
from ortlab.engine.kept_builds import BuiltSessions
from ortlab.engine.ort import OrtEngine
from ortlab.engine.patching import with_attributes
from ortlab.records.runs import EXECUTED_BY_EAGER


class BuildingEngine(OrtEngine):
    """Build, at each call of the module, the graph and the session for it, and run the module's own forward.

    ONNX Runtime draws no random numbers then. The state of its generator can be set but not read, so nothing could put
    right what it would draw later.
    """

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Build what the call needs, and run it in PyTorch; raises `BuildError` where the build fails."""
        self.prepare(args, kwargs)
        self.executed_by = EXECUTED_BY_EAGER
        return self._original_forward(*args, **kwargs)


@contextmanager
def built_apart(engine: OrtEngine, **changes: object) -> Iterator[Callable[[], None]]:
    """Let an engine build anew, with changed options, what it needs in the block, and give it its state back.

    Yields a function that frees the sessions of the block, so that the next call makes one of the graph that is there.
    """
    # Files of exports and graphs are the user's: nothing of the block goes there.
    options = engine.options.replace(export_cache_dir="", save_onnx=False, fallback=False, **changes)
    sessions, said = BuiltSessions(), ("executed_by", "fallback_reason", "rebuild_reason")
    with (
        with_attributes(engine, said, options=options, _sessions=sessions, _failed=None, _starts_over=False),
        kept_builds.set_aside(engine._module),
    ):
        try:
            yield sessions.release
        finally:
            sessions.release()
            kept_builds.forget(engine._module)
