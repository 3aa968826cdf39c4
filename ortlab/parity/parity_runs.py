"""What the runs of a comparison gave, as the checklist reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortlab.parity.comparing import Compared
    from ortlab.parity.pairs import Site
    from ortlab.records.runs import Run


@dataclass
class Runs:
    """What the runs of a comparison gave."""

    eager: Run
    ort: Run
    drops: int  # calls of a dropout that were kept from dropping
    draws: bool  # whether the model draws random numbers although no dropout does
    again: Compared  # PyTorch's repetition
    ort_again: Compared
    plain: Compared  # the run without capture, held against the captured one
    plain_losses: tuple[float | None, ...]
    limits: dict[Site, float]
    # Losses of PyTorch with dropout as it is, with the start's seed and with another one; empty if not asked for.
    seeds: tuple[tuple[float | None, ...], ...] = ()
