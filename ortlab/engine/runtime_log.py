"""What C++ code logs, ONNX Runtime's and torch's, read back as records; a crash leaves the last lines in a file.

ONNX Runtime logs to `std::clog`; in Python it takes no sink of the caller's choice. torch writes warnings that no
Python code is there to hear to `std::cerr`. Both streams are objects of a C++ library that can be called from here:
`rdbuf` points them at a file and back, in less than a microsecond. Each message becomes one write.

Redirecting the file descriptor of standard error instead would take away everything that others write there
meanwhile: the debugger in the user's model, progress bars, faulthandler, the kernel of Jupyter, which has redirected
that descriptor itself (ipykernel#795). And a pipe, which the kernel's redirection is, fills up and stops the
process when a build writes a lot while it holds Python's lock. A file cannot, and what a process has written
to one outlives it, however it ends. Standard error itself stays as it is.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, NamedTuple

import platformdirs

if sys.platform != "win32":
    import fcntl

Sink = Callable[["Line"], None]
"""Told about each message."""

SUFFIX: Final = ".log"
_TOLD: Final = ".crashed"
_CRASHES_KEPT: Final = 5
_FILE_BYTES: Final = 64 * 2**20
"""Size at which the file is emptied between two blocks: everything in it has been read by then."""

COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_HEAD: Final = re.compile(
    r"^(?P<day>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6})\d* "
    r"\[(?P<letter>[VIWEF]):onnxruntime:[^,\]]*(, (?P<place>[^\]]*))?\] ?"
    r"|^\[(?P<torch>[VIWEF])(\d+ [\d:.]+)? (?P<torch_place>[\w.]+:\d+)\] (Warning: )?",
    re.MULTILINE,
)
_SEVERITIES: Final = {"V": "VERBOSE", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "FATAL"}
_MARK: Final = "[ortlab] "


class Line(NamedTuple):
    """One message; its text may have several lines."""

    severity: str  # "VERBOSE", "INFO", "WARNING", "ERROR" or "FATAL"
    text: str  # without time, place and colours
    place: str  # in the source code that said it
    when: datetime  # with the local time zone, in which ONNX Runtime writes it


class RuntimeLog:
    """What this process's C++ code logs: a file, and who is told what has been written to it."""

    # The file lies in `folder`, by default the user's folder for logs, or else in the system's for temporary files.

    def __init__(self, folder: Path | None = None) -> None:
        self.path: Path | None = None  # None before the first block, and where no file can be made
        self._folder = folder
        self._lock = threading.RLock()
        self._sinks: list[Sink] = []
        self._pointed: list[StandardStream] = []
        self._process = 0
        self._descriptor = -1
        self._read = 0

    @contextmanager
    def block(self, stream: StandardStream | None, sink: Sink, what: str) -> Iterator[None]:
        """Collect what is written to a stream in the block; blocks nest, and the innermost gets the messages."""
        # `stream` is None where it cannot be redirected, and nothing is collected then. `sink` is told about each
        # message, at the latest when the block ends. `what` says what is being done, for somebody who reads the file
        # after a crash; it is empty for what may run for hours, and be killed for reasons other than ONNX Runtime.
        if stream is None or not self._has_file(sink):
            yield
            return
        with self._lock:
            self._tell()
            if what:
                self._note(f"began: {what}")
            self._point(stream)
            self._sinks.append(sink)
        try:
            yield
        finally:
            with self._lock:
                self._put_back(stream)
                if what:
                    self._note("ended")
                self._tell()
                self._sinks.remove(sink)
                if not self._sinks and self._read > _FILE_BYTES:
                    os.ftruncate(self._descriptor, 0)
                    self._read = 0

    @contextmanager
    def aside(self, stream: StandardStream | None) -> Iterator[None]:
        """Let a stream write where it would without a block, for code whose messages are not to be collected."""
        pointed = self._pointed.count(stream) if stream is not None else 0
        if stream is None or not pointed:
            yield
            return
        stream.put_back()
        try:
            yield
        finally:
            assert self.path is not None  # noqa: S101 - a stream was pointed at it
            stream.point_at(self.path)

    def _point(self, stream: StandardStream) -> None:
        assert self.path is not None  # noqa: S101 - see _has_file
        if stream not in self._pointed:
            stream.point_at(self.path)
        self._pointed.append(stream)

    def _put_back(self, stream: StandardStream) -> None:
        self._pointed.remove(stream)
        if stream not in self._pointed:
            stream.put_back()

    # ---- the file ---------------------------------------------------------------------------------------------

    def _has_file(self, sink: Sink) -> bool:
        """Make this process's file if it has none yet, and say whether there is one; a fork makes its own."""
        if self._process == os.getpid():
            return self.path is not None
        with self._lock:
            self._process, self._sinks, self._pointed, self.path = os.getpid(), [], [], None
            name = f"{os.getpid()}-{time.time_ns()}{SUFFIX}"
            for folder in (self._folder or log_folder(), Path(tempfile.gettempdir())):
                try:
                    self._open(folder / name)
                except OSError as error:  # noqa: PERF203 - two folders are tried
                    reason = error
                else:
                    return True
        text = f"No file can be written for what ONNX Runtime says, which goes to standard error: {reason}"
        sink(Line("WARNING", text, "", datetime.now(timezone.utc)))
        return False

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._read = 0
        # Held until the process ends, however it does: so another one knows whether this one lives.
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self.path = path
        atexit.register(self._remove)

    def _remove(self) -> None:
        """Remove the file at an orderly end of the process that made it: all of it has been read."""
        if self.path is not None and self._process == os.getpid():
            self.path.unlink(missing_ok=True)

    def _note(self, text: str) -> None:
        stamp = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        os.write(self._descriptor, f"{_MARK}{stamp} {text}\n".encode())

    def _tell(self) -> None:
        """Tell the innermost block what has been written since the last time."""
        size = os.fstat(self._descriptor).st_size
        if size <= self._read:
            return
        written = os.pread(self._descriptor, size - self._read, self._read)
        self._read = size
        foreign, lines = read_log(written.decode(errors="replace"))
        if foreign:  # somebody else logs to the stream as well
            os.write(2, foreign.encode())
        for line in lines if self._sinks else ():
            self._sinks[-1](line)


def read_log(written: str) -> tuple[str, list[Line]]:
    """Split a log into what stands before its first message, which somebody else wrote, and its messages."""
    # Lines without a head of their own belong to the message above.
    split = COLOURS.sub("", written).splitlines(keepends=True)
    plain = "".join(line for line in split if not line.startswith(_MARK))
    heads = list(_HEAD.finditer(plain))
    if not heads:
        return plain, []
    ends = [*(head.start() for head in heads[1:]), len(plain)]
    lines = [
        Line(
            severity=_SEVERITIES[head["letter"] or head["torch"]],
            text=plain[head.end() : end].strip("\n"),
            place=head["place"] or head["torch_place"] or "",
            when=_time(head["day"]),
        )
        for head, end in zip(heads, ends, strict=True)
    ]
    return plain[: heads[0].start()], lines


def _time(written: str | None) -> datetime:
    """Read ONNX Runtime's time; torch's has no year, and is taken to be now."""
    if written is None:
        return datetime.now(timezone.utc)
    return datetime.strptime(written, "%Y-%m-%d %H:%M:%S.%f").astimezone()


# ---- after a crash -----------------------------------------------------------------------------------------------


def log_folder() -> Path:
    """Return the user's folder for the logs of ortlab."""
    return platformdirs.user_log_path("ortlab", appauthor=False)


def crashed_processes(folder: Path | None = None) -> tuple[str, ...]:
    """Say of each process that died inside ONNX Runtime where its last lines are; each is told once."""
    # Files of processes that ended otherwise are removed.
    if sys.platform == "win32":  # nothing is collected there, see StandardStream
        return ()
    where = folder or log_folder()
    sentences = []
    for path in sorted(where.glob(f"*{SUFFIX}")) if where.is_dir() else ():
        try:
            sentence = _last_words(path)
        except OSError:  # another process was quicker
            continue
        if sentence:
            sentences.append(sentence)
    told = (
        sorted(where.glob(f"*{_TOLD}"), key=lambda one: one.stem.partition("-")[2]) if where.is_dir() else []
    )
    for old in told[:-_CRASHES_KEPT]:
        old.unlink(missing_ok=True)
    return tuple(sentences)


def _last_words(path: Path) -> str:
    """Say how the process that wrote the file died; empty if it lives, or did not die inside ONNX Runtime."""
    with path.open(errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        marks = [line.rstrip() for line in file if line.startswith(_MARK)]
        begun = [mark for mark in marks if " began: " in mark]
        if len(marks) - len(begun) >= len(begun):
            path.unlink()
            return ""
        kept = path.rename(path.with_suffix(_TOLD))
    stamp, _, what = begun[-1].removeprefix(_MARK).partition(" began: ")
    process = path.stem.partition("-")[0]
    return (
        f"Process {process} died inside ONNX Runtime ({what}, {stamp}); "
        f"the last lines that ONNX Runtime wrote are in {kept}."
    )


# ---- the streams --------------------------------------------------------------------------------------------------

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
    """A C++ output stream of this process, and a file to point it at."""

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
