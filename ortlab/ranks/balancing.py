"""Load balancing tried out: which rank gets which batches, with and without, and what each then computes and waits."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from ortlab.errors import OptionError
from ortlab.ranks.balance import Balance, Batches, Epoch, Timing

if TYPE_CHECKING:
    from ortlab.ranks import Cluster

ByRank = Sequence[Sequence[Sequence[int]]]
"""By rank, its batches, each the indices of its samples."""

BatchFunction = Callable[[list[int]], Sequence[Sequence[int]]]

MakeStep = Callable[[int], Callable[[Sequence[int]], object]]


class DataSet(Protocol):
    """A map-style data set."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""


@dataclass(frozen=True)
class Dealing:
    """How samples are dealt out, as the samplers take it.

    Attributes
    ----------
    shuffle
        Whether the steps come in random order.
    seed
        By which seed.
    random_level
        How random the lengths are made before samples are sorted by them: 0 balances best, 1 least.
    drop_last
        Whether what does not make a step for all ranks is left out, or else samples are repeated.
    """

    shuffle: bool = True
    seed: int = 0
    random_level: float = 0.0
    drop_last: bool = False


def balance(
    dataset: DataSet,
    batches: int | BatchFunction,
    *,
    ranks: int,
    complexity: Callable[[Any], int] | None = None,
    epochs: int = 1,
    padded: bool = True,
    **dealing: Any,
) -> Balance:
    """Deal the samples of a data set out to ranks, by torch's `DistributedSampler` and balanced by their lengths.

    Balanced is by ONNX Runtime's `LoadBalancingDistributedSampler` and `LoadBalancingDistributedBatchSampler`: samples
    that are about as long go to all ranks in the same step. Nothing is run; `measured` does that.

    Parameters
    ----------
    dataset
        Samples, or their lengths.
    batches
        Samples of a batch of one rank. Or what makes batches of a rank's indices: takes a list, returns a list of
        lists; without balancing it gets the indices that torch's sampler deals out.
    ranks
        Processes that train together. They need not run here.
    complexity
        Gives the length of a sample, a whole number; by default the number itself, or `len` of the sample.
    epochs
        How many epochs; each is dealt anew.
    padded
        Whether a batch costs its longest sample times its samples, as where it is padded.
    **dealing
        What `Dealing` has: `shuffle`, `seed`, `random_level`, `drop_last`.

    Returns
    -------
    Balance
        Who gets what.

    Raises
    ------
    OptionError
        If there are no samples, no ranks or no batch size, or a length is no whole number.

    Examples
    --------
    >>> record = balance(lengths, 8, ranks=4)
    >>> record.imbalance(record.without), record.imbalance(record.having)
    (1.42, 1.02)
    """
    _positive(ranks, "ranks", "ranks=2")
    _positive(epochs, "epochs", "epochs=1")
    how = _dealing(dealing)
    sizes = _sizes(dataset, complexity)
    if callable(batches):
        batch_fn, size = batches, 0
    else:
        size = _positive(batches, "The batch size", "balance(lengths, 8, ranks=2)")
        batch_fn = _Chunks(size, drop_last=how.drop_last)
    without = _plain(len(sizes), ranks, batch_fn, epochs, how)
    having = _balanced(sizes, ranks, batch_fn, epochs, how)
    return Balance(tuple(sizes), without, having, padded, size, how.drop_last)


def measured(record: Balance, cluster: Cluster, make_step: MakeStep) -> Balance:
    """Run the epochs of a balance, and write down how long each rank computes, and waits for the slowest.

    An epoch without balancing and one with it run side by side, a step of each in turn, so that what else the machine
    does meets both alike.

    Parameters
    ----------
    record
        What `balance` returned, for as many ranks as the cluster has.
    cluster
        The processes; they have to run.
    make_step
        Each rank calls it with its number, to get its step: a function of a batch's indices. It runs in another
        process, and imports what it needs itself. Each rank computes its batch and then waits for the others; an
        exchange of gradients in the step would hide who waits, so leave it out.

    Raises
    ------
    OptionError
        If the cluster has another number of ranks, or an epoch's ranks cannot make a step together.
    ExecutionError
        If a rank fails, or the cluster does not run.
    """
    if record.ranks != cluster.ranks:
        raise OptionError(
            f"The record is for {record.ranks} ranks, and the cluster has {cluster.ranks}.",
            fix=f"balance(..., ranks={cluster.ranks}), or Cluster({record.ranks}).",
        )
    if not all(epoch.steps for epoch in (*record.without, *record.having)):
        raise OptionError("There is nothing to run: no epoch has a step.", fix="Give more samples.")
    without, having = [], []
    for one, other in zip(record.without, record.having, strict=True):
        first, second = _timed(cluster, make_step, (one, other))
        without.append(first)
        having.append(second)
    return replace(record, without=tuple(without), having=tuple(having))


class _Chunks:
    """Makes batches of one size, the last of which may be smaller."""

    def __init__(self, size: int, *, drop_last: bool) -> None:
        self._size = size
        self._drop_last = drop_last

    def __call__(self, indices: list[int]) -> list[list[int]]:
        """Cut indices into batches."""
        made = [indices[start : start + self._size] for start in range(0, len(indices), self._size)]
        return made[:-1] if self._drop_last and made and len(made[-1]) < self._size else made


def _sizes(dataset: DataSet, complexity: Callable[[Any], int] | None) -> list[int]:
    try:
        count = len(dataset)
    except TypeError as error:
        raise OptionError(
            f"A {type(dataset).__name__} cannot be dealt out: it has no length.",
            fix="Give a map-style data set, or a list of the samples' lengths.",
        ) from error
    if not count:
        raise OptionError("The data set is empty.", fix="Give at least one sample.")
    sizes = []
    for index in range(count):
        sample = dataset[index]
        found = _length(sample) if complexity is None else complexity(sample)
        try:
            sizes.append(operator.index(found))
        except TypeError as error:
            raise OptionError(
                f"The length of sample {index} is {found!r}, no whole number.",
                fix="Give complexity=, a function that returns a whole number for a sample.",
            ) from error
        if sizes[-1] < 0:
            raise OptionError(f"The length of sample {index} is {sizes[-1]}.", fix="Lengths are at least 0.")
    if not any(sizes):
        raise OptionError("No sample has any tokens.", fix="Give complexity=, which returns lengths above 0.")
    return sizes


def _length(sample: Any) -> Any:
    try:
        return operator.index(sample)
    except TypeError:
        return len(sample) if hasattr(sample, "__len__") else sample


def _dealing(given: Mapping[str, Any]) -> Dealing:
    known = {field.name for field in fields(Dealing)}
    if unknown := sorted(set(given) - known):
        raise OptionError(
            f"The samplers have no {unknown[0]!r}.", fix=f"They have {', '.join(sorted(known))}."
        )
    how = Dealing(**given)
    if not 0 <= how.random_level <= 1:
        raise OptionError(f"random_level is {how.random_level!r}.", fix="Give a number from 0 to 1.")
    return how


def _plain(count: int, ranks: int, batch_fn: BatchFunction, epochs: int, how: Dealing) -> tuple[Epoch, ...]:
    from torch.utils.data import DistributedSampler

    dealt: list[DistributedSampler[int]] = [
        DistributedSampler(
            range(count),  # type: ignore[arg-type] # all that it needs of a data set
            ranks,
            rank,
            shuffle=how.shuffle,
            seed=how.seed,
            # torch leaves samples out here, ONNX Runtime batches.
            drop_last=how.drop_last,
        )
        for rank in range(ranks)
    ]
    made = []
    for epoch in range(epochs):
        for sampler in dealt:
            sampler.set_epoch(epoch)
        made.append(Epoch(tuple(_frozen(batch_fn(list(sampler))) for sampler in dealt)))
    return tuple(made)


def _balanced(
    sizes: list[int], ranks: int, batch_fn: BatchFunction, epochs: int, how: Dealing
) -> tuple[Epoch, ...]:
    from ortlab.engine.samplers import samplers

    sampler_class, batch_sampler_class = samplers()
    dealt = []
    for rank in range(ranks):
        sampler = sampler_class(
            sizes,
            complexity_fn=int,
            world_size=ranks,
            rank=rank,
            shuffle=how.shuffle,
            seed=how.seed,
            random_level=how.random_level,
        )
        dealt.append(batch_sampler_class(sampler, batch_fn=batch_fn, drop_last=how.drop_last))
    made = []
    for epoch in range(epochs):
        for one in dealt:
            one.set_epoch(epoch)
        made.append(Epoch(tuple(_frozen(list(one)) for one in dealt)))
    return tuple(made)


def _timed(cluster: Cluster, make_step: MakeStep, epochs: Sequence[Epoch]) -> Iterator[Epoch]:
    """Yield the epochs with what was measured when they ran side by side."""
    found = cluster.run(
        timed_steps, make_step, [[list(map(list, rank)) for rank in one.batches] for one in epochs]
    )
    for number, epoch in enumerate(epochs):
        busy, waited = zip(*(rank[number] for rank in found), strict=True)
        yield replace(epoch, timing=Timing(tuple(map(tuple, busy)), tuple(map(tuple, waited))))


def _frozen(batches: Sequence[Sequence[int]]) -> Batches:
    return tuple(tuple(map(int, batch)) for batch in batches)


def _positive(number: object, name: str, example: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise OptionError(
            f"{name} is {number!r}.", fix=f"Give a whole number above 0, for example {example}."
        )
    return number


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
