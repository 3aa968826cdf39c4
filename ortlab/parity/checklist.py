"""The questions of ORTModule's convergence notes (row I2), each with its answer for these runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlab.parity.parity import DONE, FOUND, NOT_DONE, UPDATED_PARAMETER, ChecklistItem, Site

if TYPE_CHECKING:
    from ortlab.parity.tensor_comparison import Compared
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
    # Losses of PyTorch with dropout as it is, with the start's seed and with another one; empty if not asked for.
    seeds: tuple[tuple[float | None, ...], ...] = ()


def checklist(
    runs: Runs, bounds: Mapping[Site, tuple[float, float]], *, dropout: bool, steps: int
) -> tuple[ChecklistItem, ...]:
    """Answer the questions for these runs; `bounds` are floor and limit of each site."""
    return (
        _seeds(runs),
        ChecklistItem(
            "Same start and data?",
            DONE,
            "Both engines start from the same weights, optimizer, seeds and batches.",
        ),
        _dropout(runs, on=dropout),
        _repeats("PyTorch", runs.again),
        _repeats("ONNX Runtime", runs.ort_again),
        _rounding(bounds, steps),
        _capture(runs, bounds),
    )


def _seeds(runs: Runs) -> ChecklistItem:
    question = "What does another seed change?"
    if not runs.seeds:
        return ChecklistItem(question, NOT_DONE, "Not asked for.")
    ours, others = runs.seeds
    by_seed, by_engine = apart(ours, others), apart(runs.eager.losses, runs.ort.losses)
    if math.isnan(by_seed) or math.isnan(by_engine):
        return ChecklistItem(question, NOT_DONE, "The step has no finite loss to compare.")
    if by_seed == 0:
        return ChecklistItem(question, DONE, "Nothing: the losses of PyTorch are the same with another seed.")
    words = (
        f"With dropout as it is, another seed changes PyTorch's losses by up to {by_seed:.1e}; "
        f"the engines, without it, differ by {by_engine:.1e}."
    )
    return ChecklistItem(question, DONE, words)


def _dropout(runs: Runs, *, on: bool) -> ChecklistItem:
    question = "Is dropout off?"
    if on:
        return ChecklistItem(
            question, NOT_DONE, "It was left on: the engines draw different masks, which is no fault."
        )
    if runs.draws:
        return ChecklistItem(
            question,
            FOUND,
            "Yes, but the step draws random numbers even so: the model is random by design, and the engines may draw "
            "others. What two runs of one engine differ by is part of the floor.",
        )
    if runs.drops:
        return ChecklistItem(question, DONE, "Yes: for these runs every dropout lets everything pass.")
    return ChecklistItem(question, DONE, "Yes: nothing in the model drops anything.")


def _repeats(engine: str, again: Compared) -> ChecklistItem:
    question = f"Does {engine} repeat itself?"
    worst = max((one.relative for one in again.distances.values()), default=0.0)
    if worst == 0:
        return ChecklistItem(question, DONE, "Bit for bit, with deterministic kernels.")
    (site, _) = max(again.distances.items(), key=lambda item: item[1].relative)
    words = f"No: two runs differ by up to {worst:.1e}, in {site.module or 'the model'} ({site.kind}). In the floor."
    return ChecklistItem(question, FOUND, words)


def _rounding(bounds: Mapping[Site, tuple[float, float]], steps: int) -> ChecklistItem:
    question = "What does rounding alone change?"
    floors = [
        floor for site, (floor, _) in bounds.items() if site.step == steps and site.kind != UPDATED_PARAMETER
    ]
    if not floors:
        return ChecklistItem(question, NOT_DONE, "No tensor was seen.")
    middle = sorted(floors)[len(floors) // 2]
    return ChecklistItem(
        question,
        DONE,
        f"Moving what each module returns by some units of rounding moves tensors of step {steps} by "
        f"{middle:.1e} in the middle, {max(floors):.1e} at most.",
    )


def _capture(runs: Runs, bounds: Mapping[Site, tuple[float, float]]) -> ChecklistItem:
    question = "Does looking change the numbers?"
    worst = max((one.relative for one in runs.plain.distances.values()), default=0.0)
    if worst == 0 and list(runs.plain_losses) == list(runs.ort.losses):
        return ChecklistItem(
            question, DONE, "No: losses and parameters are bit for bit those of a run without capture."
        )
    words = (
        f"A little: without capture ONNX Runtime fuses more, and its losses differ by "
        f"{apart(runs.ort.losses, runs.plain_losses):.1e}, its parameters by up to {worst:.1e}."
    )
    limits = {site: limit for site, (_, limit) in bounds.items()}
    over = [site for site, one in runs.plain.distances.items() if one.relative > limits.get(site, math.inf)]
    if over:
        words = (
            f"Yes: without capture {over[0].module or 'the model'}.{over[0].name} differs by "
            f"{runs.plain.distances[over[0]].relative:.1e} after step {over[0].step}, more than rounding explains. "
            "A fusion that capture prevents is at fault; lab.graph('execution') has it."
        )
    return ChecklistItem(question, FOUND if over else DONE, words)


def apart(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float:
    """Return the largest relative difference of two losses of the same step; nan if there are none, or one is nan."""
    differences = [
        abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0
        for one, other in zip(ours, theirs, strict=False)
        if one is not None and other is not None
    ]
    return math.nan if not differences or any(map(math.isnan, differences)) else max(differences)
