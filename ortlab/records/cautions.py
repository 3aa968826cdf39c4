"""What a reader must know of a run before believing its numbers: fallback, evaluation, losses that are no numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ortlab.records.runs import Run

FELL_BACK: Final = "fell back"
"""The verdict on a run that PyTorch executed, in part or as a whole: no result of ONNX Runtime or of a switch."""


def cautions(run: Run) -> tuple[str, ...]:
    """Say what must be known of a run, a clause each; usually nothing."""
    found = []
    if run.is_partial:
        found.append(f"is partial: Ctrl-C stopped it after {len(run.steps):,} of {run.planned_steps:,} steps")
    if run.fell_back:
        found.append(
            f"was executed by PyTorch, not ORT{fallen_share(run)}: {run.fallback_reason or 'no reason was recorded'}"
        )
    if run.mode == "evaluation" and any(step.backward_ms for step in run.steps):
        found.append(
            "trained in eval mode: without dropout, and with the running statistics of batch normalisation"
        )
    strange = first_strange_loss(run)
    if strange is not None:
        found.append(f"has a loss of {run.losses[strange - 1]} from step {strange} on")
    return tuple(found)


def fallen_share(run: Run) -> str:
    """Say in how many of its steps a run fell back, if not in all: ", in 3 of 10 steps"; else an empty text."""
    fallen, steps = len(run.fallback_steps), len(run.steps)
    return f", in {fallen} of {steps} steps" if fallen < steps else ""


def first_strange_loss(run: Run) -> int | None:
    """Return the number of the first step, from 1 on, whose loss is nan or infinite; None if there is none."""
    for number, loss in enumerate(run.losses, start=1):
        if loss is not None and not math.isfinite(loss):
            return number
    return None
