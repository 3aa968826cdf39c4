"""Which devices the installed ONNX Runtime can execute a model on."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from ortlab.errors import BuildError

if TYPE_CHECKING:
    import torch

PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Execution provider that a session needs for a model on a device of that type."""


def check_device(device: torch.device, available: Collection[str]) -> None:
    """Refuse a device that the installed ONNX Runtime cannot execute on, before anything is exported.

    Parameters
    ----------
    device
        Where the model's parameters are.
    available
        Execution providers: `onnxruntime.get_available_providers()`.

    Raises
    ------
    BuildError
        If there is no provider for the device.
    """
    provider = PROVIDERS.get(device.type)
    if provider is None:
        raise BuildError(
            f"The model is on device {str(device)!r}, which ONNX Runtime Training cannot execute on.",
            why=f"It trains on {' and '.join(PROVIDERS)} devices.",
            fix="Move the model: model.cpu() or model.cuda().",
        )
    if provider not in available:
        raise BuildError(
            f"The model is on device {str(device)!r}, and the installed ONNX Runtime has no {provider}.",
            why="onnxruntime-training-cpu executes on the CPU only.",
            fix="Move the model to the CPU (model.cpu()), or install ortlab[cuda] in a fresh environment.",
        )
