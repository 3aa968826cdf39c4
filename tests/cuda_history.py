"""Snapshots in the format of torch's CUDA allocator, of allocations that a test makes.

The format is that of `torch.cuda.memory._snapshot` in torch 2.13 (its docstring, and ``_memory_viz.py``, which reads
it); stacks are taken by the same code of torch that takes them on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._traceback import CapturedTraceback

SEGMENT = 1 << 30
ROUNDING = 512


def stack() -> list[dict[str, Any]]:
    """Return the Python stack of the caller as torch writes it, the innermost frame first."""
    captured = CapturedTraceback.extract()
    (frames,) = torch._C._profiler.symbolize_tracebacks([captured.tb])
    return [{name: frame[name] for name in ("filename", "line", "name")} for frame in frames]


class Device:
    """The blocks and the history of one device."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[str, Any]] = {}
        self.trace: list[dict[str, Any]] = []
        self._next = SEGMENT

    def allocate(self, size: int, frames: list[dict[str, Any]]) -> int:
        """Take a block and write that down; return its address."""
        address = self._next
        self._next += self._rounded(size)
        self.place(address, size, frames)
        self._event("alloc", address, size, frames)
        return address

    def place(self, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        """Put a block there that nobody has written down."""
        self.blocks[address] = {
            "address": address,
            "size": self._rounded(size),
            "requested_size": size,
            "state": "active_allocated",
            "frames": frames,
        }

    def free(self, address: int) -> None:
        """Give a block back."""
        block = self.blocks.pop(address)
        for action in ("free_requested", "free_completed"):
            self._event(action, address, block["requested_size"], [])

    def snapshot(self) -> dict[str, Any]:
        """Return blocks and history."""
        blocks = [dict(self.blocks[address]) for address in sorted(self.blocks)]
        used = sum(block["size"] for block in blocks)
        segment = {
            "device": 0,
            "address": min(self.blocks, default=SEGMENT),
            "total_size": used,
            "allocated_size": used,
            "active_size": used,
            "requested_size": sum(block["requested_size"] for block in blocks),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }
        return {"segments": [segment], "device_traces": [list(self.trace)], "allocator_settings": {}}

    def _event(self, action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        at = {"addr": address, "size": size, "stream": 0, "time_us": len(self.trace)}
        self.trace.append({"action": action, **at, "frames": frames})

    @staticmethod
    def _rounded(size: int) -> int:
        return -(-size // ROUNDING) * ROUNDING
