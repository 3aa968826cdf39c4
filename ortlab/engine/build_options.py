"""The options of the build that is going on, for the parts of ORTModule that no argument reaches.

1.19.2 reads some switches while it is imported, for the whole process and for good. What they switch is replaced by
functions that ask here: each build, of each lab, has its own answer.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ortlab.options.options import Options

_options: Final[ContextVar[Options | None]] = ContextVar("options", default=None)


@contextmanager
def building_with(options: Options) -> Iterator[None]:
    """Let these options answer in the block."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def present() -> Options | None:
    """Return the options of the build that is going on; None outside of one."""
    return _options.get()


def acts(name: str) -> bool:
    """Tell whether a switch is on in the build that is going on; outside of one, none is."""
    options = _options.get()
    return options is not None and options.acts(name)
