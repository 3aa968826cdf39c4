"""The calls of PyTorch's operators that need no Python: ``compiled_calls.cpp``, compiled and connected.

ONNX Runtime calls the library for each ``ATen`` node; the library calls :mod:`~ortlab.engine.operators.aten_executor`
for what it does not compute itself. A small model makes dozens of such calls in a step, and each takes a few
microseconds instead of thirty or, where Python's code is not in the processor's caches, a hundred and more. Both ways
call the same kernels of torch, so the numbers are the same bits.

It needs a C++ compiler (Linux, macOS) and PyTorch 2.13, the first with all of `_FUNCTIONS`: earlier ones write each
error to the terminal. Without them every call goes through Python, as it does where the environment variable
`ORTLAB_COMPILE` is 0.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from ortlab.engine import libraries
from ortlab.errors import BuildError

COMPILE_VARIABLE: Final = "ORTLAB_COMPILE"
"""Environment variable that, set to 0, lets every call of PyTorch's operators go through Python."""

_FUNCTIONS: Final = (
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_empty_strided",
    "aoti_torch_new_tensor_handle",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_dtype",
    "aoti_torch_is_contiguous",
    "aoti_torch_is_defined",
    "aoti_torch_cpu_mm_out",
    "aoti_torch_cpu_addmm_out",
    "torch_call_dispatcher",
    "torch_new_list_reserve_size",
    "torch_list_push_back",
    "torch_new_stable_ivalue",
    "aoti_torch_grad_mode_is_enabled",
    "aoti_torch_grad_mode_set_enabled",
)
"""Functions of torch's C interface, in the order of ``struct Torch``."""

_GELU_BACKWARD: Final = (
    "_ZN2at4_ops13gelu_backward4callERKNS_6TensorES4_St17basic_string_viewIcSt11char_traitsIcEE"
)
"""``at::_ops::gelu_backward::call``, the last function of ``struct Torch``, which may be missing."""


class _Torch(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_void_p) for name in (*_FUNCTIONS, _GELU_BACKWARD)]


class _Connected:
    """The library of this process, once it is there, or why there is none."""

    library: Any = None
    lacking = "nothing has been wrapped"
    seed = 1  # that ONNX Runtime was given last


def connect(in_python: int) -> int:
    """Return the address of the library's function for ORT, or 0; `in_python` is that of the one for other calls."""
    if _Connected.library is None:
        _Connected.lacking = _connect(in_python)
    return 0 if _Connected.library is None else int(_Connected.library.ortlab_execute())


def lacking() -> str:
    """Say why every call goes through Python; empty where the library is in use."""
    return _Connected.lacking


def computed() -> int:
    """Return how many calls the library has computed in this process."""
    return 0 if _Connected.library is None else int(_Connected.library.ortlab_computed())


def library() -> Any:
    """Return the library itself, whose functions are declared in ``dropout.h`` and at the end of its source."""
    return _Connected.library


def seed(value: int) -> None:
    """Let the next dropouts take this seed and those after it, as ONNX Runtime's do after ``onnxruntime.set_seed``."""
    _Connected.seed = value
    if _Connected.library is not None:
        _Connected.library.ortlab_seed(value)


@contextmanager
def through_python() -> Iterator[None]:
    """Let every call go through Python for a while."""
    if _Connected.library is None:
        yield
        return
    _Connected.library.ortlab_enable(False)  # noqa: FBT003 - a function of C
    try:
        yield
    finally:
        _Connected.library.ortlab_enable(True)  # noqa: FBT003


def _connect(in_python: int) -> str:
    """Compile, load and connect the library; return why that cannot be, or nothing."""
    if os.environ.get(COMPILE_VARIABLE, "").strip() == "0":
        return f"{COMPILE_VARIABLE} is 0"
    functions, missing = _functions()
    if missing:
        return f"PyTorch {torch.__version__} has no {missing}; 2.13 and later have it"
    try:
        library = ctypes.CDLL(str(libraries.build(source=libraries.COMPILED_CALLS)))
    except BuildError as error:
        return " ".join(filter(None, (error.what, error.why)))
    except OSError as error:
        return str(error)
    library.ortlab_connect.argtypes = [ctypes.POINTER(_Torch), ctypes.c_void_p]
    library.ortlab_enable.argtypes = [ctypes.c_bool]
    library.ortlab_computed.restype = ctypes.c_uint64
    library.ortlab_execute.restype = ctypes.c_size_t
    library.ortlab_seed.argtypes = [ctypes.c_uint64]
    library.ortlab_take_seeds.argtypes, library.ortlab_take_seeds.restype = [ctypes.c_uint64], ctypes.c_uint64
    library.ortlab_dropout.argtypes = [
        *[ctypes.c_void_p] * 3,
        ctypes.c_int64,
        ctypes.c_float,
        ctypes.c_uint64,
    ]
    library.ortlab_dropout_backward.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_float]
    library.ortlab_seed(_Connected.seed)
    library.ortlab_connect(ctypes.byref(functions), in_python)
    _Connected.library = library
    return ""


def _functions() -> tuple[_Torch, str]:
    """Return the addresses of torch's functions, and the name of one that it lacks."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    functions = _Torch()
    try:
        loaded = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    except OSError:
        return functions, name
    for function in (*_FUNCTIONS, _GELU_BACKWARD):
        if hasattr(loaded, function):
            setattr(functions, function, ctypes.cast(getattr(loaded, function), ctypes.c_void_p).value)
        elif function in _FUNCTIONS:
            return functions, function
    return functions, ""
