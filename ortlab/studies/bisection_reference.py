"""The same steps in PyTorch, which a run on ONNX Runtime is held against: losses and updated parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ortlab.records.comparison import loss_difference

if TYPE_CHECKING:
    from ortlab.records.runs import Run


class Reference:
    """What PyTorch made of the steps.

    Parameters
    ----------
    module
        The model; after a run, its parameters are what the run has made of them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._run: Run | None = None
        self._parameters: list[torch.Tensor] = []

    @property
    def known(self) -> bool:
        """Whether PyTorch has run the steps."""
        return self._run is not None

    def take(self, run: Run) -> None:
        """Keep what PyTorch's run has just left behind."""
        self._run = run
        self._parameters = [one.detach().clone() for one in self._module.parameters()]

    def distance(self, run: Run) -> float:
        """Return how far a run's losses, and the parameters that it has just left behind, are from PyTorch's.

        Returns
        -------
        float
            The largest relative difference: of a loss against itself, of a parameter against its largest entry.
            Infinite where one of the two is no number.
        """
        assert self._run is not None  # noqa: S101 - the caller takes it first
        largest = loss_difference(self._run, run) or 0.0
        for ours, theirs in zip(self._module.parameters(), self._parameters, strict=True):
            largest = max(largest, _apart(ours.detach(), theirs))
        return largest


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if not theirs.numel() or torch.equal(ours, theirs):
        return 0.0
    difference = (ours.double() - theirs.double()).abs()
    alike = (ours == theirs) | (ours.isnan() & theirs.isnan())
    largest = float(torch.where(alike, 0.0, difference).max())
    scale = float(theirs.double().abs().max())
    found = largest / max(scale, 1e-12)
    return math.inf if math.isnan(found) else found
