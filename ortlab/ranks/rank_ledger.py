"""The ledger of one rank: its runs, and which process of how many, on which machine, has measured them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ortlab.errors import LedgerError
from ortlab.records import record_files
from ortlab.records.runs import Run

SCHEMA: Final = 1
"""Version of the JSON layout of `RankLedger.to_dict`."""

PATTERN: Final = "rank-*-of-*.json"
"""Names of the files in a folder of ledgers: "rank-00003-of-00008.json"."""


@dataclass(frozen=True)
class RankLedger:
    """What one rank has measured.

    Attributes
    ----------
    rank, ranks
        Its number, from 0 on, and how many train together.
    host
        Name of its machine.
    process
        Id of its process there.
    backend
        How it exchanges gradients: "gloo", "nccl"; empty without a process group.
    runs
        The runs of its lab, in order.
    """

    rank: int
    ranks: int
    host: str
    process: int
    backend: str
    runs: tuple[Run, ...]

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
        place = {name: getattr(self, name) for name in ("rank", "ranks", "host", "process", "backend")}
        return {"schema": SCHEMA, **place, "runs": [run.to_dict() for run in self.runs]}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RankLedger:
        """Read what `to_dict` wrote.

        Raises
        ------
        LedgerError
            If the record has another layout, or lacks a field.
        """
        fields = record_files.without_layout(record, SCHEMA, "This ledger of a rank")
        try:
            return cls(**{**fields, "runs": tuple(Run.from_dict(run) for run in fields["runs"])})
        except (KeyError, TypeError) as error:
            raise LedgerError(
                "This ledger of a rank cannot be read.", why=f"A field is missing or unknown: {error}."
            ) from error


def rank_ledger(runs: Iterable[Run]) -> RankLedger:
    """Make the ledger of this rank.

    The rank comes from `torch.distributed`, or, where no process group is there any more, from the variables that
    torchrun, accelerate and Slurm set; a process without either is rank 0 of 1.
    """
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
