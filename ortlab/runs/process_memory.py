"""The memory that a process or a device takes: now, at most, at the points of a step, with a heap that hides nothing.

glibc keeps freed memory for reuse, so that a process that has trained before can hide what a step needs. While
`following_live_buffers` runs, the resident set follows the live buffers: three things are different, and afterwards
they are as before:

- Buffers of 32 KiB or more are mapped each on its own, and unmapped when they are freed
  (``mallopt(M_MMAP_THRESHOLD)``).
- The gaps that earlier buffers left in the heap are occupied, because malloc fills a gap before it maps. What occupies
  them is never touched, so that it takes address space and next to no memory (`Gaps.fill`).
- Free memory at the end of the heap goes back to the system at once (``M_TRIM_THRESHOLD``).

mallopt(3) and proc(5) document the calls. Steps are slower meanwhile: every large buffer is made of new pages.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch

from ortlab.errors import StepError
from ortlab.memory.measured import CUDA_ALLOCATED, RESIDENT
from ortlab.records.memory_phases import PHASES, MemoryPhase, is_read
from ortlab.records.runs import PeakMemory


def resident_bytes(field: str) -> int:
    """Read a size from Linux's `/proc/self/status`, in bytes; 0 where there is no such file or field."""
    # "VmRSS" is the resident set now, "VmHWM" the largest since the mark was reset.
    return _process_sizes(field)[0]


def resident_set() -> tuple[int, int]:
    """Read the resident set now and its largest since the mark was reset, in bytes, from one look at `/proc`."""
    now, peak = _process_sizes("VmRSS", "VmHWM")
    return now, max(now, peak)


def _process_sizes(*fields: str) -> tuple[int, ...]:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return (0,) * len(fields)
    lines = dict(line.partition(":")[::2] for line in text.splitlines())
    return tuple(int(lines[field].split()[0]) * 1024 if field in lines else 0 for field in fields)


_CUDA_SIZES: Final = {
    "allocated": "allocated_bytes.all.current",
    "max allocated": "allocated_bytes.all.peak",
    "cached": "reserved_bytes.all.current",
    "max cached": "reserved_bytes.all.peak",
    "inactive": "inactive_split_bytes.all.current",
    "max inactive": "inactive_split_bytes.all.peak",
}


def allocator_sizes(device: torch.device) -> dict[str, int]:
    """Read the figures of torch's CUDA allocator that ORTModule prints, in bytes."""
    stats = torch.cuda.memory_stats(device)
    return {name: int(stats.get(key, 0)) for name, key in _CUDA_SIZES.items()}


# ---- the peak of a run ----------------------------------------------------------------------------------------------


class MemoryProbe(Protocol):
    """Measures the peak memory between `start` and `read`."""

    def start(self) -> None:
        """Forget earlier peaks."""

    def read(self) -> PeakMemory | None:
        """Return the peak since `start`, or None where the platform cannot tell."""

    def start_step(self) -> None:
        """Begin a step."""

    def rise_of_step(self) -> int | None:
        """Return how far the step has risen above its start, in bytes; None where a reading cannot tell."""


class ResidentSet:
    """Peak resident set of this process, from Linux's `/proc`; on other systems there is none."""

    # `start` collects garbage, gives freed memory back to the system and resets the kernel's high-water mark (writing 5
    # to `/proc/self/clear_refs`, see proc(5)), so that the peak belongs to what follows. It contains everything that is
    # resident: Python, libraries, weights, gradients, and memory that ORT's arena keeps for reuse.

    def __init__(self) -> None:
        self._start_bytes = 0
        self._resets = False

    def start(self) -> None:
        """Forget earlier peaks."""
        gc.collect()
        _trim_heap()
        try:
            reset_peak()
            self._resets = True
        except OSError:
            self._resets = False
        self._start_bytes = resident_bytes("VmRSS")

    def read(self) -> PeakMemory | None:
        """Return the peak since `start`, or None where the kernel's mark cannot be read or reset."""
        peak = resident_bytes("VmHWM")
        if not self._resets or not peak:
            return None
        return PeakMemory(self._start_bytes, max(peak, self._start_bytes), "resident set")

    def start_step(self) -> None:
        """Do nothing: what an allocator keeps hides what a step needs."""

    def rise_of_step(self) -> int | None:
        """Return None."""
        return None


class CudaAllocated:
    """Peak memory that torch's CUDA allocator has handed out on a device, ORT's through the bridge included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = self._step_start_bytes = self._highest_bytes = 0

    def start(self) -> None:
        """Forget earlier peaks."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start_bytes = self._highest_bytes = torch.cuda.memory_allocated(self._device)

    def read(self) -> PeakMemory | None:
        """Return the peak since `start`."""
        torch.cuda.synchronize(self._device)
        highest = max(self._highest_bytes, torch.cuda.max_memory_allocated(self._device))
        return PeakMemory(self._start_bytes, highest, "CUDA allocated")

    def start_step(self) -> None:
        """Begin a step: its peak starts from the present level."""
        torch.cuda.synchronize(self._device)
        self._highest_bytes = max(self._highest_bytes, torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        self._step_start_bytes = torch.cuda.memory_allocated(self._device)

    def rise_of_step(self) -> int | None:
        """Return how far the step has risen above its start, in bytes."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._step_start_bytes


def device_of(module: torch.nn.Module) -> torch.device:
    """Return where the parameters of a model are; the CPU where it has none."""
    return next((tensor.device for tensor in module.parameters()), torch.device("cpu"))


def memory_probe(device: torch.device) -> MemoryProbe:
    """Return the probe that fits a device."""
    return CudaAllocated(device) if device.type == "cuda" else ResidentSet()


def _trim_heap() -> None:
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:  # a libc other than glibc
            return


# ---- the points of a step -------------------------------------------------------------------------------------------


_RESIDENT: Final = {"resident": "VmRSS", "max resident": "VmHWM"}


class PhaseProbe:
    """Reads the memory of a device at the points of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: list[MemoryPhase] = []

    def take(self, step: int, phase: str) -> None:
        """Read the memory at a point of a step (from 1), if step and point are among those that are read."""
        if phase in PHASES and is_read(step):
            self._taken.append(MemoryPhase(step, phase, self._sizes()))

    def read(self) -> tuple[MemoryPhase, ...]:
        """Return what was taken."""
        return tuple(self._taken)

    def _sizes(self) -> dict[str, int]:
        if self._device.type == "cuda":
            return allocator_sizes(self._device)
        return {name: resident_bytes(field) for name, field in _RESIDENT.items()}


class Level(NamedTuple):
    """Memory now, and the highest since the last reset, in bytes."""

    now: int
    peak: int


class Gauge(Protocol):
    """Reads the memory of a process or a device."""

    kind: str

    def ready(self) -> AbstractContextManager[Gaps | None]:
        """Make a block in which levels can be read."""

    def read(self) -> Level:
        """Return level and peak, and let the peak start from the level."""

    def files(self) -> int:
        """Return the bytes of pages of files among the memory that is read."""

    def details(self) -> dict[str, int]:
        """Return more figures for the end of a step."""


class ResidentGauge:
    """The resident set of this process, which follows the live buffers in the block."""

    kind = RESIDENT

    def ready(self) -> AbstractContextManager[Gaps | None]:
        """Make the block; `following_live_buffers` says what it raises."""
        return following_live_buffers()

    def read(self) -> Level:
        """Return level and peak, and let the peak start from the level."""
        level = Level(*resident_set())
        reset_peak()
        return level

    def files(self) -> int:
        """Return the bytes of pages of files, which the kernel takes back and reads again as it likes."""
        return resident_bytes("RssFile")

    def details(self) -> dict[str, int]:
        """Return nothing: a process has no more figures."""
        return {}


class CudaGauge:
    """What torch's allocator has handed out on a device, ORT's through the bridge included."""

    kind = CUDA_ALLOCATED

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def ready(self) -> AbstractContextManager[Gaps | None]:
        """Make the block; there is nothing to prepare."""
        return nullcontext()

    def read(self) -> Level:
        """Return level and peak, and let the peak start from the level."""
        torch.cuda.synchronize(self._device)
        level = Level(
            torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        )
        torch.cuda.reset_peak_memory_stats(self._device)
        return level

    def files(self) -> int:
        """Return 0: an allocator has none."""
        return 0

    def details(self) -> dict[str, int]:
        """Return the allocator's figures: allocated, cached and inactive, each now and at most."""
        return allocator_sizes(self._device)


def gauge_of(device: torch.device) -> Gauge:
    """Return the gauge that fits a device."""
    return CudaGauge(device) if device.type == "cuda" else ResidentGauge()


# ---- the heap -------------------------------------------------------------------------------------------------------

LARGEST_IN_HEAP: Final = 32 * 1024
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
    _hand_in_counted_pages()
    _CLEAR.write_text(_RESET_PEAK)


def _hand_in_counted_pages() -> None:
    """Make each processor hand in the pages that it has counted for this process and not told yet."""
    # Since Linux 6.2 each processor counts the pages of a process apart, and hands its count in when it comes to a
    # batch: 32 pages, or two for each processor (lib/percpu_counter.c). The mark of the peak knows only what was handed
    # in. Where threads go from one processor to another, as on a busy machine, it would be wrong by up to a batch for
    # each. Pages that are given back together are more than a batch, and take with them what else was counted.
    if not hasattr(os, "sched_setaffinity"):
        return
    processors = os.sched_getaffinity(0)
    pages = 2 * max(32, 2 * (os.cpu_count() or 1))
    with suppress(
        OSError
    ):  # where a thread may not choose its processor, the mark is as good as the kernel's
        try:
            for processor in processors:
                os.sched_setaffinity(0, {processor})
                with mmap.mmap(
                    -1, pages * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                ) as given_back:
                    given_back[:: mmap.PAGESIZE] = b"\1" * pages
        finally:
            os.sched_setaffinity(0, processors)


class Gaps:
    """The gaps in the heap that are occupied; make one with `following_live_buffers`."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc
        self._held: list[int] = []

    def fill(self) -> int:
        """Occupy the gaps that there are now, and return how many bytes that took, which are not resident."""
        # The sizes tried go down from all that is free to `LARGEST_IN_HEAP`, a quarter at a time; a size that malloc
        # answers with a new mapping fits into no gap any more. malloc's statistics walk over every gap, so they are
        # asked once: in the heap of a notebook that has run for long, each time takes a twentieth of a second.
        libc, filled = self._libc, 0
        libc.malloc_trim(0)  # the pages of the gaps go back to the system
        free = libc.mallinfo2().fordblks
        size = max(free, LARGEST_IN_HEAP)
        while size >= LARGEST_IN_HEAP:
            block = libc.malloc(size) if filled + size <= free else None
            if block and not _is_mapped(block):
                self._held.append(block)
                filled += size
                continue
            libc.free(block)
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


def _is_mapped(block: int) -> bool:
    """Say whether malloc has mapped a block on its own: the second bit of the size before it (glibc's malloc.c)."""
    return bool(ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2)


def _maps(libc: Any) -> bool:
    """Say whether malloc is the one that the statistics describe, and maps a block larger than all that is free."""
    before = libc.mallinfo2()
    block = libc.malloc(before.fordblks + _TRIAL)
    mapped = bool(block) and libc.mallinfo2().hblks > before.hblks and _is_mapped(block)
    libc.free(block)
    return mapped


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
