"""Errors that mean that memory ran out, whoever raised them, and where it happened."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from typing import Final

from ortlab.errors import OrtlabError

# What torch's CPU and CUDA allocators, C++, ONNX Runtime's arena and its CUDA provider, cuBLAS and cuDNN say, and first
# what ortlab says of them (`ortlab.engine.diagnosis`).
_SAYINGS: Final = (
    "memory ran out while",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "bad allocation",
    "failed to allocate memory for requested buffer",
    "cuda out of memory",
    "cuda failure 2: out of memory",
    "cudaerrormemoryallocation",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
_NODE: Final = re.compile(r"while running (\w+) node\. Name:\s*'([^']*)'")
_PASS: Final = re.compile(r"Error in (forward|backward) pass execution")
_TRIED: Final = re.compile(r"(?:tried to allocate (\d+) bytes|Tried to allocate ([\d.]+ [KMGT]iB))")


def ran_out(error: BaseException) -> bool:
    """Tell whether an error, or one that led to it, means that memory ran out."""
    return any(
        isinstance(one, MemoryError)
        or (isinstance(one, OSError) and one.errno == errno.ENOMEM)
        or type(one).__name__ == "OutOfMemoryError"  # torch's, which is not imported for that
        or any(saying in str(one).lower() for saying in _SAYINGS)
        for one in _chain(error)
    )


def says_ran_out(text: str) -> bool:
    """Tell whether the words of an error, such as the reason of a fallback, mean that memory ran out."""
    return any(saying in text.lower() for saying in _SAYINGS)


def place(error: BaseException) -> str:
    """Say where memory ran out, as far as the error tells: "in backward, at FusedMatMul (/encoder/...)"; or ""."""
    text = "\n".join(str(one) for one in _chain(error))
    where = []
    if found := _PASS.search(text):
        where.append(f"in {found[1]}")
    if found := _NODE.search(text):
        where.append(f"at {found[1]} ({found[2]})")
    elif found := _TRIED.search(text):
        where.append(f"at a request for {found[1] + ' bytes' if found[1] else found[2]}")
    return ", ".join(where)


def reason(error: BaseException) -> str:
    """Say in one line why a point failed."""
    if isinstance(error, OrtlabError):
        return " ".join(filter(None, (error.what, error.why)))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__
