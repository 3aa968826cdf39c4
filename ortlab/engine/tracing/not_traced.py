"""Work in the middle of a trace that is no part of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def not_traced() -> Iterator[None]:
    """Keep what is done in the block out of the trace, if there is one."""
    internals: Any = torch._C
    trace = internals._get_tracing_state()
    internals._set_tracing_state(None)
    try:
        yield
    finally:
        internals._set_tracing_state(trace)
