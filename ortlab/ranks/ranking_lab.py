"""What a lab does as one of many ranks: it writes its ledger for the others, and keeps what they have measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from ortlab.ranks.rank_ledger import rank_ledger

if TYPE_CHECKING:
    from ortlab.ranks.ranks import Ranks
    from ortlab.runs import Ledger


class RankingLab(ABC):
    """The base of `Lab` that knows of other ranks; the abstract part is the lab's."""

    runs: Ledger

    ranks: Ranks | None = None
    """What ranks have measured, as `show_ranks` took it over last; the panel shows it."""

    def save_rank(self, folder: str | Path) -> Path:
        """Write the ledger of this process into a folder that all ranks write to.

        Call it on every rank of a training under torchrun, accelerate or Slurm. `ortlab.Ranks.load(folder)` opens the
        files, on any machine, also while some are missing.

        Parameters
        ----------
        folder
            Made if it is missing. A file of an earlier training of the same rank is replaced.

        Returns
        -------
        Path
            The file, "rank-00000-of-00002.json".
        """
        return rank_ledger(self.runs).save(folder)

    def show_ranks(self, ranks: Ranks) -> None:
        """Keep what ranks have measured beside this lab's own runs, and show it in the lab's panel.

        Parameters
        ----------
        ranks
            From `Cluster.gather`, or `Ranks.load`.
        """
        self.ranks = ranks
        self._notify("runs")

    @abstractmethod
    def _notify(self, event: str) -> None: ...
