"""Processes that train together: clusters, the ledgers of their ranks, and the balance of load."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortlab.ranks.cluster import Cluster, latest
    from ortlab.ranks.ledgers import save_rank

__all__ = ["Cluster", "latest", "save_rank"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a ledger of ranks needs no ipyparallel, which starts processes."""
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    home = "ledgers" if name == "save_rank" else "cluster"
    return getattr(importlib.import_module(f"ortlab.ranks.{home}"), name)
