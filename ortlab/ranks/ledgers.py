"""Ledgers of ranks that train together: what each has measured, in files and side by side."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import LedgerError
from ortlab.records import record_files
from ortlab.records.density import EMBED, LABEL
from ortlab.records.runs import Run  # noqa: TC001 - asked for when a record is read
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.records.runs import Step

SCHEMA: Final = 1
"""Version of the JSON layout of `RankLedger.to_dict`."""

_MOST: Final = 1_000_000
"""Ranks of one training: a file that names more is damaged."""

PATTERN: Final = "rank-*-of-*.json"
"""Names of the files in a folder of ledgers: "rank-00003-of-00008.json"."""


@dataclass(frozen=True)
class RankLedger:
    """What one rank has measured."""

    rank: int  #: Its number, from 0 on, and how many train together
    ranks: int  #: See `rank`
    host: str  #: Name of its machine
    process: int  #: Id of its process there
    backend: str  #: How it exchanges gradients: "gloo", "nccl"; empty without a process group
    runs: tuple[Run, ...]  #: The runs of its lab, in order

    def save(self, folder: str | Path) -> Path:
        """Write it into a folder, which is made if it is missing, and return the file's path.

        The file appears there whole, so a folder that many ranks write to can be read at any time.
        """
        target = Path(folder) / f"rank-{self.rank:05}-of-{self.ranks:05}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        part = record_files.write(target.with_suffix(f".{self.process}.part"), self.to_dict())
        return part.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> RankLedger:
        """Read what `save` wrote.

        Raises
        ------
        LedgerError
            If the file cannot be read, or is no ledger of a rank.
        """
        record = record_files.read(
            path,
            dict,
            file=f"The ledger file {path}",
            other=f"The file {path} is no ledger of a rank.",
            fix="Give files that ortlab.ranks.save_rank wrote.",
        )
        return cls.from_dict(record)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, readable by `from_dict`."""
        return {"schema": SCHEMA, **record_files.plain(vars(self))}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RankLedger:
        """Read what `to_dict` wrote.

        Raises
        ------
        LedgerError
            If the record has another layout, or lacks a field.
        """
        with record_files.explained("This ledger of a rank"):
            fields = record_files.without_layout(record, SCHEMA, "This ledger of a rank")
            read = record_files.checked(record_files.rebuilt(cls, fields))
            if not 0 <= read.rank < read.ranks <= _MOST:
                raise ValueError(f"rank is {read.rank} of {read.ranks}")
            return read


def rank_ledger(runs: Iterable[Run]) -> RankLedger:
    """Make the ledger of this rank."""
    # The rank comes from `torch.distributed`, or, where no process group is there any more, from the variables that
    # torchrun, accelerate and Slurm set; a process without either is rank 0 of 1.
    rank, ranks, backend = _place()
    return RankLedger(rank, ranks, platform.node(), os.getpid(), backend, tuple(runs))


def _place() -> tuple[int, int, str]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), str(dist.get_backend())
    for rank, ranks in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if (found := os.environ.get(rank)) and (count := os.environ.get(ranks)):
            return int(found), int(count), ""
    return 0, 1, ""


def save_rank(runs: Iterable[Run], folder: str | Path) -> Path:
    """Write the ledger of this process into a folder that all ranks write to.

    Call it on every rank of a training under torchrun, accelerate or Slurm. `ortlab.load(folder)` opens the files, on
    any machine, also while some are missing.

    Parameters
    ----------
    runs
        The ledger: `lab.runs`.
    folder
        Made if it is missing. A file of an earlier training of the same rank is replaced.

    Returns
    -------
    Path
        The file, "rank-00000-of-00002.json".

    Examples
    --------
    >>> ortlab.ranks.save_rank(lab.runs, "ledgers")
    """
    return rank_ledger(runs).save(folder)


@dataclass(frozen=True)
class RankRun:
    """One run as one rank has measured it: what it computes, and what it waits for."""

    ledger: RankLedger
    run: Run

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self.ledger.rank

    @property
    def step_ms(self) -> float:
        """Median wall time of a warm step, in ms; with gradients exchanged in each, about the same on all ranks."""
        return self.run.step_ms

    @property
    def computing_ms(self) -> float | None:
        """Median time in a warm step that the rank computes, in ms; None if that is not told apart.

        That is its forward, its backward up to its last gradient, and its optimizer: in none of them it waits.
        """
        return _median([step_computing_ms(step) for step in self.run.warm_steps])

    @property
    def exchange_ms(self) -> float | None:
        """Median time in a warm step from a rank's last gradient to the end of backward; None if not told."""
        return _median([step.exchange_ms for step in self.run.warm_steps])

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the run, in bytes; None where it cannot be told."""
        return self.run.memory.peak_bytes if self.run.memory else None

    @property
    def tokens(self) -> int | None:
        """Tokens in all steps, padding left out; None unless `print_input_density` was on.

        A tensor that is passed twice, as inputs and as labels, counts once.
        """
        labels = {(row.step, row.name) for row in self.run.density.rows if row.kind == LABEL}
        counted: dict[object, int] = {}
        for row in self.run.density.rows:
            if row.kind == EMBED:
                same = (row.step, row.total, row.valid_per_sample)
                counted[same if (row.step, row.name) in labels else (row.step, row.name)] = row.valid
        return sum(counted.values()) if counted else None


def _median(times: list[float | None]) -> float | None:
    told = [time for time in times if time is not None]
    return statistics.median(told) if len(told) == len(times) else None


def step_computing_ms(step: Step) -> float | None:
    """Return the time in a step that a rank computes and does not wait, in ms; None if that is not told apart."""
    if step.exchange_ms is None:
        return None
    return step.forward_ms + step.backward_ms - step.exchange_ms + step.optimizer_ms


@dataclass(frozen=True, repr=False)
class Ranks(Shown):
    """The ledgers of the ranks that train together."""

    ledgers: tuple[RankLedger, ...]  #: One for each rank that has given its own, in order of the ranks
    number: int = 0  #: The run that is shown; 0 for the last that all of them have

    def __post_init__(self) -> None:
        """Sort the ledgers, and refuse those that do not belong together.

        Raises LedgerError where there is none, or two are of the same rank, or of trainings with different numbers of
        ranks.
        """
        if not self.ledgers:
            raise LedgerError(
                "There is no ledger of a rank.", fix="On each rank: ortlab.ranks.save_rank(lab.runs, folder)."
            )
        sizes = sorted({one.ranks for one in self.ledgers})
        if len(sizes) > 1:
            raise LedgerError(
                "These ledgers are of different trainings.",
                why=f"They are of {' and '.join(map(str, sizes))} ranks.",
                fix="Let each training write into a folder of its own.",
            )
        if len({one.rank for one in self.ledgers}) < len(self.ledgers):
            raise LedgerError("Two of these ledgers are of the same rank.", fix="Give each rank's file once.")
        ordered = sorted(self.ledgers, key=lambda one: one.rank)
        object.__setattr__(self, "ledgers", tuple(ordered))
        if self.number and self.number not in self.numbers:
            known = ", ".join(map(str, self.numbers)) or "none"
            raise LedgerError(f"There is no run {self.number} on all ranks.", fix=f"On all of them: {known}.")

    @property
    def ranks(self) -> int:
        """How many ranks the training had."""
        return self.ledgers[0].ranks

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose ledger is not there: they died, or have not saved it."""
        there = {one.rank for one in self.ledgers}
        return tuple(rank for rank in range(self.ranks) if rank not in there)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the machines that the ranks are on."""
        return tuple(sorted({one.host for one in self.ledgers}))

    @property
    def is_spread_out(self) -> bool:
        """Whether the ranks are on more than one machine."""
        return len(self.hosts) > 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the runs that every ledger has."""
        every = [{run.number for run in one.runs} for one in self.ledgers]
        return tuple(sorted(set.intersection(*every)))

    @property
    def shown(self) -> int:
        """Number of the run that is shown; 0 if the ranks have none in common."""
        return self.number or max(self.numbers, default=0)

    def of(self, number: int) -> Ranks:
        """Show another run.

        Raises
        ------
        LedgerError
            If a rank has no run of that number.
        """
        return Ranks(self.ledgers, number)

    def rows(self) -> tuple[RankRun, ...]:
        """Return the run that is shown as each rank has measured it; empty if there is none."""
        return tuple(
            RankRun(one, run) for one in self.ledgers for run in one.runs if run.number == self.shown
        )

    def spread(self) -> float | None:
        """Return how uneven the ranks are: time of the slowest over the mean, mean of the warm steps; 1 is even.

        Returns
        -------
        float or None
            Of what each rank computes, `RankRun.computing_ms`: in the exchange of gradients the quick ones wait. None
            where that is not told apart, or there are fewer than two ranks.
        """
        rows = self.rows()
        if len(rows) <= 1:
            return None
        steps = [list(map(step_computing_ms, row.run.warm_steps)) for row in rows]
        ratios = []
        for together in zip(*steps, strict=False):
            times = [time for time in together if time is not None]
            if len(times) < len(rows) or not sum(times):
                return None
            ratios.append(max(times) / statistics.mean(times))
        return statistics.mean(ratios) if ratios else None

    def cautions(self) -> tuple[str, ...]:
        """Say what has to be known before the figures are believed, a sentence each; usually nothing."""
        rows, found = self.rows(), []
        if self.missing:
            ranks = ", ".join(map(str, self.missing))
            found.append(f"No ledger of rank {ranks}: it died, or has not saved it.")
        uneven = {len(one.runs) for one in self.ledgers}
        if len(uneven) > 1:
            found.append("The ranks have different numbers of runs; shown is one that all have.")
        if len({row.run.executed_by for row in rows}) > 1:
            found.append("Not all ranks were executed by the same engine; see the table.")
        found += [
            f"Rank {row.rank} fell back to PyTorch: {row.run.fallback_reason or 'no reason was recorded'}"
            for row in rows
            if row.run.fell_back
        ]
        if len({len(row.run.steps) for row in rows}) > 1:
            found.append("The ranks made different numbers of steps.")
        if len({row.run.options for row in rows}) > 1:
            found.append("The ranks had different switches.")
        return tuple(found)

    def table(self) -> pd.DataFrame:
        """One row per rank and run: where it ran, times in ms, memory in bytes, tokens."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "rank": row.rank,
                    "run": row.run.number,
                    "host": row.ledger.host,
                    "device": row.run.device,
                    "executed by": row.run.executed_by,
                    "steps": len(row.run.steps),
                    "last loss": row.run.losses[-1],
                    "step [ms]": row.step_ms,
                    "computing [ms]": row.computing_ms,
                    "exchange [ms]": row.exchange_ms,
                    "peak [bytes]": row.peak_bytes,
                    "tokens": row.tokens,
                }
                for one in self.ledgers
                for row in (RankRun(one, run) for run in one.runs)
            ]
        )

    def save(self, folder: str | Path) -> Path:
        """Write one file for each rank into a folder, and return the folder."""
        for one in self.ledgers:
            one.save(folder)
        return Path(folder)

    @classmethod
    def load(cls, source: str | Path | Iterable[str | Path]) -> Ranks:
        """Read the ledgers that ranks have written, here or on other machines.

        Parameters
        ----------
        source
            The folder of `save_rank`, or the files.

        Raises
        ------
        LedgerError
            If there are none, one cannot be read, or they do not belong together.
        """
        if isinstance(source, (str, Path)):
            folder = Path(source)
            files: Sequence[str | Path] = sorted(folder.glob(PATTERN)) if folder.is_dir() else [folder]
            if not files:
                raise LedgerError(
                    f"The folder {folder} has no ledger of a rank.",
                    why=f"No file in it is called {PATTERN}.",
                    fix="On each rank: ortlab.ranks.save_rank(lab.runs, folder).",
                )
        else:
            files = list(source)
        ranks = cls(tuple(RankLedger.load(file) for file in files))
        return record_files.shown(ranks, f"The ledgers in {source}")
