"""The peak that a batch size is predicted to need, from smaller ones that were measured."""

from __future__ import annotations

from collections.abc import Sequence

Measured = Sequence[tuple[int, float]]
"""Batch sizes and their measured peaks in bytes."""


def predicted_peak(size: int, measured: Measured, without_plans: Measured = ()) -> float | None:
    """Predict the peak of a batch in bytes: activations grow with it, weights and the process itself do not.

    It lies on the straight line (least squares) through `measured`, smaller batches with the same plans. If there is
    only one of them, the line through `without_plans` says where theirs starts. None if that has fewer than two
    batches, or nothing was measured with the plans.
    """
    if len(measured) > 1:
        start, slope = _line(measured)
    elif measured and len(without_plans) > 1:
        (known, peak), (start, _) = measured[0], _line(without_plans)
        start = min(start, peak)
        slope = (peak - start) / known
    else:
        return None
    return start + slope * size


def most_of(size: int, start_bytes: float, known_size: int, known_peak_bytes: float) -> float:
    """Return the most bytes that a batch can take if one smaller batch is known: all of its rise grows with the batch.

    `start_bytes` is the level before the step.
    """
    return start_bytes + max(0.0, known_peak_bytes - start_bytes) * size / known_size


def _line(measured: Measured) -> tuple[float, float]:
    """Fit start and slope, which is never negative: no batch needs less than a smaller one."""
    sizes, peaks = [size for size, _ in measured], [peak for _, peak in measured]
    middle, height = sum(sizes) / len(sizes), sum(peaks) / len(peaks)
    spread = sum((size - middle) ** 2 for size in sizes)
    slope = sum((size - middle) * (peak - height) for size, peak in measured) / spread if spread else 0.0
    slope = max(0.0, slope)
    return height - slope * middle, slope
