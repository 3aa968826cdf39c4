"""What one build sees: the `ORTMODULE_*` variables that ORTModule 1.19.2 reads, and the options behind them.

1.19.2 reads some switches while it is imported, for the whole process and for good. What they switch is replaced by
functions that ask here (`acts`, `present`): each build, of each lab, has its own answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from ortlab.engine.patching import set_to

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ortlab.options.options import Options


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


_options: Final[ContextVar[Options | None]] = ContextVar("options", default=None)


def building_with(options: Options) -> AbstractContextManager[None]:
    """Let these options answer in the block."""
    return set_to(_options, options)


def present() -> Options | None:
    """Return the options of the build that is going on; None outside of one."""
    return _options.get()


def acts(name: str) -> bool:
    """Tell whether a switch is on in the build that is going on; outside of one, none is."""
    options = _options.get()
    return options is not None and options.acts(name)
