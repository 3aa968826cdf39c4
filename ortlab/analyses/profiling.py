"""The times of a step, node by node: it runs again in a session that ORT's profiler watches."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from ortlab.analyses.builds import engine_of, on_ort
from ortlab.errors import ExecutionError, OptionError, OrtlabError
from ortlab.options.configuration import Configuration
from ortlab.records.runs import EXECUTED_BY_ORT, EXECUTED_BY_PARTS
from ortlab.runs.experiment import check_count, leaving_no_trace
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.stopwatch import synchronizer

if TYPE_CHECKING:
    from ortlab.engine.ort import OrtEngine
    from ortlab.engine.profiling import Profile
    from ortlab.memory.trace import Trace
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment

_STEPS: Final = 3
"""The first profiled step is slower: its memory is new."""


def profile(
    bench: Bench,
    n: int = _STEPS,
    *,
    part: str | None = None,
    baseline: Literal["eager"] | None = None,
    memory_efficient_order: bool = False,
    progress: bool = True,
) -> Trace:
    """Run the last step again while ORT's profiler watches, and go back to where the lab was.

    The step runs on ONNX Runtime with the present switches, whichever engine the lab is set to. With a baseline it runs
    in PyTorch, too, and the times of both engines stand beside each other, module by module.

    Parameters
    ----------
    n
        How often; each kernel's time is the shortest of them.
    part
        Path of the part to profile, where several parts of the model are wrapped.
    baseline
        "eager": time each module in PyTorch as well. A module's time is its own, without its children's, and the
        shortest of `n` steps.
    memory_efficient_order
        Whether nodes run in the order that ORT gives to sessions with recompute plans, though there may be none.
    progress
        Whether to show a progress bar on a terminal.

    Returns
    -------
    Trace
        Every node that ran, in its order, with time and size of its results; `by_module` has them module by module.

    Raises
    ------
    OptionError
        If it is not clear which part is meant, or the baseline is another than "eager".
    ExecutionError
        If PyTorch executed a step, as a fallback, or the step does not train.
    StepError
        If no step has run yet, or one is running.
    Exception
        Whatever the step raises. Weights and optimizer are then as they were before this call.
    """
    if baseline not in (None, "eager"):
        raise OptionError(
            f"A profile cannot be held against {baseline!r}.",
            why="Only PyTorch's own modules are timed beside it.",
            fix='Use baseline="eager".',
        )
    with profiled_step(bench, n, part, memory_efficient_order, progress=progress) as (seen, engine):
        in_order = memory_efficient_order or engine.execution.orders_for_memory
        path = next(iter(bench.engines(part)))
        order = "memory efficient" if in_order else "default"
        trace = seen.trace(engine.execution.plans, order, bench.module, path)
    if baseline is None:
        return trace
    times = eager_times(bench, n, progress=progress)
    inside = {one: ms for one, ms in times.items() if not path or one == path or one.startswith(f"{path}.")}
    return replace(trace, eager=inside)


def eager_times(bench: Bench, steps: int, *, progress: bool) -> dict[str, float]:
    """Run the last step in PyTorch, and return the ms of each module by its path: the shortest of the steps."""
    experiment = bench.last_experiment()
    found: list[dict[str, float]] = []

    @contextmanager
    def timing() -> Iterator[None]:
        with ModuleClock(bench.module).running() as times:
            yield
        found.append(times)

    with bench.as_before(experiment):
        bench.configure(Configuration("eager", bench.options))
        repeat(bench, experiment, steps + 1, "Profiling PyTorch", progress=progress, timing=timing)
    timed = found[1:]  # the first one's memory is new, which takes time
    return {path: min(one.get(path, 0.0) for one in timed) for one in timed for path in one}


def spent_on(bench: Bench, configuration: Configuration, *, progress: bool) -> str:
    """Profile the last step under a configuration, and say what most of its time goes to; "" where that fails."""
    from ortlab import units

    try:
        with bench.as_before(bench.last_experiment()):
            bench.configure(configuration)
            shares = profile(bench, progress=progress).slowest()
    except OrtlabError:
        return ""
    return ", ".join(f"{name} ({units.rounded_percent(share)})" for name, share in shares.items())


@contextmanager
def profiled_step(
    bench: Bench,
    steps: int,
    part: str | None = None,
    memory_efficient_order: bool = False,  # noqa: FBT001, FBT002 - as `profile`
    *,
    progress: bool = True,
) -> Iterator[tuple[Profile, OrtEngine]]:
    """Yield what was seen of the last step while ORT's profiler watched; then go back to where the lab was."""
    bench.check_usable("profile a step")
    check_count(steps)
    experiment = bench.last_experiment()
    engine = engine_of(bench, part, "a session")
    from ortlab.engine.profiling import profiled

    with bench.as_before(experiment), on_ort(bench):
        if engine.pending_stage():
            repeat(bench, experiment, 1, "Building", progress=progress)
        for _ in range(2):  # the first one takes another export where the model has changed since
            execution = engine.execution
            with profiled(execution, memory_efficient_order=memory_efficient_order) as seen:
                timing = partial(seen.timing, "step")
                repeat(bench, experiment, steps, "Profiling", progress=progress, timing=timing)
            if engine.execution is execution:
                break
        yield seen, engine


def repeat(
    bench: Bench,
    experiment: Experiment,
    count: int,
    what: str,
    *,
    progress: bool,
    timing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run steps on the engine that is set, from the start of an experiment, and record nothing."""
    # PyTorch does not step in for ONNX Runtime.
    experiment.start.put_back()
    with (
        leaving_no_trace(experiment.step),
        interrupts_kept() as raise_lost,
        bench.progress.task(count, what=what, show=progress) as bar,
    ):
        for number in range(1, count + 1):
            raise_lost()
            with timing():
                experiment.step()
            if bench.engine.name == "ort" and bench.executed_by not in (EXECUTED_BY_ORT, EXECUTED_BY_PARTS):
                raise ExecutionError(
                    "ONNX Runtime did not execute the step that was to be profiled.",
                    why=bench.status.reason or "PyTorch did.",
                    fix="Correct that, or wrap a part of the model only.",
                )
            bar.begin(f"{what}: step {number} of {count}", number)


# ---- PyTorch's times, module by module -----------------------------------------------------------------------------
#
# The forward is timed where modules are called. What autograd has recorded when a module returns, and no module in it
# has recorded, is that module's: each of these nodes is timed when the backward runs it.


class ModuleClock:
    """Measures how long each module of a model runs, and each node of the backward that it has recorded."""

    # Times are a module's own, without its children's, in ms by its path.

    def __init__(self, model: torch.nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        devices = {tensor.device for tensor in model.parameters()}
        self._waits = [wait for wait in map(synchronizer, devices) if wait is not None]
        self._times: defaultdict[str, float] = defaultdict(float)
        self._open: list[list[float]] = []  # of what runs: when it began, and the seconds of what ran inside
        self._nodes: dict[Any, list[torch.utils.hooks.RemovableHandle]] = {}

    @contextmanager
    def running(self) -> Iterator[dict[str, float]]:
        """Yield the ms by path of what runs in the block. PyTorch calls these hooks for every module there is."""
        hooks = [register_module_forward_pre_hook(lambda module, _: self._enter(module))]
        hooks.append(
            register_module_forward_hook(lambda module, _, out: self._leave(module, out), always_call=True)
        )
        try:
            yield self._times
        finally:
            for hook in (*hooks, *(one for both in self._nodes.values() for one in both)):
                hook.remove()

    def _enter(self, module: torch.nn.Module) -> None:
        if id(module) in self._paths:
            self._begin()

    def _leave(self, module: torch.nn.Module, outputs: Any) -> None:
        if id(module) in self._paths:
            self._end(path := self._paths[id(module)])
            before = time.perf_counter()
            tensors = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
            waiting = [leaf.grad_fn for leaf in tensors]
            while waiting:
                node = waiting.pop()
                if node is not None and node not in self._nodes:
                    self._nodes[node] = [
                        node.register_prehook(lambda _: self._begin()),
                        node.register_hook(lambda _, __: self._end(path)),
                    ]
                    waiting += [one for one, _ in node.next_functions]
            if self._open:
                self._open[-1][1] += time.perf_counter() - before

    def _begin(self) -> None:
        self._open.append([self._now(), 0.0])

    def _end(self, path: str) -> None:
        began, inside = self._open.pop()
        seconds = self._now() - began
        self._times[path] += (seconds - inside) * 1000
        if self._open:
            self._open[-1][1] += seconds

    def _now(self) -> float:
        for wait in self._waits:
            wait()
        return time.perf_counter()
