"""Engines side by side: what a step takes in time and memory on ONNX Runtime, and on what else could run it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ortlab.errors import LedgerError
from ortlab.memory.measured import MemoryMeasurement  # noqa: TC001 - asked for when a record is read
from ortlab.records.record_files import JsonRecord
from ortlab.records.verdicts import times_of_pytorch
from ortlab.shown import Shown
from ortlab.studies.sweep import Sweep  # noqa: TC001 - asked for when a record is read

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.studies.sweep import Outcome, Point


@dataclass(frozen=True)
class Candidate:
    """One way to run the step."""

    #: "ort", with the options that make it differ from the present ones; or the engine: "compile:0.5".
    name: str
    point: Point  #: Its runs, or why there are none
    outcome: Outcome | None  #: Its time and losses against the baseline's; None if it was not measured
    memory: MemoryMeasurement | None  #: Its memory phase by phase, where that was asked for; else None
    no_memory: str  #: Why its step memory is missing; "" otherwise
    #: What the engine did to this model, such as the layers that were checkpointed, or what takes its time; mostly "".
    detail: str
    rise_ratio: float  #: Its step memory over the baseline's, no unit; nan where a side has none

    @property
    def engine(self) -> str:
        """The engine, with what it is told."""
        return str(self.point.value("engine"))

    @property
    def rise_bytes(self) -> float:
        """Step memory: how far a step rises above its start, in bytes; nan if it was not measured."""
        return self.point.step_memory_bytes

    @property
    def reason(self) -> str:
        """Why it was not run, or failed; "" if it was measured."""
        return self.point.skipped or self.point.failure


@dataclass(repr=False)
class EngineComparison(Shown, JsonRecord, noun="record of candidates", layout=1):
    """Candidates that ran the same steps from the same start; `Lab.compare_engines` makes it."""

    sweep: Sweep  #: Their runs; the baseline is the present configuration on ONNX Runtime
    #: By number of the point: the memory phase by phase, where that was asked for.
    memories: dict[int, MemoryMeasurement] = field(default_factory=dict)
    no_memory: dict[int, str] = field(default_factory=dict)  #: By number of the point: why that is missing
    #: By number of the point: what the engine did to this model; of ONNX Runtime, where it takes much longer than
    #: PyTorch, what most of its step goes to.
    details: dict[int, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Candidate]:
        """Go through the candidates in the order in which they were asked for."""
        outcomes = {one.point.number: one for one in self.sweep.outcomes()}
        base = self.sweep.baseline.step_memory_bytes
        for point in self.sweep.points:
            yield Candidate(
                name=self.name(point),
                point=point,
                outcome=outcomes.get(point.number),
                memory=self.memories.get(point.number),
                no_memory=point.no_step_memory or self.no_memory.get(point.number, ""),
                detail=self.details.get(point.number, ""),
                rise_ratio=point.step_memory_bytes / base if base else math.nan,
            )

    def __len__(self) -> int:
        """Count the candidates, the baseline included."""
        return len(self.sweep.points)

    def __getitem__(self, name: str) -> Candidate:
        """Return the candidate of a name, as `table()` lists them; raises LedgerError if there is none."""
        for candidate in self:
            if candidate.name == name:
                return candidate
        raise LedgerError(
            f"There is no candidate {name!r}.",
            fix=f"Candidates: {'; '.join(candidate.name for candidate in self)}.",
        )

    @property
    def baseline(self) -> Candidate:
        """The candidate that the others are held against."""
        return next(candidate for candidate in self if candidate.point is self.sweep.baseline)

    @property
    def times_of_pytorch(self) -> float:
        """How many times PyTorch's time the baseline takes; nan where that was not measured or shown."""
        eager = next((one for one in self if one.engine == "eager" and one.outcome is not None), None)
        if eager is None or eager.outcome is None or eager.outcome.fell_back:
            return math.nan
        return times_of_pytorch(eager.engine, self.baseline.engine, eager.outcome.time)

    def name(self, point: Point) -> str:
        """Name a point in a few words: "ort", "ort, memory_level=1", "checkpoint", "compile:0.5"."""
        changed = ", ".join(
            f"{option}={_words(value)}" for option, value in point.changes.items() if option != "engine"
        )
        return ", ".join(filter(None, (str(point.value("engine")), changed)))

    def table(self) -> pd.DataFrame:
        """One row per candidate in the order of asking, the baseline first; ratios are against it.

        Returns
        -------
        pandas.DataFrame
            Indexed by name. Times in ms, memory in bytes.
        """
        import pandas as pd

        return pd.DataFrame([self._row(candidate) for candidate in self]).set_index("candidate")

    def _row(self, candidate: Candidate) -> dict[str, object]:
        return {
            "candidate": candidate.name,
            "engine": candidate.engine,
            **self.sweep.measured(candidate.point, candidate.outcome),
            "reason": candidate.reason or candidate.no_memory,
            "detail": candidate.detail,
        }


def _words(value: object) -> str:
    return (",".join(value) or "none") if isinstance(value, tuple) else str(value)
