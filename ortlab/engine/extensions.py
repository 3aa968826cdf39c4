"""What stands in for the C++ extensions of torch that ORTModule 1.19.2 asks for.

ORTModule wants its users to compile ``aten_op_executor`` and ``torch_interop_utils`` into site-packages
(``python -m onnxruntime.training.ortmodule.torch_cpp_extensions.install``), which takes minutes, needs a
compiler and fails beside today's torch. Without them it falls back to PyTorch. It uses five functions of
them, four of which only return addresses of C functions; :mod:`ortlab.engine.operators.aten_executor` and
:mod:`ortlab.engine.functions.abi` make those. On a GPU it asks for ``torch_gpu_allocator`` as well, which needs CUDA's
headers: :mod:`ortlab.engine.gpu_allocator`.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from ortlab.engine import gpu_allocator
from ortlab.engine.functions import abi as function_abi
from ortlab.engine.functions import export as function_export
from ortlab.engine.functions import library as function_library
from ortlab.engine.functions.abi import Runners
from ortlab.engine.functions.context import release_all
from ortlab.engine.operators import aten_executor
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from ortlab.engine.functions.library import Progress

_PACKAGE: Final = "onnxruntime.training.ortmodule.torch_cpp_extensions"
_ATEN: Final = "aten_op_executor"
_FUNCTIONS: Final = "torch_interop_utils"
_ALLOCATOR: Final = "torch_gpu_allocator"
_OWN: Final = "ONNX Runtime's own extension"


@dataclass(frozen=True)
class ExtensionStatus:
    """How ONNX Runtime calls PyTorch here."""

    aten: str  # how PyTorch's operators are called: "ctypes", or ORT's own extension
    # How autograd Functions are run: "ctypes x86-64 System V", "compiled", ORT's own extension, "not chosen yet", or
    # "unavailable: ..." with the reason.
    functions: str
    cache: Path  # the folder for what is compiled; it need not exist
    allocator: str = "ctypes"  # how ORT takes GPU memory from torch's pool: "ctypes", or ORT's own extension

    @property
    def functions_available(self) -> bool:
        """Whether models with custom autograd Functions can be exported."""
        return not self.functions.startswith("unavailable")


class _Installed:
    """What :func:`install` chose for this process."""

    aten = ""
    functions = ""
    allocator = ""


def install() -> None:
    """Give ORTModule its extensions; call it once ``onnxruntime.training.ortmodule`` can be imported.

    Extensions that were compiled into onnxruntime stay if they can be imported. Nothing is compiled where
    ctypes can do it (x86-64 Linux and macOS); elsewhere the Function runner is, which takes a second or
    two, once. If that is impossible, only models with custom autograd Functions fail, when they are
    exported. Calling it again changes nothing.
    """
    if _Installed.aten:
        return
    from onnxruntime.training import ortmodule

    _Installed.aten = _OWN if _imports(_ATEN) else "ctypes"
    if _Installed.aten != _OWN:
        _insert(_ATEN, aten_executor)
    if _imports(_FUNCTIONS):
        _Installed.functions = _OWN
    else:
        use_runners(_choose_runners())
    _Installed.allocator = _OWN if _imports(_ALLOCATOR) else "ctypes"
    if _Installed.allocator != _OWN:
        _insert(_ALLOCATOR, gpu_allocator)
    function_export.install()
    importlib.import_module(_PACKAGE).is_installed = lambda _path: True  # type: ignore[attr-defined]
    # Set when the package was imported, because its folder holds no library.
    if "extensions were not detected" in str(ortmodule._FALLBACK_INIT_EXCEPTION):
        ortmodule._FALLBACK_INIT_EXCEPTION = None


def use_runners(runners: Runners) -> None:
    """Make ORT run Functions through other runners, from the next call on."""
    extension = ModuleType(f"{_PACKAGE}.{_FUNCTIONS}", "Runs autograd Functions for ONNX Runtime (ortlab).")
    extension.get_custom_function_forward_runner = lambda: runners.forward  # type: ignore[attr-defined]
    extension.get_custom_function_backward_runner = lambda: runners.backward  # type: ignore[attr-defined]
    extension.clear_all_grad_fns = release_all  # type: ignore[attr-defined]
    _insert(_FUNCTIONS, extension)
    # ORTModule asks for the addresses once, when it is first used.
    if "onnxruntime.training.ortmodule._custom_autograd_function" in sys.modules:
        from onnxruntime.capi import _pybind_state

        _pybind_state.register_forward_runner(runners.forward)
        _pybind_state.register_backward_runner(runners.backward)
    _Installed.functions = runners.path
    function_export.forbid("" if runners.forward else runners.path.removeprefix("unavailable: "))


def build(progress: Progress | None = None) -> Path:
    """Compile the Function runner into the user's cache, unless it is there, and return the compiled library.

    Raises `BuildError` where there is no compiler, it fails, or the cache folder cannot be written.
    """
    return function_library.build(progress)


def status() -> ExtensionStatus:
    """Say how ONNX Runtime calls PyTorch here; before :func:`install`, how it would without a compiler."""
    functions = _Installed.functions
    if not functions:
        functions = "ctypes x86-64 System V" if function_abi.system_v_is_spoken() else "not chosen yet"
    return ExtensionStatus(
        _Installed.aten or "ctypes",
        functions,
        function_library.cache_folder(),
        _Installed.allocator or "ctypes",
    )


def _choose_runners() -> Runners:
    if function_abi.system_v_is_spoken():
        return function_abi.system_v_runners()
    try:
        return function_abi.compiled_runners(function_library.build())
    except (BuildError, OSError) as error:
        reason = (
            " ".join(filter(None, (error.what, error.why))) if isinstance(error, BuildError) else str(error)
        )
        return Runners(f"unavailable: {reason}", 0, 0)


def _imports(name: str) -> bool:
    """Say whether ORT's own extension is there and fits this torch; one that does not cannot be loaded."""
    try:
        importlib.import_module(f"{_PACKAGE}.{name}")
    except (ImportError, OSError):
        return False
    return True


def _insert(name: str, extension: ModuleType) -> None:
    sys.modules[f"{_PACKAGE}.{name}"] = extension
    setattr(importlib.import_module(_PACKAGE), name, extension)
