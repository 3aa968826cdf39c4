"""The tensors of a run in a file, to hold another run against them entry by entry."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from ortlab.parity.pairs import Site


_LARGE: Final = 1 << 20
"""Bytes from which on a tensor is written by a thread: below, to hand it over takes longer than to write it."""

_PIECE: Final = 1 << 19
"""Bytes that are written at once. For more, Linux takes larger folios of the page cache, which are slow to come by.

On a virtual machine whose host takes free memory back, 500 MB are written at 0.4 GB/s in one piece, at 3.3 in these.
"""


class _Place(NamedTuple):
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorStore:
    """Tensors by site, one file for all; `stored` makes it and removes the file."""

    def __init__(self, path: Path) -> None:
        self.number_of_bytes = 0  # written so far
        self._path = path
        self._places: dict[Site, _Place] = {}
        self._file = path.open("wb", buffering=_PIECE)
        self._writer = ThreadPoolExecutor(1, "ortlab-tensor-store")

    def put(self, key: Site, tensor: torch.Tensor) -> None:
        """Write a tensor; it replaces one that was written under the same key."""
        with self.putting(key, tensor):
            pass

    @contextmanager
    def putting(self, key: Site, tensor: torch.Tensor) -> Iterator[None]:
        """Write a tensor while the block looks at it, on another core; at the end of the block it is written."""
        plain = tensor.detach().to("cpu").contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
        self._places[key] = _Place(self.number_of_bytes, tuple(plain.shape), plain.dtype)
        self.number_of_bytes += data.size
        if data.size < _LARGE:
            self._file.write(data.data)
            yield
            return
        writing = self._writer.submit(self._write, data.data)
        try:
            yield
        finally:
            writing.result()

    def _write(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE):
            self._file.write(data[start : start + _PIECE])

    def share(self, key: Site, other: Site) -> None:
        """Let a key stand for what was written under another one."""
        self._places[key] = self._places[other]

    def are_one(self, key: Site, other: Site) -> bool:
        """Say whether two keys stand for the same tensor."""
        return key in self._places and self._places[key] == self._places.get(other)

    def get(self, key: Site) -> torch.Tensor | None:
        """Return a tensor on the CPU, or None where nothing was written under the key."""
        place = self._places.get(key)
        if place is None:
            return None
        self._file.flush()
        size = torch.empty((), dtype=place.dtype).element_size() * torch.Size(place.shape).numel()
        data = np.fromfile(self._path, np.uint8, count=size, offset=place.offset)
        return torch.from_numpy(data).view(place.dtype).reshape(place.shape)

    def close(self) -> None:
        """Close the file, and end the thread that writes."""
        self._writer.shutdown()
        self._file.close()


@contextmanager
def stored() -> Iterator[TensorStore]:
    """Make a store in a temporary folder, which is removed at the end of the block."""
    with TemporaryDirectory(prefix="ortlab-parity-") as folder:
        store = TensorStore(Path(folder) / "tensors")
        try:
            yield store
        finally:
            store.close()
