"""The times of a step in PyTorch, module by module, so that a profile of ONNX Runtime can stand beside them.

The forward is timed where modules are called. What autograd has recorded when a module returns, and no module in it has
recorded, is that module's: each of these nodes is timed when the backward runs it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from ortlab.options.configuration import Configuration
from ortlab.runs.experiment import leaving_no_trace
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.stopwatch import synchronizer

if TYPE_CHECKING:
    from ortlab.runs.bench import Bench


def eager_times(bench: Bench, steps: int, *, progress: bool) -> dict[str, float]:
    """Run the last step in PyTorch, and return the ms of each module by its path: its own, without its children's.

    Each is the shortest of the steps. The bench is then as it was. Raises StepError if no step has run yet, and
    whatever the step raises.
    """
    experiment = bench.last_experiment()
    found: list[dict[str, float]] = []
    with bench.as_before(experiment):
        bench.configure(Configuration("eager", bench.options))
        experiment.start.put_back()
        with (
            leaving_no_trace(experiment.step),
            interrupts_kept() as raise_lost,
            bench.progress.task(steps + 1, what="Profiling PyTorch", show=progress) as bar,
        ):
            experiment.step()  # its memory is new, which takes time
            for number in range(1, steps + 1):
                raise_lost()
                bar.begin(f"Profiling PyTorch: step {number} of {steps}", number)
                with _Clock(bench.module).running() as times:
                    experiment.step()
                found.append(times)
    return {path: min(one.get(path, 0.0) for one in found) for one in found for path in one}


class _Clock:
    """Measures how long each module of a model runs, and each node of the backward that it has recorded."""

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
