"""What stands in for the C++ extensions of torch that ORTModule 1.19.2 asks for.

ORTModule wants its users to compile ``aten_op_executor`` and ``torch_interop_utils`` into site-packages
(``python -m onnxruntime.training.ortmodule.torch_cpp_extensions.install``), which takes minutes, needs a
compiler and fails beside today's torch. Without them it falls back to PyTorch. It uses five functions of
them, four of which only return addresses of C functions; :mod:`ortlab.engine.operators.aten_executor` and
:mod:`ortlab.engine.functions.abi` make those.

On a GPU it asks for ``torch_gpu_allocator`` as well, which needs CUDA's headers: three addresses of plain C functions
that allocate, free, and empty the cache, so that ORT takes its GPU memory from torch's pool. ctypes makes them of
torch's own Python functions, which allocate on the current device and stream, as the extension does.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine import libraries
from ortlab.engine.border import keep_error
from ortlab.engine.functions import abi as function_abi
from ortlab.engine.functions import export as function_export
from ortlab.engine.functions.abi import Runners
from ortlab.engine.functions.context import release_all
from ortlab.engine.operators import aten_executor, compiled_calls
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from ortlab.engine.libraries import Progress


_PACKAGE: Final = "onnxruntime.training.ortmodule.torch_cpp_extensions"
_ATEN: Final = "aten_op_executor"
_FUNCTIONS: Final = "torch_interop_utils"
_ALLOCATOR: Final = "torch_gpu_allocator"
_OWN: Final = "ONNX Runtime's own extension"


@dataclass(frozen=True)
class ExtensionStatus:
    """How ONNX Runtime calls PyTorch here."""

    # How PyTorch's operators are called: "compiled calls", "ctypes" with the reason, or ORT's own extension.
    aten: str
    # How autograd Functions are run: "ctypes x86-64 System V", "compiled", ORT's own extension, "not chosen yet", or
    # "unavailable: ..." with the reason.
    functions: str
    cache: Path  # the folder for what is compiled; it need not exist
    allocator: str = "ctypes"  # how ORT takes GPU memory from torch's pool: "ctypes", or ORT's own extension


class _Installed:
    """What :func:`install` chose for this process."""

    aten = ""
    functions = ""
    allocator = ""


def install() -> None:
    """Give ORTModule its extensions; call it once ``onnxruntime.training.ortmodule`` can be imported."""
    # Extensions that were compiled into onnxruntime stay if they can be imported. Two libraries are compiled, once, in
    # a few seconds: the calls of PyTorch's operators, which ctypes makes more slowly; and, where ctypes cannot run
    # Functions (elsewhere than on x86-64 Linux and macOS), their runner. If that is impossible, only models with custom
    # autograd Functions fail, when they are exported.
    if _Installed.aten:
        return
    from onnxruntime.training import ortmodule

    if _imports(_ATEN):
        _Installed.aten = _OWN
    else:
        _insert(_ATEN, aten_executor)
        aten_executor.execute_aten_operator_address()  # ORTModule asks for it later; this compiles and connects
        lacking = compiled_calls.lacking()
        _Installed.aten = f"ctypes ({lacking})" if lacking else "compiled calls"
    if _imports(_FUNCTIONS):
        _Installed.functions = _OWN
    else:
        use_runners(_choose_runners())
    _Installed.allocator = _OWN if _imports(_ALLOCATOR) else "ctypes"
    if _Installed.allocator != _OWN:
        _insert(_ALLOCATOR, sys.modules[__name__])
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
    """Compile both libraries into the user's cache, unless they are there, and return that of the Function runner."""
    report = progress or (lambda _stage, _fraction: None)
    libraries.build(lambda stage, fraction: report(stage, fraction / 2), libraries.COMPILED_CALLS)
    return libraries.build(lambda stage, fraction: report(stage, (1 + fraction) / 2))


def status() -> ExtensionStatus:
    """Say how ONNX Runtime calls PyTorch here; before :func:`install`, how it would without a compiler."""
    functions = _Installed.functions
    if not functions:
        functions = "ctypes x86-64 System V" if function_abi.system_v_is_spoken() else "not chosen yet"
    return ExtensionStatus(
        _Installed.aten or "ctypes",
        functions,
        libraries.cache_folder(),
        _Installed.allocator or "ctypes",
    )


def _choose_runners() -> Runners:
    if function_abi.system_v_is_spoken():
        return function_abi.system_v_runners()
    try:
        return function_abi.compiled_runners(libraries.build())
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


Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
EmptyCache = ctypes.CFUNCTYPE(None)

_NAME: Final = "allocation from torch's pool"
_PROBE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Bridge:
    """Three C functions, callable from C and from Python; they live as long as this record."""

    allocate: Any
    free: Any
    empty_cache: Any


def bridge(
    allocate: Callable[[int], int], free: Callable[[int], object], empty_cache: Callable[[], object]
) -> Bridge:
    """Make C functions of Python's."""
    # `allocate` takes bytes and returns an address, `free` takes the address, and `empty_cache` gives unused memory
    # back to the device. What one of them raises, such as torch's OutOfMemoryError, is kept for whoever called ORT
    # (`border`); where `allocate` raises, ORT gets no memory.

    def allocating(size: int) -> int | None:
        try:
            return allocate(size)
        except BaseException as error:  # noqa: BLE001 - nothing passes the border to C
            keep_error(_NAME, error)
            return None

    def freeing(address: int | None) -> None:
        try:
            if address:
                free(address)
        except BaseException as error:  # noqa: BLE001
            keep_error(_NAME, error)

    def emptying() -> None:
        try:
            empty_cache()
        except BaseException as error:  # noqa: BLE001
            keep_error(_NAME, error)

    return Bridge(Allocate(allocating), Free(freeing), EmptyCache(emptying))


_torch: Final = bridge(
    torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete, torch.cuda.empty_cache
)


def gpu_caching_allocator_raw_alloc_address() -> int:
    """Return the address of the C function that allocates."""
    return _address(_torch.allocate)


def gpu_caching_allocator_raw_delete_address() -> int:
    """Return the address of the C function that frees."""
    return _address(_torch.free)


def gpu_caching_allocator_empty_cache_address() -> int:
    """Return the address of the C function that gives unused memory back to the device."""
    return _address(_torch.empty_cache)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None  # noqa: S101 - ctypes made it
    return address


def allocator_fault() -> str:
    """Try the bridge on the current GPU: take 1 MiB through its address, as ORT does, and give it back."""
    # Returns what is wrong, in words; "" if torch's pool has grown by that, and shrunk again.
    allocate = Allocate(gpu_caching_allocator_raw_alloc_address())
    free = Free(gpu_caching_allocator_raw_delete_address())
    before = torch.cuda.memory_allocated()
    address = allocate(_PROBE_BYTES)
    if not address:
        return "torch's pool gave no memory"
    held = torch.cuda.memory_allocated() - before
    free(address)
    left = torch.cuda.memory_allocated() - before
    if held < _PROBE_BYTES or left:
        return f"torch's pool grew by {held} bytes for {_PROBE_BYTES}, and kept {left}"
    return ""
