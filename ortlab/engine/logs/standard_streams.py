"""The C++ streams that ONNX Runtime and torch write messages to, pointed at a file and back.

Redirecting the file descriptor of standard error instead would take away everything that others write there
meanwhile: the debugger in the user's model, progress bars, faulthandler, the kernel of Jupyter, which has redirected
that descriptor itself (ipykernel#795). And a pipe, which the kernel's redirection is, fills up and stops the
process when a build writes a lot while it holds Python's lock. A file cannot, and what a process has written
to one outlives it, however it ends. Standard error itself stays as it is.

ONNX Runtime logs to `std::clog`; in Python it takes no sink of the caller's choice. torch writes warnings that no
Python code is there to hear to `std::cerr`. Both are objects of a C++ library that can be called from here, and `rdbuf`
exchanges their buffers, in less than a microsecond. Each message becomes one write.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Final

# Mangled names of libstdc++, whose ABI has been the same since GCC 3.4 (GLIBCXX_3.4).
CLOG: Final = "_ZSt4clog"
CERR: Final = "_ZSt4cerr"
_NEW_FILEBUF: Final = "_ZNSt13basic_filebufIcSt11char_traitsIcEEC1Ev"
_SETBUF: Final = "_ZNSt13basic_filebufIcSt11char_traitsIcEE6setbufEPcl"
_OPEN: Final = "_ZNSt13basic_filebufIcSt11char_traitsIcEE4openEPKcSt13_Ios_Openmode"
_RDBUF: Final = "_ZNSt9basic_iosIcSt11char_traitsIcEE5rdbufEPSt15basic_streambufIcS1_E"

_APPEND_AND_OUT: Final = 1 | 16  # std::ios::app | std::ios::out
_FILEBUF_BYTES: Final = 1024
"""More than a `std::filebuf` of libstdc++ takes, which is 240 bytes."""

_WORD: Final = ctypes.sizeof(ctypes.c_void_p)


class StandardStream:
    """A C++ output stream of this process, and a file to point it at.

    `library` is the path of the library whose stream is meant, should there be several; `name` is `CLOG` or `CERR`.
    Raises OSError, AttributeError or ValueError where it has no such stream of libstdc++, as on Windows and macOS.
    """

    def __init__(self, library: str, name: str) -> None:
        loaded = ctypes.CDLL(library)
        stream = ctypes.addressof(ctypes.c_char.in_dll(loaded, name))
        # std::ostream has std::ios as a virtual base; its offset stands three words before the virtual table.
        table = ctypes.c_void_p.from_address(stream).value or 0
        self._ios = stream + ctypes.c_ssize_t.from_address(table - 3 * _WORD).value
        pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
        self._rdbuf = _function(loaded, _RDBUF, pointer, [pointer, pointer])
        self._new = _function(loaded, _NEW_FILEBUF, None, [pointer])
        self._setbuf = _function(loaded, _SETBUF, pointer, [pointer, pointer, size])
        self._open = _function(loaded, _OPEN, pointer, [pointer, ctypes.c_char_p, ctypes.c_int])
        self._malloc = _function(ctypes.CDLL(None), "malloc", pointer, [ctypes.c_size_t])
        self._files: dict[tuple[int, Path], int] = {}
        self._own: int = 0

    def point_at(self, path: Path) -> None:
        """Let what is written from now on be appended to a file, until `put_back`; OSError if it cannot be opened."""
        file = (os.getpid(), path)  # a fork must not write through its parent's
        if file not in self._files:
            self._files[file] = self._opened(path)
        self._own = self._rdbuf(self._ios, self._files[file])

    def put_back(self) -> None:
        """Let the stream write where it did before."""
        self._rdbuf(self._ios, self._own)

    def _opened(self, path: Path) -> int:
        # Never freed: a process that ends in the middle of a block still flushes its standard streams.
        buffer: int = self._malloc(_FILEBUF_BYTES)
        self._new(buffer)
        self._setbuf(buffer, None, 0)  # every message is written at once
        if not self._open(buffer, bytes(path), _APPEND_AND_OUT):
            message = f"{path} cannot be opened for writing"
            raise OSError(message)
        return buffer


def _function(library: ctypes.CDLL, name: str, result: Any, arguments: list[Any]) -> Any:
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function
