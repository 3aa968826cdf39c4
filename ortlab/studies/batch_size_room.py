"""How much memory there is, and a ceiling above which an allocation fails instead of ending the process.

On Linux a process that takes more than the machine or its container has is killed. ``RLIMIT_DATA`` (setrlimit(2), Linux
4.7 and newer) counts every private writable mapping, and a request beyond it fails: torch, numpy and ONNX Runtime
raise. It is the soft limit that is set, and put back after. On other systems there is no such ceiling.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from ortlab.runs.process_memory import resident_bytes

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")

SLACK_BYTES: Final = 64 << 20
"""What a process may map above what it uses: stacks of new threads (8 MiB each), heaps of threads, Python itself."""

_SHARE_OF_AVAILABLE: Final = 0.9
"""The rest is left to the other processes of the machine."""


def available_bytes() -> int | None:
    """Return how much more this process can take before the machine or its container runs out, in bytes."""
    # The least of what Linux calls available (``MemAvailable``, proc(5)) and what the control groups of the process
    # leave (version 2: ``memory.max``; version 1: ``memory.limit_in_bytes``; file cache that can be dropped counts as
    # free). None where nothing on the system tells it.
    found = [size for size in (_of_the_machine(), *_of_control_groups()) if size is not None]
    return max(0, min(found)) if found else None


class ProcessCeiling:
    """The ceiling of this process on Linux, by ``RLIMIT_DATA``; on other systems it does nothing."""

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None

    def put_up(self, room_bytes: int) -> None:
        """Let the process map this many bytes more than now, `SLACK_BYTES` besides, and no more."""
        if sys.platform != "linux":
            return
        import resource

        self.take_down()
        self._before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wished = resident_bytes("VmData") + max(0, room_bytes) + SLACK_BYTES
        known = [wished, *(size for size in (soft, hard) if size != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))

    def take_down(self) -> None:
        """Put the limits back that were there before."""
        if self._before is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, self._before)
            self._before = None


class CudaCeiling:
    """The ceiling of torch's allocator on a CUDA device, ``torch.cuda.set_per_process_memory_fraction``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def put_up(self, room_bytes: int) -> None:
        """Let torch's allocator hand out this many bytes more than now, and no more."""
        _, total = torch.cuda.mem_get_info(self._device)
        wished = torch.cuda.memory_allocated(self._device) + max(0, room_bytes)
        torch.cuda.empty_cache()  # what the allocator keeps counts as well
        torch.cuda.set_per_process_memory_fraction(cuda_fraction(wished, total), self._device)

    def take_down(self) -> None:
        """Let it have the whole device, which is torch's default."""
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)


def cuda_fraction(wished_bytes: int, total_bytes: int) -> float:
    """Return the share of a device that torch's allocator may have, above 0 and at most 1."""
    return min(1.0, max(1, wished_bytes) / total_bytes)


def ceiling_of(device: torch.device) -> ProcessCeiling | CudaCeiling:
    """Return the ceiling that fits a device."""
    return CudaCeiling(device) if device.type == "cuda" else ProcessCeiling()


class Room:
    """The memory that a point may take on the model's device, and the ceiling that holds it to that."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ceiling = ceiling_of(device)

    @property
    def on_cpu(self) -> bool:
        """Whether it is the memory of this process."""
        return self._device.type != "cuda"

    def used_bytes(self) -> int:
        """Return what is in use now: the resident set, or what torch's CUDA allocator has handed out."""
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return resident_bytes("VmRSS")

    def left_bytes(self) -> int | None:
        """Return how many more bytes a point may take, with some left to the machine; None where nothing tells it."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return int((free + cached) * _SHARE_OF_AVAILABLE)
        available = available_bytes()
        return None if available is None else int(available * _SHARE_OF_AVAILABLE)

    def hold(self, limit_bytes: int) -> None:
        """Put the ceiling up at a level of use, or lower where the machine has less left."""
        room = limit_bytes - self.used_bytes()
        left = self.left_bytes()
        self.ceiling.put_up(room if left is None else min(room, left))

    def free(self) -> None:
        """Give memory that nobody uses any more back to the device."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def ceiling_down_after(self) -> Iterator[None]:
        """Take the ceiling down when the block ends, however it ends."""
        try:
            yield
        finally:
            self.ceiling.take_down()


def _of_the_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith("MemAvailable:")), "")
    return int(line.split()[1]) * 1024 if line else None


def _of_control_groups() -> Iterator[int | None]:
    """Go through the groups that the process is in, up to the root: each may have a limit of its own."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(_CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(_CGROUPS / "memory", path, *names)


def _left(root: Path, path: str, limit: str, usage: str, droppable: str) -> Iterator[int | None]:
    inner = root / path.strip("/")
    # In a container the path is the host's, and the group's files stand at the root.
    for folder in dict.fromkeys(
        (inner, *(one for one in inner.parents if root in (one, *one.parents)), root)
    ):
        try:
            most = (folder / limit).read_text().strip()
            used = int((folder / usage).read_text())
            statistics = (folder / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        cache = next((int(line.split()[1]) for line in statistics if line.split()[:1] == [droppable]), 0)
        if most.isdigit():
            yield int(most) - used + cache
