"""A sweep: the points of a grid, what was measured at each, and what could not be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown
from ortlab.studies.sweep_outcomes import Outcome
from ortlab.studies.sweep_points import Point, cheapest_order

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.records.runs import Run
    from ortlab.studies.sweep_grid import Changes


class Sweep(Shown, JsonRecord, noun="sweep", layout=1):
    """Points tried from one start; `Lab.sweep` makes it and fills it in, run by run.

    Parameters
    ----------
    number
        1, 2, ... in the order of the lab's sweeps; the sweep's runs carry it.
    model
        What the lab calls the model.
    points
        The points; number 0, if there is one, is the baseline.
    baseline
        Position in `points` of the one that the others are held against.
    count
        Steps of each run.
    rounds
        Runs of each point.
    start_digest
        Digest of weights, buffers, optimizer state and random state that every run starts from.

    Attributes
    ----------
    number, model, count, rounds, start_digest
        As above.
    points
        All points as they stand, in the order of the grid.
    """

    def __init__(
        self,
        number: int,
        model: str,
        points: Sequence[Point],
        *,
        baseline: int,
        count: int,
        rounds: int,
        start_digest: str,
    ) -> None:
        self.number = number
        self.model = model
        self.count = count
        self.rounds = rounds
        self.start_digest = start_digest
        self.points = list(points)
        self._baseline = baseline

    # ---- what is to be done -----------------------------------------------------------------------------------

    def missing(self) -> Iterator[tuple[int, int]]:
        """Go through the runs that are still to be made: number of the round from 1 on, position of the point.

        Every other round goes backwards: a steady drift of the machine then favours no point. Points with the same
        export stand together, and within them those with the same graph, so that little is built more than once. The
        last round ends with the baseline, whose session is then there for whatever the user does next.
        """
        order = cheapest_order(self.points, self._baseline)
        for number in range(1, self.rounds + 1):
            for position in reversed(order) if (self.rounds - number) % 2 == 0 else order:
                point = self.points[position]
                if not point.skipped and not point.failure and len(point.runs) < number:
                    yield number, position

    @property
    def runs_planned(self) -> int:
        """How many runs there are when all is done, points that failed left out."""
        return self.rounds * sum(not point.skipped and not point.failure for point in self.points)

    @property
    def runs_done(self) -> int:
        """How many of them have been made."""
        return sum(len(point.runs) for point in self.points if not point.failure)

    @property
    def complete(self) -> bool:
        """Whether no run is missing."""
        return next(self.missing(), None) is None

    def add(self, position: int, run: Run) -> None:
        """Write down a run of a point."""
        point = self.points[position]
        self.points[position] = replace(point, runs=(*point.runs, run))

    def fail(self, position: int, reason: str) -> None:
        """Write down that a point failed; it is not tried again."""
        self.points[position] = replace(self.points[position], failure=reason)

    # ---- what came out ----------------------------------------------------------------------------------------

    @property
    def baseline(self) -> Point:
        """The point that the others are held against."""
        return self.points[self._baseline]

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of what differs between the points, in the order of the grid."""
        named = dict.fromkeys(name for point in self.points for name in point.changes)
        absent = object()
        return tuple(
            name
            for name in named
            if any(_differs(name, point, self.points[-1], absent) for point in self.points)
        )

    @property
    def constants(self) -> Changes:
        """What all points change alike."""
        return {name: value for name, value in self.points[-1].changes.items() if name not in self.axes}

    def name(self, point: Point) -> str:
        """Name a point by what differs between the points."""
        words = [f"{axis}={_words(point.changes[axis])}" for axis in self.axes if axis in point.changes]
        return ", ".join(words) or "as the lab was set"

    def outcomes(self) -> tuple[Outcome, ...]:
        """Every measured point against the baseline, the fastest first."""
        measured = sorted((point for point in self.points if point.measured), key=lambda point: point.step_ms)
        return tuple(Outcome.of(point, self.baseline, measured) for point in measured)

    def table(self) -> pd.DataFrame:
        """One row per point in the order of the grid; columns for what differs, and ratios against the baseline.

        Returns
        -------
        pandas.DataFrame
            Indexed by the point's number; `table().sort_values("step [ms]")` sorts it.
        """
        import pandas as pd

        found = {id(outcome.point): outcome for outcome in self.outcomes()}
        rows = [self._row(point, found.get(id(point))) for point in self.points]
        return pd.DataFrame(rows).set_index("point")

    # ---- JSON -------------------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "model": self.model,
            "baseline": self._baseline,
            "count": self.count,
            "rounds": self.rounds,
            "start_digest": self.start_digest,
            "points": [point.to_dict() for point in self.points],
        }

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Sweep:
        points = [Point.from_dict(point) for point in fields.pop("points")]
        sweep = cls(fields.pop("number"), fields.pop("model"), points, **fields)
        _ = sweep.baseline  # raises if its position is not there
        return sweep

    # ---- parts ------------------------------------------------------------------------------------------------

    def _verdict(self, outcome: Outcome) -> str:
        return "baseline" if outcome.point is self.baseline and not outcome.fell_back else outcome.verdict

    def _row(self, point: Point, outcome: Outcome | None) -> dict[str, object]:
        build = point.rebuilt
        return {
            "point": point.number,
            **{axis: point.value(axis) for axis in self.axes},
            "state": point.state,
            "step [ms]": point.step_ms,
            "time ratio": outcome.time_ratio if outcome else math.nan,
            "low": outcome.time_low if outcome else math.nan,
            "high": outcome.time_high if outcome else math.nan,
            "verdict": self._verdict(outcome) if outcome else "",
            "step memory [bytes]": point.step_memory_bytes,
            "memory ratio": outcome.memory_ratio if outcome else math.nan,
            "on the front": bool(outcome and outcome.on_front),
            "last loss": point.runs[-1].losses[-1] if outcome else None,
            "loss difference": outcome.loss_difference if outcome else None,
            "rebuilt from": build.stage if build else "",
            "rebuild [ms]": build.total_ms if build else 0.0,
            "rebuilds": len(point.builds),
            "runs": tuple(run.number for run in point.runs),
            "reason": point.skipped or point.failure,
            "why not comparable": outcome.time.reason if outcome else "",
            "remarks": "; ".join(outcome.remarks) if outcome else "",
        }


def _differs(name: str, one: Point, other: Point, absent: object) -> bool:
    return one.changes.get(name, absent) != other.changes.get(name, absent)


def _words(value: object) -> str:
    return (",".join(value) or "()") if isinstance(value, tuple) else str(value)
