"""What each process of a cluster runs to measure how long it computes, and how long it waits for the slowest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


def timed_steps(
    make_step: Callable[[int], Callable[[Sequence[int]], object]],
    batches: Sequence[Sequence[Sequence[int]]],
    steps: int,
) -> tuple[list[float], list[float]]:
    """Run this rank's batches, step by step with the others.

    Parameters
    ----------
    make_step
        Called with the rank, returns what computes a batch.
    batches
        By rank, its batches.
    steps
        How many all ranks have. The first batch is computed once before that, untimed.

    Returns
    -------
    busy, waited
        ms by step.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    step = make_step(rank)
    if steps:
        step(batches[rank][0])
    busy, waited = [], []
    for batch in batches[rank][:steps]:
        dist.barrier()
        start = time.perf_counter()
        step(batch)
        done = time.perf_counter()
        dist.barrier()
        busy.append(1000 * (done - start))
        waited.append(1000 * (time.perf_counter() - done))
    return busy, waited
