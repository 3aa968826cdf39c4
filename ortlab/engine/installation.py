"""Which packages are installed, whether they can train together, and which command repairs it if they cannot.

Nothing here imports torch or onnxruntime, except :func:`have`: a broken installation must be explained before
it is touched, because the imports fail with messages that name neither the cause nor the cure.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import platform
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final, TypeAlias

from ortlab.errors import InstallError
from ortlab.options.switches import Need

ORT_VERSION: Final = "1.19.2"
CPU: Final = "onnxruntime-training-cpu"
CUDA: Final = "onnxruntime-training"

Version: TypeAlias = tuple[int, ...]

# (first, first that is too new); the same as in pyproject.toml, which pip may have been told to ignore.
PYTHONS: Final = ((3, 10), (3, 13))
PACKAGES: Final[dict[str, tuple[Version, Version | None]]] = {
    "torch": ((2, 4), (2, 16)),
    "onnx": ((1, 16), None),
    "numpy": ((1, 26), None),
}
# The CUDA wheels of 1.19.2 end here; those for the CPU go on to 3.12.
_LAST_CUDA_PYTHON: Final = (3, 11)
# Named like ONNX Runtime, but packages of their own that live beside it.
_NEIGHBOURS: Final = frozenset({"onnxruntime-extensions", "onnxruntime-tools", "onnxruntime-genai"})


@dataclass(frozen=True)
class Distribution:
    """One installed distribution that provides the package `onnxruntime`."""

    name: str  # normalised, as pip shows it: "onnxruntime-training-cpu"
    version: str  # as its metadata says
    location: Path  # folder that it is installed in

    @property
    def is_training(self) -> bool:
        """Whether it is the release that ortlab works with; local parts ("+cu118") do not count."""
        return self.name in {CPU, CUDA} and self.version.split("+")[0] == ORT_VERSION


def distributions() -> tuple[Distribution, ...]:
    """Return every installed distribution that provides the package `onnxruntime`, sorted by name."""
    # If there are several, they have overwritten each other's files.
    found: dict[str, Distribution] = {}
    for each in metadata.distributions():
        name = _normalised(each.metadata["Name"] or "")
        # A distribution that is on the path twice counts as the first of the two, as for the import.
        if name not in found and _provides_onnxruntime(name, each):
            found[name] = Distribution(name, each.version, Path(str(each.locate_file(""))))
    return tuple(sorted(found.values(), key=lambda one: one.name))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _provides_onnxruntime(name: str, distribution: metadata.Distribution) -> bool:
    if not name.startswith(("onnxruntime", "ort-nightly")) or name in _NEIGHBOURS:
        return False
    top_level = distribution.read_text("top_level.txt")
    return top_level is None or "onnxruntime" in top_level.split()


def check() -> None:
    """Raise `InstallError`, with the command that repairs it, unless the installed packages can train together."""
    check_python()
    check_packages()
    check_onnxruntime()


def check_python() -> Version:
    """Return the version of Python; raise `InstallError` if there is no onnxruntime-training 1.19.2 for it."""
    first, too_new = PYTHONS
    present = sys.version_info[:2]
    if not first <= present < too_new:
        raise InstallError(
            f"Python {dotted(present)} cannot be used.",
            why=f"ortlab and {CPU} {ORT_VERSION} work with Python {dotted(first)} up to, but not including, "
            f"{dotted(too_new)}.",
            fix="Make an environment with Python 3.11, for example `conda create -n ortlab python=3.11`.",
        )
    return sys.version_info[:3]


def check_packages() -> dict[str, str]:
    """Check the packages that ONNX Runtime trains with, and return their versions by name."""
    versions: dict[str, str] = {}
    for name, (first, too_new) in PACKAGES.items():
        wanted = f"{name}>={dotted(first)}" + (f",<{dotted(too_new)}" if too_new else "")
        fix = f"Run `{pip('install', wanted)}` and restart the kernel."
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise InstallError(f"{name} is not installed.", fix=fix) from None
        present = tuple(map(int, re.findall(r"\d+", versions[name])[:2]))
        if present < first or (too_new and present >= too_new):
            raise InstallError(
                f"{name} {versions[name]} cannot be used.", why=f"ortlab works with {wanted}.", fix=fix
            )
    return versions


def check_onnxruntime() -> Distribution:
    """Check that exactly one training release of ONNX Runtime is installed, whole, and return it."""
    found = distributions()
    if not found:
        raise InstallError(
            "ONNX Runtime Training is not installed.", fix=f"Run `{pip('install', _wanted(found))}`."
        )
    names = " and ".join(f"{one.name} {one.version}" for one in found)
    repair = (
        f"Run `{pip('uninstall', '-y', *(one.name for one in found))} && "
        f"{pip('install', _wanted(found))}`, then restart the kernel."
    )
    if len(found) > 1:
        raise InstallError(
            f"{names} are installed together.",
            why="Each installs the package `onnxruntime` over the other's files.",
            fix=repair,
        )
    [one] = found
    if not one.is_training:
        raise InstallError(
            f"{names} is installed, which cannot train with ORTModule as ortlab needs it.",
            why=f"Training ended with release {ORT_VERSION} of {CPU} and {CUDA}.",
            fix=repair,
        )
    damage = _damage(one)
    if damage:
        raise InstallError(f"The files of {names} are damaged.", why=damage, fix=repair)
    missing = [name for name in _requirements(one.name) if not _is_installed(name)]
    if missing:
        raise InstallError(
            f"{names} lacks packages that it needs: {', '.join(missing)}.",
            fix=f"Run `{pip('install', *missing)}` and restart the kernel.",
        )
    return one


def _damage(one: Distribution) -> str:
    """Say what another ONNX Runtime, perhaps removed since, has done to the files; "" if nothing."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return "Its metadata is there, but not the package `onnxruntime`."
    package = Path(spec.origin).parent
    if not (package / "training" / "ortmodule" / "__init__.py").is_file():
        return f"{package} has no folder training/ortmodule."
    about = package / "capi" / "build_and_package_info.py"
    built = (
        re.search(r"package_name = '([^']+)'", about.read_text(encoding="utf-8")) if about.is_file() else None
    )
    if built and _normalised(built[1]) != one.name:
        return f"{package} holds the files of {built[1]}."
    return ""


def _requirements(name: str) -> list[str]:
    lines = [line for line in metadata.requires(name) or () if "extra ==" not in line]
    return [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in lines]


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _wanted(found: tuple[Distribution, ...]) -> str:
    """Choose the release for CUDA if one for a GPU was there and this Python has it, or else the CPU's."""
    here = (platform.system(), platform.machine())
    possible = here == ("Linux", "x86_64") and sys.version_info[:2] <= _LAST_CUDA_PYTHON
    gpu = any(one.name in {CUDA, "onnxruntime-gpu", "ort-nightly-gpu"} for one in found)
    return f"{CUDA if gpu and possible else CPU}=={ORT_VERSION}"


def pip(*arguments: str) -> str:
    """Return a command line of the pip that belongs to this very Python; a bare `pip` may be another one's."""
    return shlex.join([sys.executable, "-m", "pip", *arguments])


def dotted(version: Version) -> str:
    """Write a version as pip does: (2, 4) is "2.4"."""
    return ".".join(map(str, version))


def import_apart(name: str) -> None:
    """Import a module for the first time in a thread of its own, whose frames are the import's alone."""
    # On its import onnxruntime tries ORTModule. Beside a current torch that fails, and functions of torch that
    # ORTModule has replaced by then keep the error. Its traceback would lead to the frames of whoever wraps a model
    # here, and that model would never be freed. ORTModule imports torch's loader of C++ code, which warns where there
    # is a CUDA compiler and no GPU; that is left out, since nothing is compiled.
    if name in sys.modules:
        return
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addFilter(_is_not_of_cuda)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(importlib.import_module, name).result()
    finally:
        logger.removeFilter(_is_not_of_cuda)


def _is_not_of_cuda(record: logging.LogRecord) -> bool:
    return not record.msg.startswith("No CUDA runtime is found")


@functools.cache
def have() -> frozenset[Need]:
    """Find out what switches can rely on here; the first call imports torch and onnxruntime.

    A package that cannot be imported is not part of the result.
    """
    present = {
        need
        for need, module in {Need.TRITON: "triton", Need.DEEPSPEED: "deepspeed"}.items()
        if importlib.util.find_spec(module)
    }
    try:
        import torch

        import_apart("onnxruntime")
        import onnxruntime
        from onnxruntime.capi import _pybind_state
    except ImportError:
        return frozenset(present)
    if torch.cuda.is_available() and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        present.add(Need.CUDA)
        if torch.cuda.get_device_capability() >= (8, 0):
            present.add(Need.AMPERE)
    if getattr(_pybind_state, "is_triton_enabled", bool)():
        present.add(Need.TRITON_BUILD)
    return frozenset(present)


def versions() -> dict[str, str]:
    """Return package versions by name: the installed ONNX Runtime distribution, torch, onnx, numpy."""
    # They are read once in a process, which keeps what it has imported, and takes half a second among many packages.
    return dict(_versions())


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    training = {one.name: one.version for one in distributions()}
    return tuple((training | {name: metadata.version(name) for name in ("torch", "onnx", "numpy")}).items())
