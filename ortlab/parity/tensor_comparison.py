"""Runs held against a first one, tensor by tensor, while they run; a file keeps the tensors of the first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from ortlab.parity.parity import OUTPUT, Distance, Site, TensorPair
from ortlab.records.activation_statistics import TensorStatistics

if TYPE_CHECKING:
    from collections.abc import Mapping


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


class Reference:
    """Receives the tensors that other runs are held against: it keeps their facts, and a store keeps the tensors."""

    def __init__(self, store: TensorStore) -> None:
        self.facts: dict[Site, TensorStatistics] = {}
        self.epsilon: dict[Site, float] = {}  # unit of rounding of the type, relative
        # How many numbers a sum over a part of the dimensions of an activation or its gradient has at most.
        self.longest = 1
        self._store = store
        self._recent = _Recent()

    def take(self, site: Site, tensor: torch.Tensor) -> None:
        """Take a tensor; what one module returns and the next one takes is looked at once."""
        before = self._recent.site_of(tensor)
        if site.call and tensor.numel():
            last = tensor.shape[-1] if tensor.dim() else 1
            self.longest = max(self.longest, last, tensor.numel() // last)
        self.epsilon[site] = torch.finfo(tensor.dtype).eps
        if before is None:
            with self._store.putting(site, tensor):
                self.facts[site] = TensorStatistics.of(tensor)
        else:
            self.facts[site] = self.facts[before]
            self._store.share(site, before)
        self._recent.note(site, tensor)


class Compared:
    """Receives the tensors of another run, and notes how far they are from those in `store`.

    Its own tensors go to `own`, if given; with `facts` it keeps their facts, too.
    """

    def __init__(self, store: TensorStore, own: TensorStore | None = None, *, facts: bool = False) -> None:
        self.distances: dict[Site, Distance] = {}
        self.facts: dict[Site, TensorStatistics] = {}
        self.notes: dict[Site, str] = {}
        self._store = store
        self._own = own
        self._wants_facts = facts
        self._recent = _Recent()

    def take(self, site: Site, tensor: torch.Tensor) -> None:
        """Take a tensor."""
        before = self._recent.site_of(tensor)
        if self._wants_facts:
            self.facts[site] = TensorStatistics.of(tensor) if before is None else self.facts[before]
        if self._own is not None and before is None:
            self._own.put(site, tensor)
        elif self._own is not None and before is not None:
            self._own.share(site, before)
        self._recent.note(site, tensor)
        if before in self.distances and self._store.are_one(before, site):
            self.distances[site] = self.distances[before]
            return
        reference = self._store.get(site)
        if reference is None:
            return
        if reference.shape != tensor.shape:
            self.notes[site] = f"shapes differ: {list(reference.shape)} and {list(tensor.shape)}"
        else:
            self.distances[site] = Distance.between(reference, tensor)
            if reference.dtype != tensor.dtype:
                self.notes[site] = f"types differ: {reference.dtype} and {tensor.dtype}"


class _Recent:
    """The last tensors that were taken, kept alive so that no later tensor gets their memory.

    What the model returns is kept until its next step: ONNX Runtime hands over what the last module returned, which is
    the same, only in backward.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[Site, torch.Tensor, int]] = deque(maxlen=8)
        self._returned: list[tuple[Site, torch.Tensor, int]] = []

    def site_of(self, tensor: torch.Tensor) -> Site | None:
        """Return where the same numbers were seen, if nothing has been written into them since.

        What ONNX Runtime hands over can be a copy. Finding two large tensors equal takes a tenth of the time that facts
        of one take, and tensors that are not equal mostly differ in their first numbers.
        """
        for site, known, version in (*self._last, *self._returned):
            if (
                known.shape == tensor.shape
                and known.dtype == tensor.dtype
                and known.device == tensor.device
                and known._version == version  # noqa: SLF001 - torch has no public name for it
                and _are_equal(known, tensor)
            ):
                return site
        return None

    def note(self, site: Site, tensor: torch.Tensor) -> None:
        """Remember a tensor."""
        noted = (site, tensor, tensor._version)  # noqa: SLF001
        self._last.append(noted)
        if not site.module and site.kind == OUTPUT:
            of_step = [one for one in self._returned if one[0].step == site.step]
            self._returned = [*of_step, noted]


def _are_equal(known: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Say whether two tensors of one shape and type hold the same numbers, at once where they are one in memory."""
    if known.data_ptr() == tensor.data_ptr() and known.stride() == tensor.stride():
        return known._version == tensor._version  # noqa: SLF001 - else it was written into by another name
    return torch.equal(known, tensor)


def pairs(
    reference: Reference,
    other: Compared,
    limits_of: Mapping[Site, tuple[float, float]],
    missing: Mapping[Site, str],
) -> tuple[TensorPair, ...]:
    """Put both runs together, in the order of the first; tensors that only the other has come last."""
    found = []
    for site, facts in reference.facts.items():
        floor, limit = limits_of[site]
        distance = other.distances.get(site)
        note = other.notes.get(site, "")
        if distance is None and not note:
            note = missing.get(site, _ABSENT)
        found.append(TensorPair(site, facts, other.facts.get(site), distance, floor, limit, note))
    found += [
        TensorPair(site, None, facts, note="only here: the reference has no such tensor")
        for site, facts in other.facts.items()
        if site not in reference.facts
    ]
    return tuple(found)


_ABSENT: Final = "ONNX Runtime's graph has no such value"
