"""The `ORTMODULE_*` environment variables that ORTModule 1.19.2 reads, set for one build only."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

PREFIX: Final = "ORTMODULE_"

one_build_at_a_time: Final = threading.RLock()
"""Held by whoever builds: the environment, torch's exporter and standard error belong to the whole process."""


@contextmanager
def build_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let a build see exactly these `ORTMODULE_*` variables, then put the environment back.

    1.19.2 reads its switches from the process's environment, in `_RuntimeOptions`, in `DebugOptions` and in the
    replacement of `torch.utils.checkpoint`. Two labs with different options share that environment, so a build owns it
    under a lock and leaves nothing behind.
    """
    with one_build_at_a_time:
        before = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        try:
            _replace(variables)
            yield
        finally:
            _replace(before)


def _replace(variables: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(variables)
