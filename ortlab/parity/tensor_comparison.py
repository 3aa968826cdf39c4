"""Runs held against a first one, tensor by tensor, while they run; and what rounding and repetition explain of it."""

from __future__ import annotations

import inspect
import math
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ortlab.parity.parity import FORWARD, OUTPUT, OUTPUT_GRADIENT, Distance, Site, TensorPair
from ortlab.records.activation_statistics import TensorStatistics

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
    """Receives the tensors of another run, and notes how far they are from those in `store`."""

    # Its own tensors go to `own`, if given; with `facts` it keeps their facts, too.

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
    """The last tensors that were taken, kept alive so that no later tensor gets their memory."""

    # What the model returns is kept until its next step: ONNX Runtime hands over what the last module returned, which
    # is the same, only in backward.

    def __init__(self) -> None:
        self._last: deque[tuple[Site, torch.Tensor, int]] = deque(maxlen=8)
        self._returned: list[tuple[Site, torch.Tensor, int]] = []

    def site_of(self, tensor: torch.Tensor) -> Site | None:
        """Return where the same numbers were seen, if nothing has been written into them since."""
        # What ONNX Runtime hands over can be a copy. Finding two large tensors equal takes a tenth of the time that
        # facts of one take, and tensors that are not equal mostly differ in their first numbers.
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


_DROPOUTS: Final = {
    getattr(functional, name): inspect.signature(getattr(functional, name))
    for name in (
        *("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
        "multi_head_attention_forward",
    )
}
_BUILT_IN_DROPOUTS: Final = frozenset(
    getattr(torch, f"{kind}dropout{ending}")
    for kind in ("", "alpha_", "feature_", "feature_alpha_")
    for ending in ("", "_")
)
"""These take an input, a share and whether it is training."""
_RECURRENT: Final = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
UNITS: Final = 4.0
"""How many units of rounding a tensor is moved by: about what another order of summation does to a product."""


class WithoutDropout(TorchFunctionMode):
    """Lets every dropout in the block pass everything on, whoever calls it, in a trace as well."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0  # calls of a dropout that would have dropped something

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function` so that it drops nothing."""
        given = dict(kwargs or {})
        if function in _DROPOUTS:
            bound = _DROPOUTS[function].bind(*args, **given)
            bound.apply_defaults()
            share = "p" if "p" in bound.arguments else "dropout_p"
            self.found += bool(bound.arguments["training"] and bound.arguments[share])
            bound.arguments["training"] = False
            return function(*bound.args, **bound.kwargs)
        if function in _BUILT_IN_DROPOUTS and len(args) > 1:
            args = self._without(args, 1, counts=args[-1])
        elif function in _RECURRENT:
            # Behind states and weights: whether there are biases, layers, the share between these, and training.
            biases = next(place for place, one in enumerate(args) if isinstance(one, bool))
            args = self._without(args, biases + 2, counts=args[biases + 1] > 1 and args[biases + 3])
        elif function is functional.scaled_dot_product_attention:
            place = 4  # query, key, value, attn_mask, dropout_p
            if len(args) > place:
                args = self._without(args, place)
            elif "dropout_p" in given:
                self.found += bool(given["dropout_p"])
                given["dropout_p"] = 0.0
        return function(*args, **given)

    def _without(self, args: Any, place: int, *, counts: bool = True) -> tuple[Any, ...]:
        """Return arguments whose share is none."""
        self.found += bool(counts and args[place])
        return (*args[:place], 0.0, *args[place + 1 :])


@contextmanager
def deterministic() -> Iterator[None]:
    """Ask torch and the sessions that ONNX Runtime makes meanwhile for deterministic kernels, where there are any."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
            yield
    finally:
        torch.use_deterministic_algorithms(mode=before[0], warn_only=before[1])


class Jitter:
    """Moves each number of a tensor, and of its gradient, by a few units of rounding, at random."""

    # What differs after that differs by rounding alone; the random numbers are its own.

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, moved."""
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(2)
        moved = torch.rand(
            tensor.shape, generator=self._generators[device], device=device, dtype=torch.float32
        )
        by = (moved * 2 - 1) * (UNITS * torch.finfo(tensor.dtype).eps)
        factor = (1 + by.to(torch.float64)).to(tensor.dtype)
        product: torch.Tensor = _Times.apply(tensor, factor)  # type: ignore[no-untyped-call]
        return product


class _Times(torch.autograd.Function):
    """A product that saves no tensor: torch.utils.checkpoint counts them, and what it repeats is not moved again."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        return tensor * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


FACTOR: Final = 4.0
"""A distance counts as a difference from this multiple of the measured floor on.

The floor is made by moving each number that a module returns by at most `UNITS` = 4 units of rounding, evenly
spread: 4 / sqrt(3) = 2.3 units in the mean of squares, which is what 64 roundings in a row come to, since each is off
by half a unit at most, 0.29 in the mean of squares. Four floors are 1,000 roundings in a row. Where engines agree,
hardly a tensor is more than one floor apart: ``bench/fault_finding.py`` states how near its clean pairs come.
"""

LEAST: Final = 16.0
MOST: Final = 256.0
"""Bounds of the units of rounding that every limit allows; between them it is the root of the length of sums."""


def limits(
    reference: Reference, rounded: Compared, repeated: Iterable[Compared], own_use: Collection[Site] = ()
) -> dict[Site, tuple[float, float]]:
    """Return the floor and the limit of each site, both relative distances."""
    # Two orders of a sum of n numbers differ by sqrt(n) units with a probability near one, since each of the two is off
    # by up to sqrt(n) / 2 (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). How long
    # the sums of a step are is told by the largest of its tensors: at most as long as its last dimension, or as the
    # others together. `rounded` is the run with other rounding; what the `repeated` runs differ by is chance. `own_use`
    # has the sites of outputs that their modules have used, too: there the run with other rounding moves only what
    # others get, a part of the gradient.
    in_part = {replace(site, kind=OUTPUT_GRADIENT) for site in own_use}
    chances = [one.distances for one in repeated]
    by_call = _by_call(rounded)
    units = min(MOST, max(LEAST, math.sqrt(reference.longest)))
    found = {}
    for site, epsilon in reference.epsilon.items():
        known = None if site in in_part else rounded.distances.get(site)
        floor = by_call.get(_call(site), 0.0) if known is None else known.relative
        floor = max([floor, *(one[site].relative for one in chances if site in one)])
        found[site] = (floor, max(FACTOR * floor, units * epsilon))
    return found


def _by_call(rounded: Compared) -> Mapping[tuple[object, ...], float]:
    """Return the middle floor of each call's forward and backward."""
    # It serves tensors that the run with other rounding does not have. The gradient of what a module returns and has
    # used itself before, such as the probabilities of an attention, is one: what is moved is the tensor that is
    # returned.
    found: dict[tuple[object, ...], list[float]] = {}
    for site, distance in rounded.distances.items():
        found.setdefault(_call(site), []).append(distance.relative)
    return {call: median(floors) for call, floors in found.items()}


def _call(site: Site) -> tuple[object, ...]:
    return site.step, site.module, site.call, site.kind in FORWARD
