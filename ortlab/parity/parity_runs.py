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
    """What the runs of a comparison gave.

    Attributes
    ----------
    eager, ort
        The losses of the runs that were compared.
    drops
        How many calls of a dropout were kept from dropping.
    draws
        Whether the model draws random numbers although no dropout does.
    again, ort_again
        The repetitions.
    plain
        The run without capture, held against the captured one.
    plain_losses
        Its losses.
    limits
        The limit of each site.
    seeds
        Losses of PyTorch with dropout as it is, with the start's seed and with another one; empty if not asked for.
    """

    eager: Run
    ort: Run
    drops: int
    draws: bool
    again: Compared
    ort_again: Compared
    plain: Compared
    plain_losses: tuple[float | None, ...]
    limits: dict[Site, float]
    seeds: tuple[tuple[float | None, ...], ...] = ()
