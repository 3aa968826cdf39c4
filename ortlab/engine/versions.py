"""The versions that a run's numbers depend on."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from ortlab.engine.installation import distributions


def versions() -> dict[str, str]:
    """Return package versions by name: the installed ONNX Runtime distribution, torch, onnx, numpy.

    They are read once in a process, which keeps what it has imported, and takes half a second among many packages.
    """
    return dict(_versions())


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    training = {one.name: one.version for one in distributions()}
    return tuple((training | {name: metadata.version(name) for name in ("torch", "onnx", "numpy")}).items())
