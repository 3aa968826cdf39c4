"""What this machine has for ranks: cores, and how they can exchange gradients."""

from __future__ import annotations

import os
from typing import Final

from ortlab.errors import OptionError

BACKENDS: Final = ("gloo", "nccl")
"""gloo works between CPUs, NCCL between GPUs, of which each rank needs one."""


def cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def chosen_backend(wished: str | None, ranks: int) -> str:
    """Choose how ranks exchange gradients: as wished, or NCCL where there is a GPU for each rank, gloo otherwise.

    Raises
    ------
    OptionError
        If there is no such backend, or too few GPUs for it.
    """
    if wished is not None and wished not in BACKENDS:
        raise OptionError(
            f"There is no backend {wished!r}.", fix=f"Give one of {', '.join(BACKENDS)}, or none."
        )
    if wished == "gloo":
        return wished
    import torch

    devices = torch.cuda.device_count()
    if wished == "nccl" and devices < ranks:
        raise OptionError(
            f"{ranks} ranks cannot train over NCCL here.",
            why=f"Each needs a GPU of its own, and there are {devices}.",
            fix="Use fewer ranks, or gloo, which trains on CPUs.",
        )
    return "nccl" if devices >= ranks else "gloo"
