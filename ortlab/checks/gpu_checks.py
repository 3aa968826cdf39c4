"""What the doctor says of the GPU: driver, libraries, kernels, versions; each fault with the command that mends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ortlab.engine import devices, installation
from ortlab.records.checks import Check, Status

_MIB: Final = 2**20
_LITTLE: Final = 512 * _MIB
"""Free memory below which not even a CUDA context, cuBLAS and cuDNN of two CUDA versions fit beside a model."""

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_TORCH: Final = "Install a torch for CUDA: https://pytorch.org/get-started/locally/"
_DRIVER: Final = (
    "Install a driver from https://www.nvidia.com/drivers; `nvidia-smi` shows the one that is there."
)


def gpu_checks(findings: Mapping[str, Any], environ: Mapping[str, str]) -> list[Check]:
    """Judge what `ortlab.engine.selftest.devices` found under these environment variables.

    Where there is neither a driver nor a CUDA build of ONNX Runtime, one check says that there is no GPU. What only
    matters on a GPU is "warn" where none is there, and "fail" where one is. `findings` may have been through JSON.
    """
    by_ort = "CUDAExecutionProvider" in findings["providers"]
    if findings["driver"] is None and not findings["gpus"] and not by_ort:
        return [Check("GPU", "ok", "not present: the CPU will be used")]
    checks = [_driver(findings), _gpu(findings, environ, by_ort=by_ort)]
    if by_ort:
        lacking: Status = "fail" if findings["gpus"] else "warn"
        checks += [_library(one, lacking) for one in findings["libraries"]]
    if by_ort and findings["gpus"]:
        checks += [_memory(findings["gpus"]), _kernels(findings["gpus"]), _versions(findings)]
    return checks


def provider_check(findings: Mapping[str, Any]) -> list[Check]:
    """Judge what `ortlab.engine.selftest.provider` found; nothing where there was nothing to load."""
    if not findings["loaded"]:
        return []
    return [Check("CUDA provider", "ok", "loads, with every library that it needs")]


def gpu_step(findings: Mapping[str, Any], step: Callable[[str], Check]) -> list[Check]:
    """Judge what `ortlab.engine.selftest.on_gpu` found; nothing where there is no GPU.

    `step` judges the step under a name, as on the CPU.
    """
    if not findings:
        return []
    fault = findings["allocator"]
    found = "ONNX Runtime takes its memory from torch's pool"
    bridge = Check("Allocator bridge", "ok", found)
    if fault:
        found = f"{fault}; without it each keeps a pool of its own, and what one has freed is not there for the other"
        bridge = Check("Allocator bridge", "warn", found, "Set lab.set(external_gpu_allocator=False).")
    return [step("GPU step"), bridge]


def _driver(findings: Mapping[str, Any]) -> Check:
    name, driver = "NVIDIA driver", findings["driver"]
    if driver is None:
        return Check(name, "warn", f"none ({devices.DRIVER} is not there): the CPU will be used", _DRIVER)
    runs, least = installation.dotted(tuple(driver)), installation.dotted(devices.LEAST_DRIVER)
    if tuple(driver) < devices.LEAST_DRIVER:
        found = f"too old: it runs CUDA up to {runs}, and ONNX Runtime's libraries need one for {least}"
        return Check(name, "warn", f"{found}: the CPU will be used", _DRIVER)
    torch_cuda = findings["torch_cuda"]
    if torch_cuda and int(torch_cuda.split(".")[0]) > driver[0]:
        found = f"too old for torch: it runs CUDA up to {runs}, and torch was built for {torch_cuda}"
        return Check(name, "warn", found, f"{_DRIVER} Or install a torch for CUDA {driver[0]}.")
    if findings["driver_fault"]:
        return Check(name, "warn", f"runs CUDA up to {runs}; but {findings['driver_fault']}", _DRIVER)
    return Check(name, "ok", f"runs CUDA up to {runs}")


def _gpu(findings: Mapping[str, Any], environ: Mapping[str, str], *, by_ort: bool) -> Check:
    name, names = "GPU", ", ".join(one["name"] for one in findings["gpus"])
    if findings["gpus"] and by_ort:
        return Check(name, "ok", names)
    if findings["gpus"]:
        found = f"{names}, which this ONNX Runtime cannot use: the CPU will be used"
        swap = (
            f"{installation.pip('uninstall', '-y', installation.CPU)} && "
            f"{installation.pip('install', 'ortlab[cuda]')}"
        )
        return Check(name, "warn", found, f"Run `{swap}`.")
    if findings["driver"] is None:
        return Check(name, "ok", "not present: the CPU will be used")
    if _VISIBLE in environ:
        found = f"{_VISIBLE}={environ[_VISIBLE]!r} lets no GPU be seen: the CPU will be used"
        return Check(name, "warn", found, f"Run `unset {_VISIBLE}`, or set it to 0 for the first.")
    if not findings["torch_cuda"]:
        return Check(name, "warn", "a driver, and a torch without CUDA: the CPU will be used", _TORCH)
    return Check(name, "warn", "a driver, but torch sees no GPU: the CPU will be used", _DRIVER)


def _library(one: Mapping[str, Any], lacking: Status) -> Check:
    library = one["library"]
    if one["serves"]:
        return Check(library["name"], "ok", one["path"])
    found = f"{library['soname']} is missing"
    if one["fault"]:
        found = f"{library['soname']} cannot be loaded: {one['fault']}"
    elif one["others"]:
        found = f"{library['soname']} is missing; there is {', '.join(one['others'])}, of another version"
    return Check(library["name"], lacking, found, f"Run `{installation.pip('install', library['package'])}`.")


def _memory(gpus: list[Mapping[str, Any]]) -> Check:
    words, short = [], False
    for index, one in enumerate(gpus):
        if one["free"] is None:
            words.append(f"GPU {index} cannot be asked: {one['fault']}")
            short = True
        else:
            words.append(f"GPU {index}: {one['free'] // _MIB} of {one['total'] // _MIB} MiB are free")
            short = short or one["free"] < _LITTLE
    fix = "`nvidia-smi` lists the processes that hold the rest; end those that are yours." if short else ""
    return Check("GPU memory", "warn" if short else "ok", "; ".join(words), fix)


def _kernels(gpus: list[Mapping[str, Any]]) -> Check:
    name, kinds = (
        "GPU kernels",
        {one["name"]: devices.kernels_for(tuple(one["capability"])) for one in gpus},
    )
    levels = {one["name"]: installation.dotted(tuple(one["capability"])) for one in gpus}
    for gpu, kind in kinds.items():
        if kind == "none":
            found = (
                f"{gpu}: compute capability {levels[gpu]} is older than any that ONNX Runtime has kernels for"
            )
            return Check(name, "fail", found, "Train on the CPU: model.cpu().")
    for gpu, kind in kinds.items():
        if kind == "ptx":
            found = (
                f"{gpu}: compute capability {levels[gpu]} is newer than ONNX Runtime's kernels; the driver compiles "
                "each at its first use, which takes minutes in the first process, and keeps it in ~/.nv/ComputeCache"
            )
            fix = "Run `export CUDA_CACHE_MAXSIZE=4294967296` first, so that all of them are kept."
            return Check(name, "warn", found, fix)
    return Check(name, "ok", ", ".join(f"{gpu}: native ({levels[gpu]})" for gpu in kinds))


def _versions(findings: Mapping[str, Any]) -> Check:
    torch_cuda = findings["torch_cuda"]
    if torch_cuda and torch_cuda.startswith("11."):
        return Check("CUDA versions", "ok", f"torch and ONNX Runtime both use CUDA 11 (torch: {torch_cuda})")
    found = f"torch uses CUDA {torch_cuda} and ONNX Runtime 11.8, each its own libraries, with one driver"
    return Check("CUDA versions", "ok", found)
