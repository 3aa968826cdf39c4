"""Which devices the installed ONNX Runtime can execute a model on."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from ortlab.engine import cuda_libraries
from ortlab.engine.installation import pip
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
        If there is no provider for the device, or a library that it needs.
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
    if device.type == "cuda":
        check_libraries(cuda_libraries.examine())


def check_libraries(found: Collection[cuda_libraries.Found]) -> None:
    """Refuse to go on without a library of CUDA 11 that the provider needs.

    Parameters
    ----------
    found
        What `cuda_libraries.examine` found.

    Raises
    ------
    BuildError
        It names each that is missing, what was found in its place, and the command that installs all of them.
    """
    lacking = [one for one in found if not one.serves]
    if not lacking:
        return
    names = ", ".join(f"{one.library.name} ({one.library.soname})" for one in lacking)
    why = ["ONNX Runtime 1.19.2 is built for CUDA 11.8 and cuDNN 8, which this torch does not bring."]
    why += [f"{one.library.soname}: {one.fault}." for one in lacking if one.fault]
    why += [f"There is {', '.join(one.others)}, of another version." for one in lacking if one.others]
    packages = dict.fromkeys(one.library.package for one in lacking)
    raise BuildError(
        f"Libraries that ONNX Runtime needs on a GPU are missing: {names}.",
        why=" ".join(why),
        fix=f"Run `{pip('install', *packages)}` and restart the kernel.",
    )
