"""The exchange of gradients told apart from backward: what comes after a process's own last gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ortlab.runs.measure import Stopwatch


@contextmanager
def exchange_watched(module: torch.nn.Module, watch: Stopwatch, device: torch.device) -> Iterator[None]:
    """Tell a stopwatch of each gradient in the block, where this process trains together with others on CPUs.

    `DistributedDataParallel` exchanges gradients while backward runs, and backward ends when the exchange does, so a
    rank's backward time contains the wait for slower ranks. On CUDA gradients are only queued when a hook runs, so
    nothing is told apart there.
    """
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
