"""The C++ side of the Function runners: from ONNX Runtime's call to `function_runner` and back.

ORT calls its two runners through this type (``custom_function_register.h`` of 1.19.2; the installed package
shows it in ``torch_cpp_extensions/cpu/torch_interop_utils/custom_function_fw.h``)::

    std::vector<PyObject*> runner(const char* name, void* callback, const std::vector<int64_t>& requires_grad,
                                  const std::vector<int64_t>& is_tensor, const bool training,
                                  const std::vector<int64_t>& reuse, const char* kernel, const bool safe,
                                  const std::vector<PyObject*>& arguments);

There are two ways to be such a function, and both end in :func:`_delegate`:

``compiled``
    ``runner.cpp``, 60 lines without a header of Python or torch, turned into plain C by whatever C++
    compiler the machine has: right on every platform whose compiler is compatible with ORT's.

``ctypes x86-64 System V``
    A ctypes callback that speaks the C++ ABI of Linux and macOS on x86-64, where it needs only three facts:

    - A ``std::vector`` that is returned has a non-trivial destructor, so it is returned in memory: the
      caller passes the address of uninitialised space as a hidden first argument (``rdi``), all others move
      up by one, and the callee returns that address in ``rax`` (System V psABI for AMD64, 3.2.3 "Returning
      of values"; Itanium C++ ABI, 3.1.3.1). As a C function that is ``void* f(void* result, ...)``. A
      reference is passed as an address, and ``bool`` as the low byte of its register or stack slot.
    - ``std::vector<T>`` is three pointers: begin, end of the elements, end of the storage (libstdc++
      ``bits/stl_vector.h`` ``_Vector_impl_data``; libc++ ``__begin_, __end_, __cap_``), with the standard
      allocator taking no space.
    - ORT destroys the returned vector with its ``operator delete``, so the storage must come from
      ``operator new``, which the C++ runtime exports as ``_Znwm`` (mangled by the Itanium ABI, ``size_t``
      being ``unsigned long``).

    Other platforms differ: AArch64 passes the result's address in ``x8``, which no C signature can name;
    Windows has another ABI and an allocator that aligns large vectors. There only the compiled way exists.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch

from ortlab.engine.border import keep_error
from ortlab.engine.functions.runner import FunctionCall, run_backward, run_forward

_int64s = ctypes.POINTER(ctypes.c_int64)
_objects = ctypes.POINTER(ctypes.c_void_p)


class NativeCall(ctypes.Structure):
    """A runner's arguments as plain C; the same structure is declared in ``runner.cpp``."""

    # ``requires_grad``, ``is_tensor`` and ``arguments`` have ``n_arguments`` elements, ``reuse`` and ``outputs``
    # ``n_outputs``. ``outputs`` is filled with new references.

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("callback", ctypes.c_void_p),
        ("kernel", ctypes.c_char_p),
        ("requires_grad", _int64s),
        ("is_tensor", _int64s),
        ("arguments", _objects),
        ("n_arguments", ctypes.c_size_t),
        ("reuse", _int64s),
        ("n_outputs", ctypes.c_size_t),
        ("outputs", _objects),
        ("backward", ctypes.c_bool),
        ("training", ctypes.c_bool),
        ("safe", ctypes.c_bool),
    )


_add_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def _delegate(pointer: Any) -> bool:
    """Run the Function that a `NativeCall` asks for; if it fails, keep the exception and return False."""
    native = pointer.contents
    name = native.name.decode()
    try:
        # ORT may be called under inference mode, where tensors have no versions to tell a write by.
        with torch.inference_mode(mode=False):
            call = _read(native, name)
            results = run_backward(call) if native.backward else run_forward(call)
            del call
    except BaseException as error:  # noqa: BLE001 - nothing may be raised into C; it is kept instead
        keep_error(f"{name}.{'backward' if native.backward else 'forward'}", error)
        return False
    for position in range(len(results)):
        _add_reference(results[position])
        native.outputs[position] = id(results[position])
    if not native.backward and results[0] is None:
        # `ProcessReturnValues` of 1.19.2 (torch_proxy.cc) adds a reference for a context, but forgets to
        # for None, although its pool will drop one: enough evaluation steps would free None and abort the
        # interpreter.
        _add_reference(None)
    # A debugger in the Function keeps this frame, and ORT wants to hold the only reference to each capsule.
    results.clear()
    return True


def _read(native: NativeCall, name: str) -> FunctionCall:
    count = native.n_arguments
    return FunctionCall(
        name=name,
        callback=_object_at(native.callback),
        kernel=native.kernel,
        requires_grad=tuple(flag == 1 for flag in native.requires_grad[:count]),
        is_tensor=tuple(flag == 1 for flag in native.is_tensor[:count]),
        arguments=tuple(_object_at(address) for address in native.arguments[:count]),
        reuse=tuple(native.reuse[: native.n_outputs]),
        training=native.training,
        safe=native.safe,
    )


def _object_at(address: int) -> Any:
    """Return the object that a ``PyObject*`` points to, with a reference of our own."""
    return ctypes.cast(address, ctypes.py_object).value


_Delegate = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.POINTER(NativeCall))
# ORT keeps the addresses for ever, so the callbacks must live as long as the process: they are module globals.
_delegate_callback: Final = _Delegate(_delegate)


class Runners(NamedTuple):
    """The addresses of the two functions with ORT's C++ signature; `path` tells the doctor how they are made."""

    path: str
    forward: int
    backward: int


def compiled_runners(library: Path) -> Runners:
    """Load the compiled runners and point them at this process's Python; raise OSError if they cannot be loaded."""
    loaded = ctypes.CDLL(str(library))
    loaded.ortlab_set_delegate(_delegate_callback)
    for function in (loaded.ortlab_forward_runner, loaded.ortlab_backward_runner):
        function.restype = ctypes.c_size_t
    return Runners("compiled", loaded.ortlab_forward_runner(), loaded.ortlab_backward_runner())


def system_v_is_spoken() -> bool:
    """Say whether the ctypes way is right here: x86-64, 64-bit Python, and Linux or macOS."""
    return (
        sys.platform in {"linux", "darwin"}
        and platform.machine() in {"x86_64", "amd64"}
        and ctypes.sizeof(ctypes.c_void_p) == 8  # noqa: PLR2004 - a 32-bit Python on a 64-bit machine
    )


def system_v_runners() -> Runners:
    """Return the ctypes runners; call it only where :func:`system_v_is_spoken`."""
    forward, backward = (
        ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in _system_v_callbacks
    )
    return Runners("ctypes x86-64 System V", forward, backward)


class _Vector(ctypes.Structure):
    """``std::vector<T>`` of libstdc++ and libc++, for 8-byte elements."""

    _fields_: ClassVar = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p)]

    def __len__(self) -> int:
        return ((self.end or 0) - (self.begin or 0)) // 8

    def as_(self, kind: Any) -> Any:
        return ctypes.cast(self.begin, kind)


def _operator_new() -> Callable[[int], int]:
    """Return the C++ runtime's ``operator new``, the partner of the ``operator delete`` that ORT calls."""
    runtime = ctypes.CDLL("libc++.1.dylib" if sys.platform == "darwin" else "libstdc++.so.6")
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("_Znwm", runtime))  # type: ignore[return-value]


def _system_v(*, backward: bool) -> Any:
    """Make one runner: the hidden address of the result, then the arguments of the C++ signature."""
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_void_p,
        ctypes.POINTER(_Vector),
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(_Vector),
        ctypes.POINTER(_Vector),
        ctypes.c_bool,
        ctypes.POINTER(_Vector),
        ctypes.c_char_p,
        ctypes.c_bool,
        ctypes.POINTER(_Vector),
    )
    new = _operator_new()

    def runner(  # noqa: PLR0913, PLR0917 - the signature is ORT's
        result: Any,
        name: bytes,
        callback: int,
        requires_grad: Any,
        is_tensor: Any,
        training: bool,  # noqa: FBT001
        reuse: Any,
        kernel: bytes,
        safe: bool,  # noqa: FBT001
        arguments: Any,
    ) -> int:
        count = len(reuse.contents)
        storage = new(8 * max(count, 1))
        native = NativeCall(
            name=name,
            callback=callback,
            kernel=kernel,
            requires_grad=requires_grad.contents.as_(_int64s),
            is_tensor=is_tensor.contents.as_(_int64s),
            arguments=arguments.contents.as_(_objects),
            n_arguments=len(arguments.contents),
            reuse=reuse.contents.as_(_int64s),
            n_outputs=count,
            outputs=ctypes.cast(storage, _objects),
            backward=backward,
            training=training,
            safe=safe,
        )
        # Too few results make ORT's kernel fail, which is all that can be done here: see `callback_error`.
        given = count if _delegate(ctypes.pointer(native)) else 0
        vector = result.contents
        vector.begin, vector.end, vector.capacity = storage, storage + 8 * given, storage + 8 * max(count, 1)
        return ctypes.addressof(vector)

    return prototype(runner)


_system_v_callbacks: Final[Sequence[Any]] = (
    (_system_v(backward=False), _system_v(backward=True)) if system_v_is_spoken() else ()
)
