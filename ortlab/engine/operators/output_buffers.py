"""Memory for what PyTorch's kernels return inside a graph of ONNX Runtime, kept from step to step.

ONNX Runtime takes the outputs of its own kernels from an arena. PyTorch gives the memory of a large tensor back to the
system when the tensor dies, and the next one gets new pages, which the system has to clear: for the logits of a
language model that takes a third as long as the matrix product that fills them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch
from torch import Tensor

SMALLEST: Final = 2**20
"""Bytes from which on memory is kept; the C library itself keeps what is smaller."""

# How many tensors and other holders a storage has; not in every build of torch, and then nothing is kept.
_holders = getattr(torch._C, "_storage_Use_Count", None)


class OutputBuffers:
    """The memory of one session, of which a piece is used again when nothing holds a tensor in it any more."""

    def __init__(self) -> None:
        self._kept: dict[int, list[torch.UntypedStorage]] = {}
        self._last_used: dict[int, int] = {}
        self._run = 0

    @property
    def size(self) -> int:
        """Bytes kept, in use or not."""
        return sum(size * len(kept) for size, kept in self._kept.items())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let `empty` take memory from here, for one run of the forward or of the backward graph."""
        self._run += 1
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def storage(self, size: int) -> torch.UntypedStorage:
        """Return memory of at least `size` bytes that nobody holds.

        It is up to an eighth larger, so that batches of almost the same shape share it.
        """
        step = 2 ** max(size.bit_length() - 4, 0)
        size = -(-size // step) * step
        self._last_used[size] = self._run
        kept = self._kept.setdefault(size, [])
        for storage in kept:
            if _holders is not None and _holders(storage._cdata) == 1:
                return storage
        self._let_go()
        kept.append(torch.UntypedStorage(size))
        return kept[-1]

    def _let_go(self) -> None:
        """Free what the last two steps, forward and backward, had no use for: the shapes of the inputs change."""
        for size in [size for size, run in self._last_used.items() if run < self._run - 4]:
            del self._kept[size], self._last_used[size]


_current: Final[ContextVar[OutputBuffers | None]] = ContextVar("current", default=None)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a dense tensor without values, of the dtype of `like`, from the buffers in use if it is large."""
    size = math.prod(shape) * like.element_size()
    buffers = _current.get()
    if buffers is None or size < SMALLEST or _holders is None or like.device.type != "cpu":
        return like.new_empty(tuple(shape))
    output = torch.empty(0, dtype=like.dtype)
    output.set_(buffers.storage(size), 0, tuple(shape))  # type: ignore[call-overload]
    return output
