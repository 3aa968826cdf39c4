"""ORT takes its GPU memory from torch's pool: what stands in for the C++ extension ``torch_gpu_allocator``.

ORT wants three addresses of plain C functions: allocate, free, empty the cache. 1.19.2 has its users compile them with
CUDA's headers; ctypes makes them of torch's own Python functions, which allocate on the current device and stream, as
the extension does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ortlab.engine.callback_error import keep_error

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
    """Make C functions of Python's.

    `allocate` takes bytes and returns an address, `free` takes the address, and `empty_cache` gives unused memory back
    to the device. What one of them raises, such as torch's OutOfMemoryError, is kept for whoever called ORT
    (`callback_error`); where `allocate` raises, ORT gets no memory.
    """

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


def fault() -> str:
    """Try the bridge on the current GPU: take 1 MiB through its address, as ORT does, and give it back.

    Returns what is wrong, in words; "" if torch's pool has grown by that, and shrunk again.
    """
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
