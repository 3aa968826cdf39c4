"""The machine that a self-test runs on: what its figures may depend on."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Final

import psutil

from ortlab import __version__
from ortlab.engine.versions import versions

if TYPE_CHECKING:
    from ortlab.checks.selftest_trial import Device

_MIB: Final = 2**20
_THREADS: Final = "OMP_NUM_THREADS"


def facts(device: Device) -> dict[str, str]:
    """Return what a figure may depend on, by name; with "cuda", of the first GPU as well."""
    found = {
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total // _MIB} MiB",
        _THREADS: os.environ.get(_THREADS, "not set"),
        "python": platform.python_version(),
        "ortlab": __version__,
        **versions(),
    }
    if device == "cuda":
        import torch

        one = torch.cuda.get_device_properties(0)
        found |= {
            "GPU": one.name,
            "compute capability": f"{one.major}.{one.minor}",
            "GPU memory": f"{one.total_memory // _MIB} MiB",
            "torch CUDA": str(torch.version.cuda),
        }
    return found
