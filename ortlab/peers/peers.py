"""Peers side by side: what a step takes in time and memory on ONNX Runtime, and on what else could run it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ortlab.errors import LedgerError
from ortlab.memory.measured import MemoryMeasurement
from ortlab.record_files import JsonRecord
from ortlab.sweeps.sweep import Sweep

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.sweeps.outcomes import Outcome
    from ortlab.sweeps.points import Point


@dataclass(frozen=True)
class Peer:
    """One way to run the step.

    Attributes
    ----------
    name
        "ort", with the options that make it differ from the present ones; or the engine: "compile:0.5".
    point
        Its runs, or why there are none.
    outcome
        Its time and losses against the baseline's; None if it was not measured.
    memory
        Its measured memory, or None.
    no_memory
        Why the memory could not be measured; "" otherwise.
    detail
        What the engine did to this model: the layers that were checkpointed; "" for the others.
    rise_ratio
        Its `rise_bytes` over the baseline's, no unit; nan where a side has none.
    """

    name: str
    point: Point
    outcome: Outcome | None
    memory: MemoryMeasurement | None
    no_memory: str
    detail: str
    rise_ratio: float

    @property
    def engine(self) -> str:
        """The engine, with what it is told."""
        return str(self.point.value("engine"))

    @property
    def peak_bytes(self) -> float:
        """Highest level of the process (on CUDA: of torch's allocator) in a step; nan if it was not measured.

        Where memory was not measured by itself, the median over the runs, in which earlier peers' memory may count.
        """
        return float(self.memory.peak_bytes) if self.memory else self.point.peak_bytes

    @property
    def rise_bytes(self) -> float:
        """How far a step rises above its start; nan if memory was not measured by itself.

        This is what engines can be compared by: the start holds the libraries that happen to be loaded.
        """
        return float(self.memory.rise_bytes) if self.memory else math.nan

    @property
    def reason(self) -> str:
        """Why it was not run, or failed; "" if it was measured."""
        return self.point.skipped or self.point.failure


@dataclass
class Peers(JsonRecord, noun="record of peers", layout=1):
    """Peers that ran the same steps from the same start; `Lab.peers` makes it.

    Attributes
    ----------
    sweep
        Their runs; the baseline is the present configuration on ONNX Runtime.
    memories
        By number of the point: the measured memory.
    no_memory
        By number of the point: why there is none.
    details
        By number of the point: what the engine did to this model.
    """

    sweep: Sweep
    memories: dict[int, MemoryMeasurement] = field(default_factory=dict)
    no_memory: dict[int, str] = field(default_factory=dict)
    details: dict[int, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Peer]:
        """Go through the peers in the order in which they were asked for."""
        outcomes = {one.point.number: one for one in self.sweep.outcomes()}
        base = self.memories.get(self.sweep.baseline.number)
        for point in self.sweep.points:
            memory = self.memories.get(point.number)
            known = memory is not None and base is not None and base.rise_bytes > 0
            yield Peer(
                name=self.name(point),
                point=point,
                outcome=outcomes.get(point.number),
                memory=memory,
                no_memory=self.no_memory.get(point.number, ""),
                detail=self.details.get(point.number, ""),
                rise_ratio=memory.rise_bytes / base.rise_bytes if known and memory and base else math.nan,
            )

    def __len__(self) -> int:
        """Count the peers, the baseline included."""
        return len(self.sweep.points)

    def __getitem__(self, name: str) -> Peer:
        """Return the peer of a name, as `table()` lists them.

        Raises
        ------
        LedgerError
            If there is none; the message lists the names.
        """
        for peer in self:
            if peer.name == name:
                return peer
        raise LedgerError(
            f"There is no peer {name!r}.", fix=f"Peers: {'; '.join(peer.name for peer in self)}."
        )

    @property
    def baseline(self) -> Peer:
        """The peer that the others are held against."""
        return next(peer for peer in self if peer.point is self.sweep.baseline)

    def name(self, point: Point) -> str:
        """Name a point in a few words: "ort", "ort, memory_level=1", "checkpoint", "compile:0.5"."""
        changed = ", ".join(
            f"{option}={_words(value)}" for option, value in point.changes.items() if option != "engine"
        )
        return ", ".join(filter(None, (str(point.value("engine")), changed)))

    def table(self) -> pd.DataFrame:
        """One row per peer in the order of asking, the baseline first; ratios are against it.

        Returns
        -------
        pandas.DataFrame
            Indexed by name. Times in ms, memory in bytes.
        """
        import pandas as pd

        return pd.DataFrame([self._row(peer) for peer in self]).set_index("peer")

    def _row(self, peer: Peer) -> dict[str, object]:
        outcome, memory = peer.outcome, peer.memory
        is_base = peer.point is self.sweep.baseline
        return {
            "peer": peer.name,
            "engine": peer.engine,
            "state": peer.point.state,
            "step [ms]": peer.point.step_ms,
            "time ratio": outcome.time_ratio if outcome else math.nan,
            "low": outcome.time_low if outcome else math.nan,
            "high": outcome.time_high if outcome else math.nan,
            "verdict": "baseline" if is_base and outcome else outcome.verdict if outcome else "",
            "peak [bytes]": peer.peak_bytes,
            "rise [bytes]": peer.rise_bytes,
            "rise ratio": peer.rise_ratio,
            "memory of": memory.label if memory else "",
            "last loss": peer.point.runs[-1].losses[-1] if outcome else None,
            "loss difference": outcome.loss_difference if outcome else None,
            "detail": peer.detail,
            "runs": tuple(run.number for run in peer.point.runs),
            "reason": peer.reason or peer.no_memory,
            "remarks": "; ".join(outcome.remarks) if outcome else "",
        }

    def __repr__(self) -> str:
        """Show the model and the names of the peers."""
        return f"Peers({self.sweep.model}: {'; '.join(peer.name for peer in self)})"

    # ---- JSON -------------------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, Any]:
        return {
            "sweep": self.sweep.to_dict(),
            "memories": {str(number): memory.to_dict() for number, memory in self.memories.items()},
            "no_memory": {str(number): why for number, why in self.no_memory.items()},
            "details": {str(number): what for number, what in self.details.items()},
        }

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Peers:
        return cls(
            Sweep.from_dict(fields["sweep"]),
            {int(number): MemoryMeasurement.from_dict(one) for number, one in fields["memories"].items()},
            {int(number): why for number, why in fields["no_memory"].items()},
            {int(number): what for number, what in fields["details"].items()},
        )


def _words(value: object) -> str:
    return (",".join(value) or "none") if isinstance(value, tuple) else str(value)
