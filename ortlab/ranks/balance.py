"""How evenly the tokens of an epoch are spread over the processes that train together, step by step."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

Batches: TypeAlias = tuple[tuple[int, ...], ...]
"""Batches of one rank, each the indices of its samples."""


@dataclass(frozen=True)
class Timing:
    """What the ranks measured in one epoch, in ms.

    Attributes
    ----------
    busy_ms
        By rank and step: how long it computed.
    waited_ms
        By rank and step: how long it then waited for the slowest.
    """

    busy_ms: tuple[tuple[float, ...], ...]
    waited_ms: tuple[tuple[float, ...], ...]

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
    """One epoch, as a sampler gives it to the ranks.

    Attributes
    ----------
    batches
        By rank: its batches, in order.
    timing
        What was measured; None if it was not run.
    """

    batches: tuple[Batches, ...]
    timing: Timing | None = None

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
    """Epochs with and without load balancing.

    Attributes
    ----------
    sizes
        Tokens of each sample of the data set: what it is balanced by.
    without, having
        Epochs of torch's `DistributedSampler`, and of the load balancing batch sampler.
    padded
        Whether a batch counts as its longest sample times its samples, as where it is padded, or as the tokens it has.
    batch_size
        Samples of a batch; 0 where a function of the user makes the batches.
    drop_last
        Whether what does not make a step for all ranks is left out.
    """

    sizes: tuple[int, ...]
    without: tuple[Epoch, ...]
    having: tuple[Epoch, ...]
    padded: bool
    batch_size: int
    drop_last: bool

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return len(self.having[0].batches)

    def tokens(self, epoch: Epoch) -> list[list[int]]:
        """Return the tokens of each step, by rank."""
        return [[self._tokens(rank[step]) for rank in epoch.batches] for step in range(epoch.steps)]

    def imbalance(self, epochs: Sequence[Epoch]) -> float:
        """Return maximum over mean tokens per rank, averaged over the steps; 1 is even."""
        steps = [step for epoch in epochs for step in self.tokens(epoch)]
        return statistics.mean(max(step) / statistics.mean(step) for step in steps) if steps else 1.0

    def worst(self, epochs: Sequence[Epoch]) -> float:
        """Return maximum over mean tokens per rank in the least even step."""
        steps = [step for epoch in epochs for step in self.tokens(epoch)]
        return max((max(step) / statistics.mean(step) for step in steps), default=1.0)

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
        found = [[one.timing for one in epochs if one.timing] for epochs in (self.without, self.having)]
        if not all(found):
            return None
        without, having = (statistics.mean(one.lost_ms for one in timings) for timings in found)
        return without, having

    @property
    def epoch_ms(self) -> tuple[float, float] | None:
        """Time of an epoch, without and with, in ms, measured; None if nothing was run."""
        found = [[one.timing for one in epochs if one.timing] for epochs in (self.without, self.having)]
        if not all(found):
            return None
        without, having = (statistics.mean(one.epoch_ms for one in timings) for timings in found)
        return without, having

    def table(self) -> pd.DataFrame:
        """One row per sampler, epoch, step and rank: samples, tokens, and, if it was run, its times in ms."""
        import pandas as pd

        rows = []
        for name, epochs in (("without", self.without), ("with", self.having)):
            for number, epoch in enumerate(epochs, start=1):
                for step, tokens in enumerate(self.tokens(epoch), start=1):
                    for rank, count in enumerate(tokens):
                        timing = epoch.timing
                        rows.append(
                            {
                                "balancing": name,
                                "epoch": number,
                                "step": step,
                                "rank": rank,
                                "samples": len(epoch.batches[rank][step - 1]),
                                "tokens": count,
                                "busy [ms]": timing.busy_ms[rank][step - 1] if timing else None,
                                "waited [ms]": timing.waited_ms[rank][step - 1] if timing else None,
                            }
                        )
        return pd.DataFrame(rows)

    def _fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Balance:
        epochs = {name: tuple(_epoch(one) for one in fields[name]) for name in ("without", "having")}
        return cls(**{**fields, **epochs, "sizes": tuple(fields["sizes"])})

    def _tokens(self, batch: Sequence[int]) -> int:
        sizes = [self.sizes[index] for index in batch]
        return max(sizes) * len(sizes) if self.padded else sum(sizes)


def _epoch(record: Mapping[str, Any]) -> Epoch:
    timing = record["timing"]
    return Epoch(
        tuple(tuple(map(tuple, rank)) for rank in record["batches"]),
        None
        if timing is None
        else Timing(**{key: tuple(map(tuple, value)) for key, value in timing.items()}),
    )
