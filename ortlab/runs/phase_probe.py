"""Memory before and after the forward and the backward pass of a step, on the CPU as on a GPU.

ORTModule 1.19.2 prints such figures for CUDA only, and only with log level INFO or lower (rows E5, T15).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab.records.memory_phases import PHASES, MemoryPhase, is_read
from ortlab.runs.measure import allocator_sizes, resident_bytes

if TYPE_CHECKING:
    import torch

_RESIDENT: Final = {"resident": "VmRSS", "max resident": "VmHWM"}


class PhaseProbe:
    """Reads the memory of a device at the points of a step.

    Parameters
    ----------
    device
        The model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: list[MemoryPhase] = []

    def take(self, step: int, phase: str) -> None:
        """Read the memory, if this step is one that is read.

        Parameters
        ----------
        step
            Number of the step in its run, from 1.
        phase
            The point that it has reached; those that are not in `ortlab.records.memory_phases.PHASES` are left out.
        """
        if phase in PHASES and is_read(step):
            self._taken.append(MemoryPhase(step, phase, self._sizes()))

    def read(self) -> tuple[MemoryPhase, ...]:
        """Return what was taken."""
        return tuple(self._taken)

    def _sizes(self) -> dict[str, int]:
        if self._device.type == "cuda":
            return allocator_sizes(self._device)
        return {name: resident_bytes(field) for name, field in _RESIDENT.items()}
