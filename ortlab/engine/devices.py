"""Which devices the installed ONNX Runtime can execute a model on, and the CUDA 11 libraries that it needs on a GPU.

``libonnxruntime_providers_cuda.so`` of 1.19.2 names six libraries of CUDA 11.8 and cuDNN 8, which no torch of today
brings. The wheels nvidia-*-cu11 have them, in folders where the system's loader does not look; a library that is loaded
already is found by its name, however it was. Their symbols carry versions, so CUDA 12 or 13 of torch in the same
process are no trouble.

Without an NVIDIA driver nothing is loaded: the provider would then end the whole process where it now says that a
library is missing (``cudaDriverWrapper.cc``).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ortlab.engine.installation import pip
from ortlab.errors import BuildError, InstallError

if TYPE_CHECKING:
    import torch


PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Execution provider that a session needs for a model on a device of that type."""

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def check_device(device: torch.device, available: Collection[str]) -> None:
    """Refuse a device that the installed ONNX Runtime cannot execute on, before anything is exported."""
    provider = PROVIDERS.get(device.type)
    if provider is None:
        raise BuildError(
            f"The model is on device {str(device)!r}, which ONNX Runtime Training cannot execute on.",
            why=f"It trains on {' and '.join(PROVIDERS)} ",
            fix="Move the model: model.cpu() or model.cuda().",
        )
    if provider not in available:
        raise BuildError(
            f"The model is on device {str(device)!r}, and the installed ONNX Runtime has no {provider}.",
            why="onnxruntime-training-cpu executes on the CPU only.",
            fix="Move the model to the CPU (model.cpu()), or install ortlab[cuda] in a fresh environment.",
        )
    if device.type == "cuda":
        check_libraries(examine())


def device_made_current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread while a session of it is made or run; nothing on the CPU."""
    # PyTorch trains a model on cuda:1 while cuda:0 is current. ORT's session would then take its memory from torch's
    # pool of the current GPU (see `ortlab.engine.extensions`), and would leave its own GPU the current one.
    if device.type != "cuda":
        return nullcontext()
    import torch

    return torch.cuda.device(device)


def multiplies_in_tf32() -> bool:
    """Say whether PyTorch multiplies float32 matrices in TF32 on a GPU; by default it does not, and ORT does."""
    import torch

    matmul = torch.backends.cuda.matmul
    # From torch 2.9 on; `allow_tf32` then raises where a precision was set the new way.
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


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
            fix="`ortlab doctor` names what repairs it. Without --gpu, `ortlab selftest` tests the CPU.",
        )


def gpu_faults(
    torch_version: str, torch_cuda: str | None, gpus: int, available: Collection[str], visible: str | None
) -> list[str]:
    """Say in sentences why no GPU can be used; none if one can be used."""
    lacking = []
    if torch_cuda is None:
        lacking.append(f"torch {torch_version} was built without CUDA.")
    elif not gpus:
        under = "" if visible is None else f", with {_VISIBLE}={visible!r}"
        lacking.append(f"PyTorch sees no GPU{under}.")
    if PROVIDERS["cuda"] not in available:
        lacking.append(f"This ONNX Runtime has no {PROVIDERS['cuda']}, which `ortlab[cuda]` brings.")
    return lacking


def check_libraries(found: Collection[Found]) -> None:
    """Raise BuildError if a library of CUDA 11 that the provider needs is missing."""
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


DRIVER: Final = "libcuda.so.1"
LEAST_DRIVER: Final = (11, 0)
"""CUDA version of the oldest driver that runs CUDA 11.8's libraries (450.80; NVIDIA's minor version compatibility)."""

NATIVE: Final = ((6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6))
"""Compute capabilities that the wheel of 1.19.2 has kernels for; it has PTX of the same."""

_PROVIDER: Final = "libonnxruntime_providers_cuda.so"


@dataclass(frozen=True)
class Library:
    """One library that the provider needs."""

    name: str
    soname: str  # file name with the major version
    package: str  # requirement that pip installs it by
    folder: str  # where that package keeps it, below ``nvidia``

    @property
    def stem(self) -> str:
        """The file name without a version: "libcudnn.so"."""
        return self.soname.partition(".so")[0] + ".so"


LIBRARIES: Final = (  # in the order in which they need each other
    Library("CUDA runtime", "libcudart.so.11.0", "nvidia-cuda-runtime-cu11>=11.8,<12", "cuda_runtime"),
    Library("cuBLASLt", "libcublasLt.so.11", "nvidia-cublas-cu11>=11.11,<12", "cublas"),
    Library("cuBLAS", "libcublas.so.11", "nvidia-cublas-cu11>=11.11,<12", "cublas"),
    Library("cuFFT", "libcufft.so.10", "nvidia-cufft-cu11>=10.9,<11", "cufft"),
    Library("cuRAND", "libcurand.so.10", "nvidia-curand-cu11>=10.3,<11", "curand"),
    Library("cuDNN", "libcudnn.so.8", "nvidia-cudnn-cu11>=8.9,<9", "cudnn"),
)


@dataclass(frozen=True)
class Found:
    """Where a library is."""

    library: Library
    path: str = ""  # only the file's name where the system's loader finds it; "" if it is nowhere
    others: tuple[str, ...] = ()  # files of it in other versions, which do not serve
    fault: str = ""  # what the loader says of a file that it cannot load

    @property
    def serves(self) -> bool:
        """Whether it is there and can be loaded."""
        return bool(self.path) and not self.fault


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver, as its library tells."""

    # The newest that it runs, as (12, 4); None without a driver, or if it does not tell.
    cuda: tuple[int, int] | None = None
    fault: str = ""  # what its library says on being started, such as "it sees no GPU"; "" if it starts


def provider() -> Path | None:
    """Return the file of the CUDA provider, without importing onnxruntime; None if this build has none."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "capi" / _PROVIDER
    return file if file.is_file() else None


def driver() -> Driver:
    """Ask the NVIDIA driver which CUDA it runs, and start it; call it in a process of its own."""
    # Once the driver is started, it ignores changes of ``CUDA_VISIBLE_DEVICES``, and forked processes cannot use CUDA.
    library = _driver_library()
    if library is None:
        return Driver()
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return Driver(fault="cuDriverGetVersion failed")
    # 12040 is 12.4, as cuda.h writes it.
    cuda = number.value // 1000, number.value % 1000 // 10
    code: int = library.cuInit(0)
    return Driver(cuda, "" if code == 0 else _FAULTS.get(code, f"cuInit returned {code}"))


_FAULTS: Final = {
    2: "it has no memory left (CUDA_ERROR_OUT_OF_MEMORY)",
    100: "it sees no GPU (CUDA_ERROR_NO_DEVICE)",
    101: "CUDA_VISIBLE_DEVICES names a GPU that is not there (CUDA_ERROR_INVALID_DEVICE)",
    803: "its library and its kernel module are of different versions (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)",
    999: "CUDA_ERROR_UNKNOWN; a restart of the machine, or loading nvidia_uvm, often helps",
}
"""Codes of ``cuda.h`` that people meet."""


def examine() -> tuple[Found, ...]:
    """Look for each library, in the wheels first, then where the system keeps such, and try to load it."""
    return tuple(_find(library) for library in LIBRARIES)


def preload() -> tuple[Found, ...]:
    """Load the libraries, so that the provider finds them; call it before a session is made for CUDA."""
    # Returns what was loaded and what was not; nothing where there is nothing to do: no CUDA provider, or no driver.
    if provider() is None or _driver_library() is None:
        return ()
    return examine()


def _driver_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(DRIVER)
    except OSError:
        return None


def _find(library: Library) -> Found:
    wheels = (Path(entry or ".") / "nvidia" / library.folder / "lib" for entry in sys.path)
    folders = [*wheels, *_system_folders()]
    others = sorted(
        {
            str(file)
            for folder in folders
            for file in folder.glob(f"{library.stem}.*")
            if not _is(file, library)
        }
    )
    fault = ""
    for folder in folders:
        file = folder / library.soname
        if not file.is_file():
            continue
        try:
            # RTLD_LOCAL: the provider finds it by its name, and torch's own libraries do not see its symbols.
            ctypes.CDLL(str(file))
        except OSError as error:
            fault = fault or str(error)
            continue
        return Found(library, str(file), tuple(others))
    try:
        ctypes.CDLL(library.soname)
    except OSError:
        return Found(library, "", tuple(others), fault)
    return Found(library, library.soname, tuple(others))


def _is(file: Path, library: Library) -> bool:
    """Tell whether a file is the library, perhaps with more of a version: libcudnn.so.8.9.6."""
    wanted, present = (re.findall(r"\d+", name.rpartition(".so")[2]) for name in (library.soname, file.name))
    return present[:1] == wanted[:1]


def _system_folders() -> list[Path]:
    entries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH", "CUDNN_HOME")]
    homes += ["/usr/local/cuda-11.8", "/usr/local/cuda"]
    folders = [Path(entry) for entry in entries if entry]
    return folders + [Path(home) / name for home in homes if home for name in ("lib64", "lib")]


def kernels_for(capability: tuple[int, int]) -> str:
    """Say which of the provider's kernels a GPU of compute capability (8, 6), say, runs: "native", "ptx" or "none"."""
    # With "ptx" the driver compiles them at their first use, which takes minutes, once. Machine code runs on its own
    # major capability, from its minor one on (CUDA C++ Programming Guide, compatibility).
    if any(capability[0] == major and capability[1] >= minor for major, minor in NATIVE):
        return "native"
    return "ptx" if capability > NATIVE[0] else "none"
