"""The times of a step in PyTorch, module by module, so that a profile of ONNX Runtime can stand beside them.

The forward is timed where modules are called. What autograd has recorded when a module returns, and no module in it has
recorded, is that module's: each of these nodes is timed when the backward runs it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from ortlab.runs.stopwatch import synchronizer


class ModuleClock:
    """Measures how long each module of a model runs, and each node of the backward that it has recorded.

    Times are a module's own, without its children's, in ms by its path.
    """

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
