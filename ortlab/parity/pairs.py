"""One tensor of a training step, seen in two runs: its facts on each side, how far apart they are, what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ortlab.records.activation_statistics import TensorStatistics, blocks

if TYPE_CHECKING:
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
    """Where in a run a tensor was seen; two runs are aligned by it.

    Attributes
    ----------
    step
        Number of the step, from 1 on.
    module
        Path of the module, as in `named_modules`; empty for the model itself.
    call
        Which call of the module in that step, from 1 on; 0 for what belongs to no call: parameters.
    kind
        One of `KINDS`.
    name
        Which tensor: its place in what the module takes or returns, such as "0" or "hidden_states.1"; for a
        parameter, its name in the module.
    """

    step: int
    module: str
    call: int
    kind: str
    name: str


@dataclass(frozen=True)
class Distance:
    """How far two tensors of the same shape are apart.

    Attributes
    ----------
    relative
        Norm of the difference over the norm of the reference (L2); 0 if both are zero or equal, inf if only the
        reference is zero, or if nan and inf stand at different places.
    largest
        Largest absolute difference of two entries.
    """

    relative: float
    largest: float

    @classmethod
    def between(cls, reference: torch.Tensor, other: torch.Tensor) -> Distance:
        """Compare two tensors entry by entry, in float64.

        Parameters
        ----------
        reference, other
            Of the same shape; any type and device. Entries that are nan, or the same infinity, on both sides count as
            equal.
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
    """A tensor of two runs.

    Attributes
    ----------
    site
        Where it was seen.
    reference, candidate
        Its facts on each side; None where that side has no such tensor.
    distance
        How far they are apart; None where that cannot be told.
    floor
        Relative distance that rounding and repetition alone explain, as measured at this place.
    limit
        Relative distance above which it counts as different.
    note
        Why there is no distance, or what to know about it.
    """

    site: Site
    reference: TensorStatistics | None
    candidate: TensorStatistics | None
    distance: Distance | None = None
    floor: float = 0.0
    limit: float = 0.0
    note: str = ""

    @property
    def verdict(self) -> str:
        """What the distance says: "equal", "within the floor", "differs" or "not compared"."""
        if self.distance is None:
            return NOT_COMPARED
        if self.distance.relative == 0:
            return EQUAL
        return DIFFERS if self.distance.relative > self.limit else WITHIN

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> TensorPair:
        """Rebuild a pair from plain JSON types."""
        fields = dict(record)
        fields["site"] = Site(**fields["site"])
        for side in ("reference", "candidate"):
            fields[side] = _statistics(fields[side]) if fields[side] else None
        fields["distance"] = Distance(**fields["distance"]) if fields["distance"] else None
        return cls(**fields)


def _statistics(record: Mapping[str, Any]) -> TensorStatistics:
    return TensorStatistics(**{**record, "shape": tuple(record["shape"]), "sample": tuple(record["sample"])})
