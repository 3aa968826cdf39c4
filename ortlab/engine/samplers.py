"""The two samplers of onnxruntime.training.utils.data, repaired: they balance the load of processes.

As released, 1.19.2's ``sampler.py`` cannot be used for a second epoch, and gives processes different numbers of
batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from ortlab.engine import load
from ortlab.engine.patching import replace


def samplers() -> tuple[Any, Any]:
    """Return `LoadBalancingDistributedSampler` and `LoadBalancingDistributedBatchSampler`, ready to use.

    They are the classes of onnxruntime.training.utils.data: who imports them from there has them repaired, too,
    once this has been called.
    """
    load()
    from onnxruntime.training.utils.data import (
        LoadBalancingDistributedBatchSampler,
        LoadBalancingDistributedSampler,
    )

    install(LoadBalancingDistributedSampler, LoadBalancingDistributedBatchSampler)
    return LoadBalancingDistributedSampler, LoadBalancingDistributedBatchSampler


def install(sampler: Any, batch_sampler: Any) -> None:
    """Repair both classes; a second call changes nothing."""
    replace(sampler, "_sort_shard_and_shuffle_dataset", _sort_in_each_epoch)
    replace(batch_sampler, "generate_batches", _as_many_for_each_rank)


def _sort_in_each_epoch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a sampler be asked more than once."""
    # From the second time on, ``if not self.sample_complexities`` asks an array for its truth, which raises a
    # ValueError; and groups are cut from complexities that were sorted in the first epoch only.

    def sort_shard_and_shuffle_dataset(self: Any) -> Any:
        known = self.sample_complexities
        if known is not None:
            self.sample_complexities = _Known(known)
        self.ordered_sample_complexities = None  # it is sorted again, which takes no time beside an epoch
        try:
            return original(self)
        finally:
            self.sample_complexities = known if known is not None else self.sample_complexities

    return sort_shard_and_shuffle_dataset


class _Known:
    """An array that is true, as a list of its rows would be."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Any:
        return iter(self._array)

    def copy(self) -> Any:
        """Copy the array."""
        return self._array.copy()


def _as_many_for_each_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give each rank as many batches as it says."""
    # ``batch + batch[: total - len(batch)]`` adds batches where it should leave some out, because the difference is
    # negative with ``drop_last``; and repeats the batches of a rank once at most. Ranks with different numbers of
    # batches wait for each other forever.

    def generate_batches(self: Any) -> None:
        made: list[list[Any]] = []
        batch_fn = self.batch_fn

        def remember(indices: list[int]) -> list[Any]:
            batches = list(batch_fn(indices))
            made.append(batches)
            return batches

        self.batch_fn = remember
        try:
            original(self)
        finally:
            self.batch_fn = batch_fn
        self.padded_batches = [
            list(itertools.islice(itertools.cycle(batches), self.total_batch)) for batches in made
        ]

    return generate_batches
