"""Reading a saved record whatever it is: a ledger, a budget, a sweep, the ledgers of ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import LedgerError
from ortlab.records import record_files

if TYPE_CHECKING:
    from ortlab.records.record_files import JsonRecord

HOMES: Final = {
    "bisection": ("ortlab.studies.bisection", "Bisection"),
    "budget": ("ortlab.studies.budget", "Budget"),
    "comparison of tensors": ("ortlab.parity.parity", "Parity"),
    "difference of graphs": ("ortlab.graphs.diff", "GraphDiff"),
    "search": ("ortlab.studies.batch_size", "BatchSizeSearch"),
    "record of FLOPs": ("ortlab.graphs.flops", "Flops"),
    "record of a load balance": ("ortlab.ranks.balancing", "Balance"),
    "record of densities": ("ortlab.records.density", "DensityReport"),
    "record of candidates": ("ortlab.studies.engine_comparison", "EngineComparison"),
    "record of saved FLOPs": ("ortlab.graphs.flops", "FlopSavings"),
    "memory plan": ("ortlab.memory.plan", "MemoryPlan"),
    "run": ("ortlab.records.runs", "Run"),
    "self-test": ("ortlab.records.checks", "SelfTest"),
    "sweep": ("ortlab.studies.sweep", "Sweep"),
}
"""Module and class by what the file says it holds."""


def load(path: str | Path) -> Any:
    """Read a record that its `save` wrote.

    Parameters
    ----------
    path
        The file; or the folder of the ledgers of ranks.

    Returns
    -------
    object
        The record: a `Ledger` of `lab.runs.save`, `Ranks` of a folder, or whatever else was saved.

    Raises
    ------
    LedgerError
        If the file cannot be read, holds no record, or one of another layout.

    Examples
    --------
    >>> lab.sweep(resume=ortlab.load("sweep.json"))
    """
    from ortlab.ranks.ledgers import Ranks
    from ortlab.records.runs import Ledger

    source = Path(path)
    if source.is_dir():
        return Ranks.load(source)
    content: Any = record_files.read(
        source, (dict, list), file=f"The file {source}", other=f"The file {source} holds no record.", fix=_FIX
    )
    if isinstance(content, list):
        return Ledger.load(source)
    if "rank" in content:
        return Ranks.load(source)
    noun = content.get("record")
    if not isinstance(noun, str) or noun not in HOMES:
        raise LedgerError(
            f"The file {source} holds no record of ortlab.",
            why=f'Its field "record" is {str(noun)[:60]!r}.',
            fix=_FIX,
        )
    module, name = HOMES[noun]
    kind: type[JsonRecord] = getattr(importlib.import_module(module), name)
    return kind.load(source)


_FIX: Final = 'Give a file that the save() of a record wrote, as lab.runs.save("runs.json") does.'
