"""The versions that a run's numbers depend on."""

from __future__ import annotations

from importlib import metadata

from ortlab.engine.installation import distributions


def versions() -> dict[str, str]:
    """Return package versions by name: the installed ONNX Runtime distribution, torch, onnx, numpy."""
    training = {one.name: one.version for one in distributions()}
    return training | {name: metadata.version(name) for name in ("torch", "onnx", "numpy")}
