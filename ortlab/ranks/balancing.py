"""Load balancing: how evenly the tokens of an epoch are spread over ranks that train together, with it and without.

`balance` deals a data set out, `measured` runs what was dealt, and `Balance` is the record of both.
"""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ortlab import units
from ortlab.errors import OptionError
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.ranks.cluster import Cluster

Batches: TypeAlias = tuple[tuple[int, ...], ...]
"""Batches of one rank, each the indices of its samples."""


@dataclass(frozen=True)
class Timing:
    """What the ranks measured in one epoch, in ms, by rank and step."""

    busy_ms: tuple[tuple[float, ...], ...]
    """How long it computed."""
    waited_ms: tuple[tuple[float, ...], ...]
    """How long it then waited for the slowest."""

    @property
    def epoch_ms(self) -> float:
        """Time of the epoch: in each step that of the slowest rank."""
        return math.fsum(map(max, zip(*self.busy_ms, strict=True)))

    @property
    def lost_ms(self) -> float:
        """Mean over the ranks of the time that they waited for others."""
        return statistics.mean(map(sum, self.waited_ms))


@dataclass(frozen=True)
class Epoch:
    """One epoch, as a sampler gives it to the ranks."""

    batches: tuple[Batches, ...]
    """By rank: its batches, in order."""
    timing: Timing | None = None
    """What was measured; None if it was not run."""

    @property
    def steps(self) -> int:
        """Steps that all ranks make together."""
        return min(map(len, self.batches), default=0)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have as many batches; where they do not, one waits for the others forever."""
        return len({len(one) for one in self.batches}) <= 1

    def seen(self) -> Counter[int]:
        """Count how often each sample is trained on, over all ranks."""
        return Counter(index for rank in self.batches for batch in rank for index in batch)


@dataclass(frozen=True, repr=False)
class Balance(Shown, JsonRecord, noun="record of a load balance", layout=1):
    """Epochs with and without load balancing."""

    sizes: tuple[int, ...]  #: Tokens of each sample of the data set: what it is balanced by
    #: Epochs of torch's `DistributedSampler`, and of the load balancing batch sampler.
    without: tuple[Epoch, ...]
    having: tuple[Epoch, ...]  #: See `without`
    #: Whether a batch counts as its longest sample times its samples, as where it is padded, or as the tokens it has.
    padded: bool
    batch_size: int  #: Samples of a batch; 0 where a function of the user makes the batches
    drop_last: bool  #: Whether what does not make a step for all ranks is left out

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return len(self.having[0].batches)

    def tokens(self, epoch: Epoch) -> list[list[int]]:
        """Return the tokens of each step, by rank."""
        return [[self._tokens(rank[step]) for rank in epoch.batches] for step in range(epoch.steps)]

    def imbalance(self, epochs: Sequence[Epoch]) -> float:
        """Return maximum over mean tokens per rank, averaged over the steps; 1 is even."""
        ratios = self._ratios(epochs)
        return statistics.mean(ratios) if ratios else 1.0

    def worst(self, epochs: Sequence[Epoch]) -> float:
        """Return maximum over mean tokens per rank in the least even step."""
        return max(self._ratios(epochs), default=1.0)

    def waiting(self, epochs: Sequence[Epoch]) -> float:
        """Return what part of the ranks' time is waiting, if time goes with tokens: 1 - mean / maximum, by step."""
        steps = [step for epoch in epochs for step in self.tokens(epoch)]
        longest = sum(max(step) for step in steps)
        return 1 - sum(statistics.mean(step) for step in steps) / longest if longest else 0.0

    def missing(self, epoch: Epoch) -> tuple[int, ...]:
        """Return the samples that an epoch does not train on."""
        seen = epoch.seen()
        return tuple(index for index in range(len(self.sizes)) if not seen[index])

    def repeated(self, epoch: Epoch) -> int:
        """Return how many samples more an epoch trains on than there are different ones."""
        return sum(count - 1 for count in epoch.seen().values())

    @property
    def never_seen(self) -> tuple[int, ...]:
        """Samples that no epoch with load balancing trains on."""
        seen = Counter[int]()
        for epoch in self.having:
            seen |= epoch.seen()
        return tuple(index for index in range(len(self.sizes)) if not seen[index])

    @property
    def lost_ms(self) -> tuple[float, float] | None:
        """Time that a rank waits in an epoch, without and with, in ms, measured; None if nothing was run."""
        return self._means("lost_ms")

    @property
    def epoch_ms(self) -> tuple[float, float] | None:
        """Time of an epoch, without and with, in ms, measured; None if nothing was run."""
        return self._means("epoch_ms")

    def table(self) -> pd.DataFrame:
        """One row per sampler, epoch, step and rank: samples, tokens, and, if it was run, its times in ms."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "balancing": name,
                    "epoch": number,
                    "step": step,
                    "rank": rank,
                    "samples": len(epoch.batches[rank][step - 1]),
                    "tokens": count,
                    "busy [ms]": epoch.timing.busy_ms[rank][step - 1] if epoch.timing else None,
                    "waited [ms]": epoch.timing.waited_ms[rank][step - 1] if epoch.timing else None,
                }
                for name, epochs in (("without", self.without), ("with", self.having))
                for number, epoch in enumerate(epochs, start=1)
                for step, tokens in enumerate(self.tokens(epoch), start=1)
                for rank, count in enumerate(tokens)
            ]
        )

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Balance:
        made = super()._of_fields(fields)
        counts = {len(one.batches) for one in (*made.without, *made.having)}
        if not made.without or not made.having or len(counts) != 1:
            raise ValueError("its epochs are not of the same ranks")
        return made

    def _ratios(self, epochs: Sequence[Epoch]) -> list[float]:
        """Return maximum over mean tokens per rank of each step."""
        return [max(step) / statistics.mean(step) for epoch in epochs for step in self.tokens(epoch)]

    def _means(self, name: str) -> tuple[float, float] | None:
        found = [[one.timing for one in epochs if one.timing] for epochs in (self.without, self.having)]
        if not all(found):
            return None
        without, having = (statistics.mean(getattr(one, name) for one in timings) for timings in found)
        return without, having

    def _tokens(self, batch: Sequence[int]) -> int:
        sizes = [self.sizes[index] for index in batch]
        return max(sizes) * len(sizes) if self.padded else sum(sizes)


ByRank = Sequence[Sequence[Sequence[int]]]  # batches, each the indices of its samples
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
    """How samples are dealt out, as the samplers take it."""

    shuffle: bool = True
    """Whether the steps come in random order, by `seed`."""
    seed: int = 0
    random_level: float = 0.0
    """How random the lengths are made before samples are sorted by them: 0 balances best, 1 least."""
    drop_last: bool = False
    """Whether what does not make a step for all ranks is left out, or else samples are repeated."""


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

    samplers: list[DistributedSampler[int]] = [
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
    return _dealt(samplers, epochs, lambda sampler: batch_fn(list(sampler)))


def _balanced(
    sizes: list[int], ranks: int, batch_fn: BatchFunction, epochs: int, how: Dealing
) -> tuple[Epoch, ...]:
    from ortlab.engine.samplers import samplers

    sampler_class, batch_sampler_class = samplers()
    made = [
        batch_sampler_class(
            sampler_class(
                sizes,
                complexity_fn=int,
                world_size=ranks,
                rank=rank,
                shuffle=how.shuffle,
                seed=how.seed,
                random_level=how.random_level,
            ),
            batch_fn=batch_fn,
            drop_last=how.drop_last,
        )
        for rank in range(ranks)
    ]
    return _dealt(made, epochs, list)


def _dealt(
    samplers: Sequence[Any], epochs: int, batches: Callable[[Any], Sequence[Sequence[int]]]
) -> tuple[Epoch, ...]:
    """Let the samplers of all ranks deal each epoch anew; `batches` reads those of one rank."""
    made = []
    for epoch in range(epochs):
        for one in samplers:
            one.set_epoch(epoch)
        made.append(Epoch(tuple(tuple(tuple(map(int, batch)) for batch in batches(one)) for one in samplers)))
    return tuple(made)


def _timed(cluster: Cluster, make_step: MakeStep, epochs: Sequence[Epoch]) -> Iterator[Epoch]:
    """Yield the epochs with what was measured when they ran side by side."""
    found = cluster.run(
        timed_steps, make_step, [[list(map(list, rank)) for rank in one.batches] for one in epochs]
    )
    for number, epoch in enumerate(epochs):
        busy, waited = zip(*(rank[number] for rank in found), strict=True)
        yield replace(epoch, timing=Timing(tuple(map(tuple, busy)), tuple(map(tuple, waited))))


def _positive(number: object, name: str, example: str) -> int:
    if not units.is_whole(number, 1):
        raise OptionError(
            f"{name} is {number!r}.", fix=f"Give a whole number above 0, for example {example}."
        )
    return number


def timed_steps(make_step: MakeStep, epochs: Sequence[ByRank]) -> list[tuple[list[float], list[float]]]:
    """Run this rank's batches of several epochs, step by step with the others; return busy and waited ms of each.

    The epochs take turns in each step, and in each step another one begins: what else the machine does meets all alike.
    `make_step` is called with the rank, and returns what computes a batch. Batches that not all ranks have are left
    out; the first of each epoch is computed once before all, untimed.
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
