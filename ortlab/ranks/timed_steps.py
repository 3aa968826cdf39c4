"""What each process of a cluster runs to measure how long it computes, and how long it waits for the slowest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

ByRank = Sequence[Sequence[Sequence[int]]]
"""By rank, its batches, each the indices of its samples."""


def timed_steps(
    make_step: Callable[[int], Callable[[Sequence[int]], object]], epochs: Sequence[ByRank]
) -> list[tuple[list[float], list[float]]]:
    """Run this rank's batches of several epochs, step by step with the others.

    The epochs take turns in each step, and in each step another one begins: what else the machine does meets all alike.

    Parameters
    ----------
    make_step
        Called with the rank, returns what computes a batch.
    epochs
        The batches of each. Those that not all ranks have are left out. The first of each is computed once before all,
        untimed.

    Returns
    -------
    list of (busy, waited)
        For each epoch, ms by step.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    step = make_step(rank)
    steps = [min(map(len, epoch)) for epoch in epochs]
    for epoch, count in zip(epochs, steps, strict=True):
        if count:
            step(epoch[rank][0])
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in epochs]
    for number in range(max(steps, default=0)):
        first = number % len(epochs)
        for place in (*range(first, len(epochs)), *range(first)):
            if number >= steps[place]:
                continue
            batch, (busy, waited) = epochs[place][rank][number], found[place]
            dist.barrier()
            start = time.perf_counter()
            step(batch)
            done = time.perf_counter()
            dist.barrier()
            busy.append(1000 * (done - start))
            waited.append(1000 * (time.perf_counter() - done))
    return found
