"""The folder in which exports wait for the next process: whole files or none, from any number of writers."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

KEPT_FILES: Final = 50
KEPT_BYTES: Final = 1_000_000_000
"""How much a folder holds; what was used longest ago goes first."""

SUFFIX: Final = ".ortexport"
_LOCK: Final = ".ortexport.lock"
_UNFINISHED: Final = ".ortexport-part"
_PATIENCE_S: Final = 10


class ExportFolder:
    """Entries by key, in a folder that is made when something is written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def file(self, key: str) -> Path:
        """Return where the entry of a key is or would be."""
        return self.path / f"{key}{SUFFIX}"

    def read(self, key: str) -> bytes | None:
        """Return an entry, None if there is none; raise OSError if it cannot be read."""
        file = self.file(key)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # it was used now
        return data

    def write(self, key: str, data: bytes) -> Path:
        """Put an entry in its place and make room for it; raise OSError if the folder stays locked or unwritable."""
        file = self.file(key)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path / _LOCK, timeout=_PATIENCE_S):
                self._replace(file, data)
                self._make_room(file)
        except Timeout as error:
            raise OSError(f"another process has kept {error.lock_file} locked for {_PATIENCE_S} s") from error
        return file

    def _replace(self, file: Path, data: bytes) -> None:
        # Not with tempfile, whose files nobody else may read: the folder may be shared.
        unfinished = self.path / f"{uuid.uuid4().hex}{_UNFINISHED}"
        try:
            unfinished.write_bytes(data)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)

    def _make_room(self, newest: Path) -> None:
        # Under the lock, so what is unfinished now was left by a writer that was killed.
        found = []
        for file in self.path.iterdir():
            with contextlib.suppress(OSError):  # gone meanwhile
                if file.suffix == _UNFINISHED:
                    file.unlink()
                elif file.suffix == SUFFIX and file != newest:
                    state = file.stat()
                    found.append((state.st_mtime, state.st_size, file))
        total = newest.stat().st_size
        for position, (_, size, file) in enumerate(sorted(found, reverse=True), start=2):
            total += size
            if position > KEPT_FILES or total > KEPT_BYTES:
                with contextlib.suppress(OSError):
                    file.unlink()
