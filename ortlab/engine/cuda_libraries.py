"""The CUDA 11 libraries of ONNX Runtime's CUDA provider: where they are, and loading them beside any torch.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
    """Ask the NVIDIA driver which CUDA it runs, and start it; call it in a process of its own.

    Once the driver is started, it ignores changes of ``CUDA_VISIBLE_DEVICES``, and forked processes cannot use CUDA.
    """
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
    999: "CUDA_ERROR_UNKNOWN; a restart of the machine, or loading nvidia_uvm, often mends it",
}
"""Codes of ``cuda.h`` that people meet."""


def examine() -> tuple[Found, ...]:
    """Look for each library, in the wheels first, then where the system keeps such, and try to load it."""
    return tuple(_find(library) for library in LIBRARIES)


def preload() -> tuple[Found, ...]:
    """Load the libraries, so that the provider finds them; call it before a session is made for CUDA.

    Returns what was loaded and what was not; nothing where there is nothing to do: no CUDA provider, or no driver.
    """
    if provider() is None or _driver_library() is None:
        return ()
    return examine()


def _driver_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(DRIVER)
    except OSError:
        return None


def _find(library: Library) -> Found:
    folders = [*_wheel_folders(library), *_system_folders()]
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


def _wheel_folders(library: Library) -> list[Path]:
    return [Path(entry or ".") / "nvidia" / library.folder / "lib" for entry in sys.path]


def _system_folders() -> list[Path]:
    entries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH", "CUDNN_HOME")]
    homes += ["/usr/local/cuda-11.8", "/usr/local/cuda"]
    folders = [Path(entry) for entry in entries if entry]
    return folders + [Path(home) / name for home in homes if home for name in ("lib64", "lib")]


def kernels_for(capability: tuple[int, int]) -> str:
    """Say which of the provider's kernels a GPU with a compute capability, as (8, 6), runs: "native", "ptx" or "none".

    With "ptx" the driver compiles them at their first use, which takes minutes, once. Machine code runs on its own
    major capability, from its minor one on (CUDA C++ Programming Guide, compatibility).
    """
    if any(capability[0] == major and capability[1] >= minor for major, minor in NATIVE):
        return "native"
    return "ptx" if capability > NATIVE[0] else "none"
