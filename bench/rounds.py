"""Side-by-side timing: in each round every candidate is timed once, and each round begins with another one."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Times = dict[str, list[float]]
"""Seconds of each round, by candidate."""


def interleave(candidates: Mapping[str, Callable[[], object]], rounds: int, *, warm_up: int = 2) -> Times:
    """Time candidates against each other; what else the machine does meets all of them alike.

    Parameters
    ----------
    candidates
        What to call, by name. A candidate that returns a float has timed itself, in seconds.
    rounds
        How often each is timed.
    warm_up
        Rounds before that, which do not count.
    """
    times: Times = {name: [] for name in candidates}
    names = list(candidates)
    gc.collect()
    gc.disable()  # a collection would fall into one candidate's time and not into the other's
    try:
        for number in range(-warm_up, rounds):
            start = number % len(names)
            for name in names[start:] + names[:start]:
                seconds = _timed(candidates[name])
                if number >= 0:
                    times[name].append(seconds)
            gc.collect(0)
    finally:
        gc.enable()
    return times


def _timed(candidate: Callable[[], object]) -> float:
    start = time.perf_counter()
    own = candidate()
    return own if isinstance(own, float) else time.perf_counter() - start


@dataclass(frozen=True)
class Ratio:
    """How one candidate's time relates to another's.

    Attributes
    ----------
    median
        Median over the rounds of the ratio within a round.
    low, high
        95 % percentile bootstrap interval of it; not a number for a single round.
    of_minima
        Ratio of the shortest times.
    """

    median: float
    low: float
    high: float
    of_minima: float

    def row(self, name: str) -> dict[str, object]:
        """Return a row of a table."""
        return {
            "ratio": name,
            "median of rounds": self.median,
            "95 % interval": f"{self.low:.4f} - {self.high:.4f}",
            "of minima": self.of_minima,
        }


def ratio(times: Times, candidate: str, baseline: str) -> Ratio:
    """Compare two candidates round by round."""
    import numpy as np
    from scipy.stats import bootstrap

    ratios = np.divide(times[candidate], times[baseline])
    median = float(np.median(ratios))
    of_minima = min(times[candidate]) / min(times[baseline])
    if len(ratios) == 1:
        return Ratio(median, math.nan, math.nan, of_minima)
    generator = np.random.default_rng(0)
    drawn = bootstrap((ratios,), np.median, method="percentile", n_resamples=2000, random_state=generator)
    interval = drawn.confidence_interval
    return Ratio(median, float(interval.low), float(interval.high), of_minima)


def rows(times: Times, *, unit: str = "ms", scale: float = 1e3) -> list[dict[str, object]]:
    """Return a row for each candidate: minimum, median and maximum of its rounds."""
    return [
        {
            "candidate": name,
            f"minimum [{unit}]": min(values) * scale,
            f"median [{unit}]": statistics.median(values) * scale,
            f"maximum [{unit}]": max(values) * scale,
            "rounds": len(values),
        }
        for name, values in times.items()
    ]
