"""What the ranks of a training have measured, side by side: time, exchange of gradients, memory, tokens."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ortlab.errors import LedgerError
from ortlab.ranks.rank_ledger import PATTERN, RankLedger
from ortlab.ranks.rank_run import RankRun, step_computing_ms
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Ranks(Shown):
    """The ledgers of the ranks that train together.

    Attributes
    ----------
    ledgers
        One for each rank that has given its own, in order of the ranks.
    number
        The run that is shown; 0 for the last that all of them have.
    """

    ledgers: tuple[RankLedger, ...]
    number: int = 0

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
        return cls(tuple(RankLedger.load(file) for file in files))
