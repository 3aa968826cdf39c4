"""The time of a step's phases, and what disturbs it: page faults and other programs.

Clocks are passed in, so that tests need no real time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Clock = Callable[[], float]
"""Returns the time in seconds, from any origin, never going back."""


class Stopwatch:
    """Measures the time of a step's forward, backward, optimizer and the rest, in ms."""

    # Forward is timed by the lab, which runs it. Backward is timed by wrapping `torch.autograd.backward`, which
    # `Tensor.backward` looks up at each call, and the optimizer by torch's global step hooks; both only while
    # `watching()`, and both whatever library makes the calls. `module` is what is trained; None for whatever is.
    # `clock` returns seconds. `synchronize` waits for a device's queue, so that its work is counted where it was asked
    # for; None on the CPU. `on_optimizer` and `on_backward` are called before an optimizer steps and before a backward
    # starts.

    def __init__(
        self,
        clock: Clock = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
        on_optimizer: Callable[[Any], None] = lambda _: None,
        on_backward: Callable[[torch.Tensor], None] = lambda _: None,
        module: torch.nn.Module | None = None,
    ) -> None:
        self._module = module
        self._thread = 0
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
        """Time the backwards and optimizer steps that are this one's while the block runs."""
        # They are those of the thread that is here, and of other threads those that train a parameter of `module`. So
        # other models may be trained meanwhile, under stopwatches of their own or under none.
        self._thread = threading.get_ident()
        try:
            _watch(self)
            yield
        finally:
            _unwatch(self)

    def run_backward(self, backward: Callable[[], None], tensors: Any) -> None:
        """Run a backward, timed unless it is one within a backward, as reentrant checkpointing makes."""
        if self._depth:
            backward()
            return
        if isinstance(tensors, torch.Tensor):
            self._on_backward(tensors)
        self._depth += 1
        self.backward_calls += 1
        self.backward_root = tensors if isinstance(tensors, torch.Tensor) else None
        self._reach("pre_backward")
        start = self.now_ms()
        try:
            backward()
        finally:
            end = self.now_ms()
            self.backward_ms += end - start
            if self._last_gradient is not None:
                self.exchange_ms = (self.exchange_ms or 0.0) + end - self._last_gradient
                self._last_gradient = None
            self._depth -= 1
        self._reach("post_backward")

    def steps(self, optimizer: Any) -> bool:
        """Tell whether the step that an optimizer makes in this thread is one of this stopwatch's."""
        return self.owns(lambda: (one for group in optimizer.param_groups for one in group["params"]))

    def owns(self, find: Callable[[], Iterator[Any]]) -> bool:
        """Tell whether what this thread is about to do is its own; `find` yields the tensors that it trains."""
        if self._thread == threading.get_ident():
            return True
        if self._module is None:
            return True
        mine = {id(one) for one in self._module.parameters()}
        return any(id(one) in mine for one in find())

    def gradient_arrived(self) -> None:
        """Note that a parameter has its gradient; what a backward takes after the last of them is the exchange."""
        self._last_gradient = self._clock() * 1000

    def _reach(self, phase: str) -> None:
        if self.on_phase is not None:
            with self.excluded():
                self.on_phase(phase)

    def before_optimizer(self, optimizer: Any) -> None:
        """Note that an optimizer begins its step."""
        self._optimizer_depth += 1
        if self._optimizer_depth == 1:  # a subclass's step and the step that it calls both run the hooks
            with self.excluded():
                self._on_optimizer(optimizer)
            self._reach("pre_optimizer")
            self._optimizer_start = self.now_ms()

    def after_optimizer(self) -> None:
        """Note that an optimizer has made its step."""
        self._optimizer_depth -= 1
        if not self._optimizer_depth:
            self.optimizer_ms += self.now_ms() - self._optimizer_start
            self._reach("post_optimizer")


# ---- whose a call is ---------------------------------------------------------------------------------------------

_lock: Final = threading.Lock()
_watching: Final[list[Stopwatch]] = []
_undo: Final = ExitStack()  # of what is around torch's functions, as long as somebody watches


def _watch(watch: Stopwatch) -> None:
    with _lock:
        if not _watching:
            original = torch.autograd.backward
            torch.autograd.backward = partial(_backward, original)
            _undo.callback(setattr, torch.autograd, "backward", original)
            _undo.callback(register_optimizer_step_pre_hook(_before_optimizer).remove)
            _undo.callback(register_optimizer_step_post_hook(_after_optimizer).remove)
        _watching.append(watch)


def _unwatch(watch: Stopwatch) -> None:
    with _lock:
        if watch in _watching:  # it is not where Ctrl-C came first
            _watching.remove(watch)
        if not _watching:
            _undo.close()


def _backward(original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
    call = partial(original, tensors, *args, **kwargs)
    for watch in tuple(_watching):  # another thread may begin or end meanwhile
        if watch.owns(partial(_trained_by, tensors)):
            call = partial(watch.run_backward, call, tensors)
    call()


def _trained_by(tensors: Any) -> Iterator[Any]:
    """Yield the tensors that get a gradient from a backward of these."""
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    nodes, seen = [one.grad_fn for one in roots if isinstance(one, torch.Tensor)], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            nodes += [one for one, _ in node.next_functions]


def _before_optimizer(optimizer: Any, *_: Any) -> None:
    for watch in tuple(_watching):  # another thread may begin or end meanwhile
        if watch.steps(optimizer):
            watch.before_optimizer(optimizer)


def _after_optimizer(optimizer: Any, *_: Any) -> None:
    for watch in tuple(_watching):  # another thread may begin or end meanwhile
        if watch.steps(optimizer):
            watch.after_optimizer()


@contextmanager
def exchange_watched(module: torch.nn.Module, watch: Stopwatch, device: torch.device) -> Iterator[None]:
    """Tell a stopwatch of each gradient in the block, where this process trains together with others on CPUs."""
    # `DistributedDataParallel` exchanges gradients while backward runs, and backward ends when the exchange does, so a
    # rank's backward time contains the wait for slower ranks. On CUDA gradients are only queued when a hook runs, so
    # nothing is told apart there.
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not together or device.type != "cpu":
        yield
        return
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _: watch.gradient_arrived())  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.is_leaf
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """Return what waits for a device's queue, or None for the CPU, which has none."""
    if device.type != "cuda":
        return None
    return lambda: torch.cuda.synchronize(device)


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
