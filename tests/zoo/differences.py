"""How far ONNX Runtime is from PyTorch: one rule for losses, gradients, parameters and buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

TOLERANCE = 1e-5
FLOOR = 1e-2
"""Part of the largest entry of a kind (all gradients of a step, all parameters) below which a tensor of that kind is
compared with that entry instead of with its own: the gradient of a bias in front of a normalisation, or of a key's bias
in an attention, is zero but for rounding, and rounding has no relative accuracy."""

KINDS = ("loss", "gradient", "parameter", "buffer")


@dataclass
class Differences:
    """The largest relative difference of each kind, and the tensor that it was found in."""

    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    places: dict[str, str] = field(default_factory=lambda: dict.fromkeys(KINDS, ""))

    def compare(self, kind: str, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> None:
        """Compare tensors by name: the largest difference of two entries, relative to the largest entry.

        The largest entry is that of PyTorch's tensor, or `FLOOR` of the largest of all tensors if that is more.
        """
        assert expected.keys() == actual.keys(), (
            f"only one side has the {kind} of {expected.keys() ^ actual.keys()}"
        )
        sizes = {name: one.double().abs().max().item() for name, one in expected.items() if one.numel()}
        largest = max(sizes.values(), default=0.0)
        for name, own in sizes.items():
            assert expected[name].shape == actual[name].shape, f"{kind} of {name} has another shape"
            assert expected[name].dtype == actual[name].dtype, f"{kind} of {name} has another dtype"
            apart = (expected[name].double() - actual[name].double()).abs().max().item()
            relative = apart / max(own, FLOOR * largest, 1e-30)
            # A NaN is worse than anything, and for good: no number that comes later is more.
            relative = math.inf if math.isnan(relative) else relative
            if relative > self.worst[kind]:
                self.worst[kind], self.places[kind] = relative, name

    def beyond(self, tolerance: float = TOLERANCE) -> dict[str, str]:
        """Return what is further apart than it may be, each with its tensor."""
        return {
            kind: f"{value:.1e} in {self.places[kind] or 'the output'}"
            for kind, value in self.worst.items()
            if value > tolerance
        }
