"""Time and peak memory of training steps. Clock and memory probe are passed in, so that tests need no real time."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ortlab.records.runs import PeakMemory

Clock = Callable[[], float]
"""Returns the time in seconds, from any origin, never going back."""


class Stopwatch:
    """Measures the time of a step's forward, backward, optimizer and the rest, in ms.

    Forward is timed by the lab, which runs it. Backward is timed by wrapping `torch.autograd.backward`, which
    `Tensor.backward` looks up at each call, and the optimizer by torch's global step hooks; both only while
    `watching()`, and both whatever library makes the calls. `clock` returns seconds. `synchronize` waits for a device's
    queue, so that its work is counted where it was asked for; None on the CPU. `on_optimizer` and `on_backward` are
    called before an optimizer steps and before a backward starts.
    """

    def __init__(
        self,
        clock: Clock = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
        on_optimizer: Callable[[Any], None] = lambda _: None,
        on_backward: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._synchronize = synchronize
        self._on_optimizer = on_optimizer
        self._on_backward = on_backward
        # Called with "pre_" or "post_" and "forward", "backward" or "optimizer" at these points; None for nobody.
        self.on_phase: Callable[[str], None] | None = None
        self._optimizer_start = 0.0
        self.start_step()

    def start_step(self) -> None:
        """Set all times to zero and start the step."""
        self.forward_ms = self.backward_ms = self.optimizer_ms = self.excluded_ms = self.initialization_ms = (
            0.0
        )
        self.forward_calls = self.backward_calls = 0
        self.exchange_ms: float | None = None
        self._last_gradient: float | None = None
        self.backward_root: torch.Tensor | None = None
        self._depth = self._optimizer_depth = 0
        self._started = self.now_ms()

    def now_ms(self) -> float:
        """Return the time in ms, once the device has done what it was asked."""
        if self._synchronize is not None:
            self._synchronize()
        return self._clock() * 1000

    def elapsed_ms(self) -> float:
        """Return the time since the step started, in ms, without initialisation and what was excluded."""
        return self.now_ms() - self._started - self.excluded_ms - self.initialization_ms

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Time a forward pass, without what is initialised or excluded meanwhile."""
        self.forward_calls += 1
        self._reach("pre_forward")
        start, before = self.now_ms(), self.initialization_ms + self.excluded_ms
        try:
            yield
        finally:
            self.forward_ms += self.now_ms() - start - (self.initialization_ms + self.excluded_ms - before)
        self._reach("post_forward")

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave out the block, which is ortlab's own work."""
        start = self.now_ms()
        try:
            yield
        finally:
            self.excluded_ms += self.now_ms() - start

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time every backward and every optimizer step of this process while the block runs."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._depth:  # a backward within a backward, as reentrant checkpointing makes
                original(tensors, *args, **kwargs)
                return
            if isinstance(tensors, torch.Tensor):
                self._on_backward(tensors)
            self._depth += 1
            self.backward_calls += 1
            self.backward_root = tensors if isinstance(tensors, torch.Tensor) else None
            self._reach("pre_backward")
            start = self.now_ms()
            try:
                original(tensors, *args, **kwargs)
            finally:
                end = self.now_ms()
                self.backward_ms += end - start
                if self._last_gradient is not None:
                    self.exchange_ms = (self.exchange_ms or 0.0) + end - self._last_gradient
                    self._last_gradient = None
                self._depth -= 1
            self._reach("post_backward")

        with ExitStack() as stack:
            torch.autograd.backward = backward
            stack.callback(setattr, torch.autograd, "backward", original)
            stack.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
            yield

    def gradient_arrived(self) -> None:
        """Note that a parameter has its gradient; what a backward takes after the last of them is the exchange."""
        self._last_gradient = self._clock() * 1000

    def _reach(self, phase: str) -> None:
        if self.on_phase is not None:
            with self.excluded():
                self.on_phase(phase)

    def _before_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._optimizer_depth += 1
        if self._optimizer_depth == 1:  # a subclass's step and the step that it calls both run the hooks
            with self.excluded():
                self._on_optimizer(optimizer)
            self._reach("pre_optimizer")
            self._optimizer_start = self.now_ms()

    def _after_optimizer(self, *_: Any) -> None:
        self._optimizer_depth -= 1
        if not self._optimizer_depth:
            self.optimizer_ms += self.now_ms() - self._optimizer_start
            self._reach("post_optimizer")


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
    """Peak resident set of this process, from Linux's `/proc`; on other systems there is none.

    `start` collects garbage, gives freed memory back to the system and resets the kernel's high-water mark (writing 5
    to `/proc/self/clear_refs`, see proc(5)), so that the peak belongs to what follows. It contains everything
    that is resident: Python, libraries, weights, gradients, and memory that ORT's arena keeps for reuse.
    """

    _CLEAR = Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        self._start_bytes = 0
        self._resets = False

    def start(self) -> None:
        """Forget earlier peaks."""
        gc.collect()
        _trim_heap()
        try:
            self._CLEAR.write_text("5")
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
        """Do nothing: what an allocator keeps hides what a step needs; see `ortlab.runs.heap`."""

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


class Faults(NamedTuple):
    """Page faults of a process: `minor` ones only mapped a page, `major` ones read it from a disk."""

    minor: int
    major: int


def page_faults() -> Faults | None:
    """Count the page faults of this process so far; None on a system that does not tell, such as Windows."""
    try:
        import resource
    except ImportError:
        return None
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Faults(used.ru_minflt, used.ru_majflt)


def faults_since(before: Faults | None) -> Faults | None:
    """Count the page faults since an earlier count."""
    now = page_faults()
    return (
        None if before is None or now is None else Faults(now.minor - before.minor, now.major - before.major)
    )


class OtherPrograms:
    """How many cores other programs use, from Linux's `/proc/stat`; the time that a hypervisor takes counts, too."""

    _STAT = Path("/proc/stat")
    _BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; see proc(5)

    def __init__(self) -> None:
        self._started = (0.0, 0.0, 0.0)

    def start(self) -> None:
        """Begin to count."""
        self._started = self._now()

    def cores(self) -> float | None:
        """Return the cores used since `start`, on average; None on another system, or for less than 50 ms."""
        if sys.platform != "linux":
            return None
        wall, busy, own = (now - then for now, then in zip(self._now(), self._started, strict=True))
        return max(0.0, busy - own) / wall if wall >= _SHORTEST and busy else None

    def _now(self) -> tuple[float, float, float]:
        """Return wall time, the time that all processors were busy, and this process's part of it, in s."""
        try:
            fields = self._STAT.read_text().partition("\n")[0].split()[1:]
        except OSError:
            return (0.0, 0.0, 0.0)
        ticks = sum(int(fields[position]) for position in self._BUSY)
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


_SHORTEST: Final = 0.05  # s; the system counts in hundredths


def memory_probe(device: torch.device) -> MemoryProbe:
    """Return the probe that fits a device."""
    return CudaAllocated(device) if device.type == "cuda" else ResidentSet()


def resident_bytes(field: str) -> int:
    """Read a size from Linux's `/proc/self/status`, in bytes; 0 where there is no such file or field.

    "VmRSS" is the resident set now, "VmHWM" the largest since the mark was reset.
    """
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
    """Read the figures of torch's CUDA allocator that ORTModule prints (row E5), in bytes."""
    stats = torch.cuda.memory_stats(device)
    return {name: int(stats.get(key, 0)) for name, key in _CUDA_SIZES.items()}


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """Return what waits for a device's queue, or None for the CPU, which has none."""
    if device.type != "cuda":
        return None
    return lambda: torch.cuda.synchronize(device)


def _trim_heap() -> None:
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:  # a libc other than glibc
            return
