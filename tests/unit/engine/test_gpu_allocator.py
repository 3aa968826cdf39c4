"""ORT's memory from torch's pool by three C functions: called as C does, with the C library's memory for the pool's."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ortlab.engine import extensions
from ortlab.engine.border import take_error
from ortlab.engine.diagnosis import ran_out
from ortlab.engine.extensions import Allocate, EmptyCache, Free, bridge


@pytest.fixture
def libc():
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    return library


def from_c(kind, function):
    """Return what C sees behind the address, as ORT is given it: a number."""
    return kind(ctypes.cast(function, ctypes.c_void_p).value)


def test_memory_is_taken_written_and_given_back_through_the_addresses(libc):
    calls = []

    def allocate(size):
        calls.append(("allocate", size))
        return libc.malloc(size)

    def free(address):
        calls.append(("free", address))
        libc.free(address)

    made = bridge(allocate, free, lambda: calls.append(("empty",)))
    address = from_c(Allocate, made.allocate)(5 << 32)  # a size that needs 64 bits
    small = from_c(Allocate, made.allocate)(64)
    ctypes.memset(small, 7, 64)
    assert ctypes.string_at(small, 64) == b"\7" * 64
    for one in (address, small):
        from_c(Free, made.free)(one)
    from_c(Free, made.free)(None)
    from_c(EmptyCache, made.empty_cache)()
    assert calls == [("allocate", 5 << 32), ("allocate", 64), ("free", address), ("free", small), ("empty",)]
    assert take_error() is None


def test_a_pool_without_memory_gives_null_and_the_error_reaches_the_caller():
    def exhausted(_size):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    made = bridge(exhausted, exhausted, exhausted)
    assert from_c(Allocate, made.allocate)(2 << 30) is None
    error = take_error()
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert ran_out(error)

    from_c(Free, made.free)(16)
    assert isinstance(take_error().__cause__, torch.OutOfMemoryError)
    from_c(EmptyCache, made.empty_cache)()
    assert take_error() is not None


def test_ort_is_given_the_bridge_in_place_of_the_extension():
    from ortlab import engine

    engine.load()
    from onnxruntime.training.ortmodule.torch_cpp_extensions import torch_gpu_allocator

    assert torch_gpu_allocator is extensions
    addresses = {
        torch_gpu_allocator.gpu_caching_allocator_raw_alloc_address(),
        torch_gpu_allocator.gpu_caching_allocator_raw_delete_address(),
        torch_gpu_allocator.gpu_caching_allocator_empty_cache_address(),
    }
    assert len(addresses) == 3
    assert all(addresses)
