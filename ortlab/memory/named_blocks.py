"""Blocks of torch's CUDA allocator at the end of a forward, and what is in them, as far as that can be told.

torch's snapshot (``torch/cuda/memory.py``, `_snapshot`) has every block with its address, its size and the Python stack
that it was asked for in. ORT asks for each buffer by itself and for as many bytes as it has (``cuda_allocator.cc``,
`CUDAExternalAllocator`; ``tensor.cc``), so that the stack tells that it was ORT, in which pass, and the size which
activations it can be. Where as many blocks have a size as activations, the order of allocation tells more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from ortlab.memory.saved_activations import SavedActivations

Maker = Literal[
    "ONNX Runtime, forward",
    "ONNX Runtime, backward",
    "ONNX Runtime, building a session",
    "PyTorch",
    "before the recording",
]
"""Who asked for a block."""

KnownBy = Literal["address", "size", "size and order", "size, one of several", ""]
"""How it is known what is in a block; empty where it is not."""

ALIGNMENT: Final = 256
"""Bytes that ORT rounds a size up to, where it does (`kAllocAlignment`)."""

_AGENT: Final = "onnxruntime/training/ortmodule/_execution_agent.py"
_PASSES: Final[Mapping[str, Maker]] = {
    "run_forward": "ONNX Runtime, forward",
    "run_backward": "ONNX Runtime, backward",
}
_SESSION: Final = "_create_execution_agent"
_ACTIVE: Final = frozenset({"active_allocated", "active_awaiting_free"})


@dataclass(frozen=True)
class KeptBuffer:
    """An activation that is kept for backward, and when its memory can have been allocated.

    Attributes
    ----------
    name
        Of the result that fills it, with its operator.
    size
        In bytes, worked out from its shape.
    earliest, latest
        Places of nodes in the order of execution: of the first one in whose turn the memory can have been allocated,
        and of its own.
    part
        Path of the wrapped part of the model; places of different parts cannot be compared.
    """

    name: str
    size: int
    earliest: int
    latest: int
    part: str = ""


@dataclass(frozen=True)
class NamedBlock:
    """One block that was in use.

    Attributes
    ----------
    address
        On the device.
    size
        What it takes, in bytes, as the allocator rounds.
    requested
        What was asked for, in bytes.
    maker
        Who asked for it.
    names
        What is in it: one name if it is known, several if it is one of them, none if it is not known.
    known_by
        How that is known.
    event
        Position of the allocation in the device's trace; -1 if it was before the recording.
    """

    address: int
    size: int
    requested: int
    maker: Maker
    names: tuple[str, ...]
    known_by: KnownBy
    event: int


def kept_buffers(activations: SavedActivations, earliest: Mapping[tuple[str, str], int]) -> list[KeptBuffer]:
    """Make the buffers that saved activations names; activations of unknown size are left out.

    Parameters
    ----------
    activations
        What is kept for backward.
    earliest
        By part and value: the place of the first node in whose turn the memory can have been allocated, see
        `ortlab.engine.kept_values`; the value's own node where nothing is told.
    """
    return [
        KeptBuffer(
            f"{row.value} ({row.operator})",
            row.bytes,
            earliest.get((row.part, row.value), row.position),
            row.position,
            row.part,
        )
        for row in activations.rows
        if row.bytes
    ]


def maker_of(frames: Sequence[Mapping[str, Any]]) -> Maker:
    """Tell from a stack, the innermost frame first, who asked for memory."""
    if not frames:
        return "before the recording"
    for frame in frames:
        function = str(frame["name"]).rpartition(".")[2]
        if function in _PASSES and str(frame["filename"]).replace("\\", "/").endswith(_AGENT):
            return _PASSES[function]
        if function == _SESSION:
            return "ONNX Runtime, building a session"
    return "PyTorch"


def name_blocks(
    snapshot: Mapping[str, Any], device: int, kept: Iterable[KeptBuffer], tensors: Mapping[int, str]
) -> tuple[NamedBlock, ...]:
    """Say what is in each block that is in use in a snapshot.

    Parameters
    ----------
    snapshot
        What `torch.cuda.memory._snapshot()` returned at the end of the forward, with the history of it.
    device
        Number of the GPU.
    kept
        What the graph that ran is known to keep.
    tensors
        By address: what the tensors are that PyTorch holds.

    Returns
    -------
    tuple of NamedBlock
        The largest first.
    """
    events = last_allocations(snapshot["device_traces"][device])
    found = []
    for segment in snapshot["segments"]:
        if segment.get("device", device) != device:
            continue
        for block in segment["blocks"]:
            if block["state"] not in _ACTIVE:
                continue
            address, name = block["address"], tensors.get(block["address"])
            found.append(
                NamedBlock(
                    address,
                    block["size"],
                    block.get("requested_size", block["size"]),
                    maker_of(block.get("frames", ())),
                    () if name is None else (name,),
                    "" if name is None else "address",
                    events.get(address, -1),
                )
            )
    open_ones = [one for one in found if not one.names and one.maker == "ONNX Runtime, forward"]
    named = {one.address: one for one in _by_size(open_ones, kept)}
    return tuple(
        sorted(
            (named.get(one.address, one) for one in found),
            key=lambda one: (-one.requested, one.event, one.address),
        )
    )


def last_allocations(trace: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return by address the position in a trace of the last allocation there."""
    return {event["addr"]: place for place, event in enumerate(trace) if event["action"] == "alloc"}


def _by_size(blocks: Iterable[NamedBlock], kept: Iterable[KeptBuffer]) -> list[NamedBlock]:
    """Name the blocks of each size by the activations of that size."""
    of_size: dict[int, list[KeptBuffer]] = {}
    for one in kept:
        of_size.setdefault(_rounded(one.size), []).append(one)
    ordered = sorted(blocks, key=lambda one: (_rounded(one.requested), one.event))
    named = []
    for size, group in groupby(ordered, key=lambda one: _rounded(one.requested)):
        named += _named(list(group), of_size.get(size, []))
    return named


def _named(blocks: Sequence[NamedBlock], kept: Sequence[KeptBuffer]) -> list[NamedBlock]:
    """Name blocks of one size, in the order of their allocation.

    Where there are more blocks than activations, some hold something else, and it is not known which.
    """
    if len(blocks) > len(kept):
        return list(blocks)
    kept = sorted(kept, key=lambda one: (one.part, one.latest, one.name))
    if len(blocks) < len(kept):
        return [_with(one, kept, "size, one of several") for one in blocks]
    named, place = [], 0
    for group in _told_apart(kept):
        how: KnownBy = "size" if len(kept) == 1 else "size and order"
        how = how if len(group) == 1 else "size, one of several"
        named += [_with(one, group, how) for one in blocks[place : place + len(group)]]
        place += len(group)
    return named


def _told_apart(kept: Sequence[KeptBuffer]) -> list[list[KeptBuffer]]:
    """Put activations together that may have been allocated in either order; the groups are in order."""
    if len({one.part for one in kept}) > 1:
        return [list(kept)]
    groups: list[list[KeptBuffer]] = []
    latest = -1
    for one in sorted(kept, key=lambda one: (one.earliest, one.latest)):
        if groups and one.earliest <= latest:
            groups[-1].append(one)
        else:
            groups.append([one])
        latest = max(latest, one.latest)
    return groups


def _with(block: NamedBlock, kept: Sequence[KeptBuffer], how: KnownBy) -> NamedBlock:
    return replace(block, names=tuple(one.name for one in kept), known_by=how)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
