"""Two runs of the same training, held against each other tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ortlab.parity.pairs import DIFFERS, NOT_COMPARED, TensorPair
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

AGREES: Final = "agrees"
DIVERGES: Final = "diverges"

DONE: Final = "done"
FOUND: Final = "found"
NOT_DONE: Final = "not done"


@dataclass(frozen=True)
class Divergence:
    """The first tensor, in the order of the computation, that is further apart than the floor allows.

    Attributes
    ----------
    phase
        "forward", "backward" or "update".
    module
        Path of the module that computes it; empty for the model itself.
    module_class
        Its class.
    source
        File and line of its forward; empty where there is none, as for torch's own modules.
    pair
        The tensors.
    reason
        Why this module: "its inputs agree, its output does not".
    others
        Paths of modules that it can be as well, because ONNX Runtime computes them in one operator.
    """

    phase: str
    module: str
    module_class: str
    source: str
    pair: TensorPair
    reason: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChecklistItem:
    """One question that is settled before numbers are held responsible on an engine.

    Attributes
    ----------
    question
        What was asked: "Is dropout off?".
    state
        "done" (settled), "found" (something that explains a difference was found) or "not done".
    result
        The answer, with its numbers.
    """

    question: str
    state: str
    result: str


@dataclass(frozen=True, repr=False)
class Parity(Shown, JsonRecord, noun="comparison of tensors", layout=1):
    """PyTorch against ONNX Runtime, or any two runs; `Lab.parity` makes it.

    Attributes
    ----------
    model
        What the model is called.
    reference, candidate
        What the two runs are called: "eager" and "ort".
    steps
        How many steps were compared.
    pairs
        Every tensor, in the order in which the reference made it.
    losses
        The loss of each step: the reference's and the candidate's; None where a step has none.
    forward, backward, update
        The first divergence of each phase; None if there is none.
    checks
        The checklist, in order; empty for runs made elsewhere.
    notes
        What else is to be known, one sentence each.
    written_bytes
        What the reference run wrote to disk for each step, in bytes; 0 where nothing was written.
    """

    model: str
    reference: str
    candidate: str
    steps: int
    pairs: tuple[TensorPair, ...]
    losses: tuple[tuple[float | None, float | None], ...] = ()
    forward: Divergence | None = None
    backward: Divergence | None = None
    update: Divergence | None = None
    checks: tuple[ChecklistItem, ...] = ()
    notes: tuple[str, ...] = ()
    written_bytes: int = 0

    @property
    def first(self) -> Divergence | None:
        """The first divergence of all: that of the earliest step, and in a step in the order of the phases."""
        found = [one for one in (self.forward, self.backward, self.update) if one is not None]
        return min(found, key=lambda one: one.pair.site.step, default=None)

    @property
    def outcome(self) -> str:
        """What came out: "agrees" or "diverges"."""
        return DIVERGES if self.first else AGREES

    @property
    def ok(self) -> bool:
        """Whether nothing is further apart than the floor allows."""
        return self.first is None

    @property
    def differing(self) -> tuple[TensorPair, ...]:
        """The pairs that are further apart than allowed, in order."""
        return tuple(pair for pair in self.pairs if pair.verdict == DIFFERS)

    @property
    def not_compared(self) -> tuple[TensorPair, ...]:
        """The pairs without a distance, in order; each says why."""
        return tuple(pair for pair in self.pairs if pair.verdict == NOT_COMPARED)

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of two losses of the same step; nan where no step has two."""
        apart = [
            abs(ours - theirs) / max(abs(theirs), abs(ours)) if ours != theirs else 0.0
            for theirs, ours in self.losses
            if theirs is not None and ours is not None
        ]
        return max(apart, default=math.nan)

    def table(self) -> pd.DataFrame:
        """One row per pair.

        Returns
        -------
        pandas.DataFrame
            Site, verdict, distance, floor and limit (relative), and mean, std, minimum, maximum, nan and inf of both
            sides; what is not known is missing.
        """
        import pandas as pd

        return pd.DataFrame([_row(pair) for pair in self.pairs])

    # ---- JSON -------------------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Parity:
        read = {
            "pairs": tuple(TensorPair.from_dict(pair) for pair in fields["pairs"]),
            "losses": tuple((theirs, ours) for theirs, ours in fields["losses"]),
            "checks": tuple(ChecklistItem(**one) for one in fields["checks"]),
            "notes": tuple(fields["notes"]),
        }
        phases = {
            phase: _divergence(fields[phase]) if fields[phase] else None
            for phase in ("forward", "backward", "update")
        }
        return cls(**{**fields, **read, **phases})


def _divergence(record: Mapping[str, Any]) -> Divergence:
    fields = {**record, "pair": TensorPair.from_dict(record["pair"]), "others": tuple(record["others"])}
    return Divergence(**fields)


def _row(pair: TensorPair) -> dict[str, object]:
    distance = pair.distance
    row: dict[str, object] = {
        **asdict(pair.site),
        "verdict": pair.verdict,
        "distance": distance.relative if distance else None,
        "largest difference": distance.largest if distance else None,
        "floor": pair.floor,
        "limit": pair.limit,
        "note": pair.note,
    }
    sides = (("reference", pair.reference), ("candidate", pair.candidate))
    for fact in ("shape", "dtype", "mean", "std", "minimum", "maximum", "nan", "inf"):
        row |= {f"{side} {fact}": getattr(seen, fact) if seen else None for side, seen in sides}
    return row
