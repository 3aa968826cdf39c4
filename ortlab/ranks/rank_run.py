"""One run as one rank has measured it: what it computes, and what it waits for."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlab.records.density import EMBED, LABEL

if TYPE_CHECKING:
    from ortlab.ranks.rank_ledger import RankLedger
    from ortlab.records.runs import Run, Step


@dataclass(frozen=True)
class RankRun:
    """One run as one rank has measured it.

    Attributes
    ----------
    ledger
        The rank.
    run
        The run.
    """

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
        found = [step_computing_ms(step) for step in self.run.warm_steps]
        return None if None in found else statistics.median(time for time in found if time is not None)

    @property
    def exchange_ms(self) -> float | None:
        """Median time in a warm step from a rank's last gradient to the end of backward; None if not told."""
        found = [step.exchange_ms for step in self.run.warm_steps]
        return None if None in found else statistics.median(time for time in found if time is not None)

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


def step_computing_ms(step: Step) -> float | None:
    """Return the time in a step that a rank computes and does not wait, in ms; None if that is not told apart."""
    if step.exchange_ms is None:
        return None
    return step.forward_ms + step.backward_ms - step.exchange_ms + step.optimizer_ms
