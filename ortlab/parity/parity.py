"""PyTorch against ONNX Runtime: each tensor of a step in two runs, the first that differs; and checks of functions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from ortlab.records.activation_statistics import TensorStatistics, blocks
from ortlab.records.comparison import largest_difference
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd
    import torch


INPUT: Final = "input"
OUTPUT: Final = "output"
OUTPUT_GRADIENT: Final = "output gradient"
INPUT_GRADIENT: Final = "input gradient"
PARAMETER_GRADIENT: Final = "parameter gradient"
UPDATED_PARAMETER: Final = "updated parameter"
INSPECTED: Final = "inspected"
"""A tensor that the model itself handed over; see `inspect_activation`."""

FORWARD: Final = (INPUT, OUTPUT, INSPECTED)
BACKWARD: Final = (OUTPUT_GRADIENT, INPUT_GRADIENT, PARAMETER_GRADIENT)
KINDS: Final = (*FORWARD, *BACKWARD, UPDATED_PARAMETER)

EQUAL: Final = "equal"
WITHIN: Final = "within the floor"
DIFFERS: Final = "differs"
NOT_COMPARED: Final = "not compared"


@dataclass(frozen=True)
class Site:
    """Where in a run a tensor was seen; two runs are aligned by it."""

    step: int  #: Number of the step, from 1 on
    module: str  #: Path of the module, as in `named_modules`; empty for the model itself
    call: int  #: Which call of the module in that step, from 1 on; 0 for what belongs to no call: parameters
    kind: str  #: One of `KINDS`
    #: Which tensor: its place in what the module takes or returns, such as "0" or "hidden_states.1"; for a parameter,
    #: its name in the module.
    name: str


@dataclass(frozen=True)
class Distance:
    """How far two tensors of the same shape are apart."""

    #: Norm of the difference over the norm of the reference (L2); 0 if both are zero or equal, inf if only the
    #: reference is zero, or if nan and inf stand at different places.
    relative: float
    largest: float  #: Largest absolute difference of two entries

    @classmethod
    def between(cls, reference: torch.Tensor, other: torch.Tensor) -> Distance:
        """Compare two tensors of one shape entry by entry, in float64; any type and device.

        Entries that are nan, or the same infinity, on both sides count as equal.
        """
        import torch

        flat, peer = reference.detach().reshape(-1), other.detach().reshape(-1).to(reference.device)
        sums = []
        for left, right in zip(blocks(flat), blocks(peer), strict=True):
            exact = left.to(torch.float64)
            apart = exact - right.to(torch.float64)
            largest = apart.abs_().max()
            sums.append(torch.stack([apart.square_().sum(), exact.square().sum(), largest]))
        found = torch.stack(sums).tolist() if sums else []
        squares, of_reference = sum(one[0] for one in found), sum(one[1] for one in found)
        if not (math.isfinite(squares) and math.isfinite(of_reference)):
            return cls._without_equals(flat, peer)
        return cls(_ratio(squares, of_reference), max((one[2] for one in found), default=0.0))

    @classmethod
    def _without_equals(cls, flat: torch.Tensor, peer: torch.Tensor) -> Distance:
        """Compare what is not equal; nan is equal to nan here, and an infinity to itself."""
        import torch

        same = (flat == peer) | (flat.isnan() & peer.isnan())
        exact = flat.to(torch.float64)
        apart = torch.where(same, 0.0, exact - peer.to(torch.float64))
        if not bool(apart.isfinite().all()):
            return cls(math.inf, math.inf)
        squares = float(apart.square().sum())
        of_reference = float(torch.where(exact.isfinite(), exact, 0.0).square().sum())
        return cls(_ratio(squares, of_reference), float(apart.abs().max()) if squares else 0.0)


def _ratio(squares: float, of_reference: float) -> float:
    """Return the ratio of two norms from their squares."""
    if squares == 0:
        return 0.0
    return math.sqrt(squares / of_reference) if of_reference else math.inf


@dataclass(frozen=True)
class TensorPair:
    """A tensor of two runs."""

    site: Site  #: Where it was seen
    reference: TensorStatistics | None  #: Its facts on each side; None where that side has no such tensor
    candidate: TensorStatistics | None  #: See `reference`
    distance: Distance | None = None  #: How far they are apart; None where that cannot be told
    #: Relative distance that rounding and repetition alone explain, as measured at this place.
    floor: float = 0.0
    limit: float = 0.0  #: Relative distance above which it counts as different
    note: str = ""  #: Why there is no distance, or what to know about it

    @property
    def verdict(self) -> str:
        """What the distance says: "equal", "within the floor", "differs" or "not compared"."""
        if self.distance is None:
            return NOT_COMPARED
        if self.distance.relative == 0:
            return EQUAL
        return DIFFERS if self.distance.relative > self.limit else WITHIN


AGREES: Final = "agrees"
DIVERGES: Final = "diverges"

DONE: Final = "done"
FOUND: Final = "found"
NOT_DONE: Final = "not done"


@dataclass(frozen=True)
class Divergence:
    """The first tensor, in the order of the computation, that is further apart than the floor allows."""

    phase: str  #: "forward", "backward" or "update"
    module: str  #: Path of the module that computes it; empty for the model itself
    module_class: str  #: Its class
    source: str  #: File and line of its forward; empty where there is none, as for torch's own modules
    pair: TensorPair  #: The tensors
    reason: str  #: Why this module: "its inputs agree, its output does not"
    #: Paths of modules that it can be as well, because ONNX Runtime computes them in one operator.
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChecklistItem:
    """One question that is settled before numbers are held responsible on an engine."""

    question: str  #: What was asked: "Is dropout off?"
    state: str  #: "done" (settled), "found" (something that explains a difference was found) or "not done"
    result: str  #: The answer, with its numbers


@dataclass(frozen=True, repr=False)
class Parity(Shown, JsonRecord, noun="comparison of tensors", layout=1):
    """PyTorch against ONNX Runtime, or any two runs; `Lab.parity` makes it."""

    model: str  #: What the model is called
    reference: str  #: What the two runs are called: "eager" and "ort"
    candidate: str  #: See `reference`
    steps: int  #: How many steps were compared
    pairs: tuple[TensorPair, ...]  #: Every tensor, in the order in which the reference made it
    #: The loss of each step: the reference's and the candidate's; None where a step has none.
    losses: tuple[tuple[float | None, float | None], ...] = ()
    forward: Divergence | None = None  #: The first divergence of each phase; None if there is none
    backward: Divergence | None = None  #: See `forward`
    update: Divergence | None = None  #: See `forward`
    checks: tuple[ChecklistItem, ...] = ()  #: The checklist, in order; empty for runs made elsewhere
    notes: tuple[str, ...] = ()  #: What else is to be known, one sentence each
    #: What the reference run wrote to disk for each step, in bytes; 0 where nothing was written.
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
        found = largest_difference(self.losses)
        return math.nan if found is None else found

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


@dataclass(frozen=True)
class FunctionCheck:
    """One Function: whether its backward is the derivative of its forward."""

    name: str  #: Its class, with the module that it is from
    calls: int  #: How often one forward of the model called it
    state: str  #: "agrees", "differs", or "not checked"
    found: str = ""  #: What differs, or why it was not checked; empty where it agrees


@dataclass(frozen=True, repr=False)
class FunctionReport(Shown):
    """The Functions of a model, in the order of their first calls."""

    model: str  #: Name of the model's class
    checks: tuple[FunctionCheck, ...] = ()  #: One per Function

    @property
    def ok(self) -> bool:
        """Whether no backward differs from the derivative of its forward."""
        return not any(check.state == "differs" for check in self.checks)
