"""What this machine has for ranks: cores, memory, and how they can exchange gradients."""

from __future__ import annotations

import os
from typing import Final

from ortlab.errors import OptionError

BACKENDS: Final = ("gloo", "nccl")
"""gloo works between CPUs, NCCL between GPUs, of which each rank needs one."""

RANK_BYTES: Final = 300 << 20
"""About what a rank takes before it has a model, in bytes: the resident set with torch 2.13 on Linux, 307 MiB."""


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


def check_memory(ranks: int) -> None:
    """Look whether the machine has room for so many processes; a machine that runs out of memory may end any of them.

    Raises
    ------
    OptionError
        If they would take more memory than is free.
    """
    import psutil

    free = psutil.virtual_memory().available
    if ranks * RANK_BYTES > free:
        raise OptionError(
            f"{ranks} ranks do not fit into this machine's memory.",
            why=f"Each takes about {RANK_BYTES >> 20} MiB before it has a model, and {free >> 20} MiB are free.",
            fix=f"Use at most {free // RANK_BYTES} ranks; more train on several machines, under torchrun or Slurm.",
        )
