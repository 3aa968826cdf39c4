"""glibc's heap, so arranged that the resident set of the running process follows the live buffers.

glibc keeps freed memory for reuse, so that a process that has trained before can hide what a step needs. While
`following_live_buffers` runs, three things are different, and afterwards they are as before:

- Buffers of 64 KiB or more are mapped each on its own, and unmapped when they are freed
  (``mallopt(M_MMAP_THRESHOLD)``).
- The gaps that earlier buffers left in the heap are occupied, because malloc fills a gap before it maps. What occupies
  them is never touched, so that it takes address space and next to no memory (`Gaps.fill`).
- Free memory at the end of the heap goes back to the system at once (``M_TRIM_THRESHOLD``).

mallopt(3) and proc(5) document the calls. Steps are slower meanwhile: every large buffer is made of new pages.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from ortlab.errors import StepError

LARGEST_IN_HEAP: Final = 64 * 1024
"""Bytes from which on a buffer is mapped on its own."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# Where glibc's own thresholds end up in a process that trains: they grow with the buffers that are freed, up to these
# limits (malloc.c, DEFAULT_MMAP_THRESHOLD_MAX). mallopt ends the growing for good, so they are set to its end.
_MMAP_GROWN: Final = 4 * 1024 * 1024 * ctypes.sizeof(ctypes.c_long)
_TRIM_GROWN: Final = 2 * _MMAP_GROWN

_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"

_TRIAL: Final = 1 << 20  # bytes, more than the threshold and no trouble to anybody


class _Statistics(ctypes.Structure):
    """What mallinfo2(3) returns; of mallinfo, which older releases have, the fields are ints that may wrap."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def reason_unknown() -> str:
    """Say why the resident set cannot be made to follow the live buffers here; empty where it can."""
    if sys.platform != "linux":
        return f"There is no /proc on {platform.system()}, which tells the peak of a process."
    try:
        reset_peak()
    except OSError as error:
        return f"The kernel's mark of the peak cannot be reset: {error}."
    try:
        libc = _libc()
    except AttributeError:
        return "The C library is not glibc 2.33 or newer, whose malloc can be told to map large buffers."
    libc.mallopt(_M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
    try:
        return (
            ""
            if _maps(libc)
            else "Another malloc than glibc's is loaded, which cannot be told to map buffers."
        )
    finally:
        _put_thresholds_back(libc)


def reset_peak() -> None:
    """Start the kernel's mark of this process's peak from the present resident set; raise OSError if it refuses."""
    _CLEAR.write_text(_RESET_PEAK)


class Gaps:
    """The gaps in the heap that are occupied; make one with `following_live_buffers`."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc
        self._held: list[int] = []

    def fill(self) -> int:
        """Occupy the gaps that there are now, and return how many bytes that took, which are not resident.

        The sizes tried go down from all that is free to `LARGEST_IN_HEAP`, a quarter at a time; a size that malloc
        answers with a new mapping fits into no gap any more.
        """
        libc, filled = self._libc, 0
        libc.malloc_trim(0)  # the pages of the gaps go back to the system
        before = libc.mallinfo2()
        size = max(before.fordblks, LARGEST_IN_HEAP)
        while size >= LARGEST_IN_HEAP:
            block = libc.malloc(size)
            after = libc.mallinfo2()
            if block and (before.hblks, before.arena) == (after.hblks, after.arena):
                self._held.append(block)
                filled += size
                continue
            libc.free(block)
            before = libc.mallinfo2()
            size = size * 3 // 4
        return filled

    def open(self) -> None:
        """Give the gaps back to malloc."""
        while self._held:
            self._libc.free(self._held.pop())


@contextmanager
def following_live_buffers() -> Iterator[Gaps]:
    """Let the resident set follow the live buffers while the block runs; StepError says why where it cannot."""
    reason = reason_unknown()
    if reason:
        raise StepError(
            "The memory of a step cannot be measured here.",
            why=reason,
            fix="Measure it on Linux with glibc, or on a GPU; lab.plan() predicts without measuring.",
        )
    libc = _libc()
    gaps = Gaps(libc)
    try:
        libc.mallopt(_M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        libc.mallopt(_M_TRIM_THRESHOLD, LARGEST_IN_HEAP)
        yield gaps
    finally:
        gaps.open()
        _put_thresholds_back(libc)
        libc.malloc_trim(0)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Statistics
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    return libc


def _maps(libc: Any) -> bool:
    """Say whether malloc is the one that the statistics describe, and maps a block larger than all that is free."""
    before = libc.mallinfo2()
    block = libc.malloc(before.fordblks + _TRIAL)
    mapped = libc.mallinfo2().hblks - before.hblks
    libc.free(block)
    return bool(block) and mapped > 0


def _put_thresholds_back(libc: Any) -> None:
    libc.mallopt(_M_MMAP_THRESHOLD, _wished("MALLOC_MMAP_THRESHOLD_", "mmap_threshold") or _MMAP_GROWN)
    libc.mallopt(_M_TRIM_THRESHOLD, _wished("MALLOC_TRIM_THRESHOLD_", "trim_threshold") or _TRIM_GROWN)


def _wished(variable: str, tunable: str) -> int:
    """Read a threshold that the user has set for the process, in bytes; 0 if there is none."""
    found = re.search(rf"glibc\.malloc\.{tunable}=(\w+)", os.environ.get("GLIBC_TUNABLES", ""))
    text = os.environ.get(variable, "") or (found[1] if found else "")
    try:
        return int(text, 0)
    except ValueError:
        return 0
