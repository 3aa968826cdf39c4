"""What crosses the border to C++: tensors, as the bare pointers of DLPack that ORT passes, and exceptions of callbacks.

ONNX Runtime hands tensors to its two torch extensions as ``DLManagedTensor*`` (``onnxruntime/core/dlpack``)
or as Python capsules around one. A ``DLManagedTensor`` is owned by whoever holds it and is given back by
calling its own ``deleter``; a capsule says who that is by its name: ``dltensor`` while the capsule owns the
pointer, ``used_dltensor`` once a consumer has taken it
(https://dmlc.github.io/dlpack/latest/python_spec.html).

ORT 1.19.2 speaks DLPack 0.6, which has no boolean type: it packs booleans as ``uint8`` and would refuse
torch's own boolean capsules ("Unsupported code 6"). The functions here exchange booleans as ``uint8``, whose
bytes are the same; the types of torch are restored by the callers, who know the schema.

No exception crosses the C function pointers by which ORT calls back into Python: a failed callback can only make its
kernel fail, and ORT then raises its own error, which knows nothing of the cause. So the callback leaves the exception
here, and whoever called ORT asks for it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ortlab.errors import ExecutionError, OrtlabError, caused_by

if TYPE_CHECKING:
    from torch import Tensor

_OWNING: Final = b"dltensor"
_CONSUMED: Final = b"used_dltensor"

# Prototypes of our own: setting argtypes on ctypes.pythonapi would change them for every user of ctypes.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_rename_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


class DLTensor(ctypes.Structure):
    """``DLTensor`` of DLPack 0.6, the plain description of an array."""

    # ``dtype`` is the 4-byte ``DLDataType {uint8 code; uint8 bits; uint16 lanes}``.

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    """``DLManagedTensor`` of DLPack 0.6: the description, its owner, and how to give it back."""

    _fields_ = (("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter))


def take_pointer(pointer: int) -> Tensor:
    """Make a tensor over the memory of a ``DLManagedTensor*``, not null, whose ownership ORT has handed over."""
    # The tensor is contiguous, and ``uint8`` where ORT had a boolean. The deleter is called when the tensor's storage
    # dies, or at once where torch does not know the type or device (BufferError, RuntimeError).
    capsule = _new_capsule(pointer, _OWNING, None)
    try:
        return from_dlpack(capsule)
    except BaseException:
        # The capsule has no destructor, so the array of a refused capsule has to be given back by hand. But an
        # interrupt may arrive when torch has taken it; then the tensor, which dies here, gives it back.
        if _is_named(capsule, _OWNING):
            DLManagedTensor.from_address(pointer).deleter(pointer)
        raise


def give_pointer(tensor: Tensor) -> int:
    """Hand a tensor to ORT as a ``DLManagedTensor*`` that keeps its storage alive until ORT calls the deleter."""
    # ORT reads dense memory only, so anything else is copied; autograd history is left behind.
    capsule = give_capsule(tensor)
    pointer = _pointer_of(capsule, _OWNING)
    _rename_capsule(capsule, _CONSUMED)
    return int(pointer)


def give_capsule(tensor: Tensor) -> object:
    """Hand a tensor to ORT as a capsule named ``dltensor``; see :func:`give_pointer`."""
    plain = (tensor.detach() if tensor.requires_grad else tensor).contiguous()
    capsule: object = to_dlpack(plain.view(torch.uint8) if plain.dtype is torch.bool else plain)
    return capsule


def storage_address(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor and all its views share; 0 for an empty tensor."""
    return (
        int(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided and tensor.numel() else 0
    )


def storages(tensors: Iterable[Tensor | None]) -> set[int]:
    """Return the addresses of the memory of those tensors that are given and not empty."""
    return {storage_address(tensor) for tensor in tensors if tensor is not None} - {0}


def unshared(tensor: Tensor, owned: set[int]) -> Tensor:
    """Copy a tensor whose memory is somebody else's; ORT may overwrite any buffer whose last reader has run."""
    # `owned` holds the storage addresses that already have an owner; the result's own is added.
    if storage_address(tensor) in owned:
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    owned |= storages([tensor])
    return tensor


# Device type 0 does not exist in DLPack, so `DlpackToOrtValue` of any ORT throws ("Unsupported device type")
# before it reads anything else, and without calling the deleter: the one static value serves for ever.
_unreadable = DLManagedTensor(DLTensor(code=2, bits=32, lanes=1, device_type=0))


def unreadable_pointer() -> int:
    """Return a ``DLManagedTensor*`` that ORT refuses, so that a kernel fails that has no other way to say so."""
    return ctypes.addressof(_unreadable)


# ---- exceptions ----------------------------------------------------------------------------------------------------


_lock = threading.Lock()
_first: BaseException | None = None


def keep_error(operator: str, error: BaseException) -> None:
    """Keep the exception of a callback, unless one is kept: what follows the first is its consequence."""
    global _first  # noqa: PLW0603 - ORT may call back from any of its threads, so this is the process's
    with _lock:
        if _first is None:
            _first = _explain(operator, error)


def take_error() -> BaseException | None:
    """Return the exception that a callback left, and forget it; None if nothing failed."""
    # Call it after every ORT call that failed, and before one whose failure will be looked at.
    global _first
    with _lock:
        error, _first = _first, None
    return error


@contextmanager
def border_watched() -> Iterator[None]:
    """Lose no exception at the border to C while ORT runs, and raise what a callback left once ORT has ended."""
    # A signal that arrives while C++ code runs is raised where Python goes on, which is the first instruction of the
    # next callback: before its own code can keep the exception. ctypes hands that to `sys.unraisablehook`, and ORT goes
    # on with an output that was never written.
    before = sys.unraisablehook

    def keep(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, Exception):
            before(unraisable)
        else:
            keep_error("", unraisable.exc_value or unraisable.exc_type())

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before
    error = take_error()
    if error is not None:
        raise error


def _explain(operator: str, error: BaseException) -> BaseException:
    if not isinstance(error, Exception) or isinstance(error, OrtlabError):  # which says more than this would
        return error
    explained = ExecutionError(
        f"{operator} failed: {type(error).__name__}: {error}",
        why="ONNX Runtime calls this operator in PyTorch, and PyTorch raised the error.",
        fix="Correct the operator, or what the model gives it.",
    )
    return caused_by(explained, error)
