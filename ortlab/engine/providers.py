"""Which devices the installed ONNX Runtime can execute a model on."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

from ortlab.engine import cuda_libraries
from ortlab.engine.installation import pip
from ortlab.errors import BuildError, InstallError

if TYPE_CHECKING:
    import torch

PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Execution provider that a session needs for a model on a device of that type."""

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def check_device(device: torch.device, available: Collection[str]) -> None:
    """Refuse a device that the installed ONNX Runtime cannot execute on, before anything is exported.

    Raises BuildError if there is no provider for it among the `available` ones, or a library that it needs is missing.
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


def device_made_current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread while a session of it is made or run; nothing on the CPU.

    PyTorch trains a model on cuda:1 while cuda:0 is current. ORT's session would then take its memory from torch's pool
    of the current GPU (`ortlab.engine.gpu_allocator`, and the extension that it stands in for), and would leave its own
    GPU the current one.
    """
    if device.type != "cuda":
        return nullcontext()
    import torch

    return torch.cuda.device(device)


def check_gpu() -> None:
    """Raise InstallError unless PyTorch and ONNX Runtime both see a GPU; the error says why they do not."""
    import onnxruntime
    import torch

    lacking = gpu_faults(
        torch.__version__,
        torch.version.cuda,
        torch.cuda.device_count(),
        onnxruntime.get_available_providers(),
        os.environ.get(_VISIBLE),
    )
    if lacking:
        raise InstallError(
            "There is no GPU that PyTorch and ONNX Runtime both see.",
            why=" ".join(lacking),
            fix="`ortlab doctor` names what mends it. Without --gpu, `ortlab selftest` tests the CPU.",
        )


def gpu_faults(
    torch_version: str, torch_cuda: str | None, gpus: int, available: Collection[str], visible: str | None
) -> list[str]:
    """Say in sentences why no GPU can be used; none if one can be used.

    `torch_cuda` is the CUDA that PyTorch was built for (None if for none), `gpus` how many PyTorch sees, and `visible`
    the variable CUDA_VISIBLE_DEVICES (None if it is not set).
    """
    lacking = []
    if torch_cuda is None:
        lacking.append(f"torch {torch_version} was built without CUDA.")
    elif not gpus:
        under = "" if visible is None else f", with {_VISIBLE}={visible!r}"
        lacking.append(f"PyTorch sees no GPU{under}.")
    if PROVIDERS["cuda"] not in available:
        lacking.append(f"This ONNX Runtime has no {PROVIDERS['cuda']}, which `ortlab[cuda]` brings.")
    return lacking


def check_libraries(found: Collection[cuda_libraries.Found]) -> None:
    """Raise BuildError if a library of CUDA 11 that the provider needs is missing.

    The error names each that is missing, what was found in its place, and the command that installs all of them.
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
