"""A snapshot of a GPU's memory over one step: which blocks torch's CUDA allocator had, and what is in them.

torch's snapshot (``torch/cuda/memory.py``, `_snapshot`) has every block with its address, its size and the Python stack
that it was asked for in. ORT asks for each buffer by itself and for as many bytes as it has (``cuda_allocator.cc``,
`CUDAExternalAllocator`; ``tensor.cc``), so that the stack tells that it was ORT, in which pass, and the size which
activations it can be. Where as many blocks have a size as activations, the order of allocation tells more.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ortlab.errors import StepError
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from ortlab.analyses.memory import Taken
    from ortlab.memory.saved_activations import SavedActivations
    from ortlab.options.configuration import Configuration

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
    """An activation that is kept for backward, and when its memory can have been allocated."""

    name: str  #: Of the result that fills it, with its operator
    size: int  #: In bytes, worked out from its shape
    #: Places of nodes in the order of execution - of the first one in whose turn the memory can have been allocated,
    #: and of its own.
    earliest: int
    latest: int
    part: str = ""  #: Path of the wrapped part of the model; places of different parts cannot be compared


@dataclass(frozen=True)
class NamedBlock:
    """One block that was in use."""

    address: int  #: On the device
    size: int  #: What it takes, in bytes, as the allocator rounds
    requested: int  #: What was asked for, in bytes
    maker: Maker  #: Who asked for it
    #: What is in it - one name if it is known, several if it is one of them, none if it is not known.
    names: tuple[str, ...]
    known_by: KnownBy  #: How that is known
    event: int  #: Position of the allocation in the device's trace; -1 if it was before the recording


def kept_buffers(activations: SavedActivations, earliest: Mapping[tuple[str, str], int]) -> list[KeptBuffer]:
    """Make the buffers that saved activations name; activations of unknown size are left out.

    `earliest` is by part and value: the place of the first node in whose turn the memory can have been allocated, see
    `ortlab.engine.saved_activations`; the value's own node where nothing is told.
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
    """Say what is in each block of a GPU that is in use in a snapshot, the largest first.

    `snapshot` is what `torch.cuda.memory._snapshot()` returned at the end of the forward, with the history of it.
    `kept` is what the graph that ran is known to keep; `tensors` says by address what PyTorch holds.
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


FRAME_FILE: Final = "ortlab"
"""Name of the file in the frame that a name is written into; it stands before the frames of the stack."""

_NAMES_WRITTEN: Final = 8
"""Names of a block that is one of several which are written out."""


@dataclass(frozen=True, repr=False)
class MemorySnapshot(Shown):
    """What was in use on a GPU when the forward of a step had ended, and the history of the whole step."""

    blocks: tuple[NamedBlock, ...]  #: Blocks in use at the end of the forward, the largest first
    device: str  #: "cuda:0", ...
    engine: str  #: Who executed the step: "ort", "eager", ...
    options: dict[str, Any]  #: The switches, as `Options.to_dict` gives them
    unsized: int = 0  #: Kept activations whose size is not known, so that they cannot be found
    #: torch's snapshot of the end of the step, with the history of the step and the names written into it.
    snapshot: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def total_bytes(self) -> int:
        """What the blocks were asked for, in bytes."""
        return sum(one.requested for one in self.blocks)

    def bytes_by(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Add the blocks up by who asked for them and how it is known what they are.

        Returns
        -------
        dict
            By (maker, known_by): number of blocks, and their bytes; the largest first.
        """
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for one in self.blocks:
            count, size = found.get((one.maker, one.known_by), (0, 0))
            found[one.maker, one.known_by] = count + 1, size + one.requested
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def save(self, path: str | Path) -> Path:
        """Write the file that https://pytorch.org/memory_viz and ``torch/cuda/_memory_viz.py`` open.

        A name stands as the first frame of a stack.

        Raises
        ------
        StepError
            If it cannot be written.
        """
        target = Path(path)
        try:
            with target.open("wb") as opened:
                pickle.dump(self.snapshot, opened)  # as torch's own `_dump_snapshot`
        except OSError as error:
            raise StepError(
                f"The snapshot cannot be written to {target}.",
                why=f"{error}.",
                fix="Give a file in a folder that exists: snapshot.save('step.pickle').",
            ) from error
        return target

    def table(self) -> pd.DataFrame:
        """One row per block, in bytes."""
        import pandas as pd

        columns = [*NamedBlock.__annotations__]
        return pd.DataFrame(
            [{**asdict(one), "names": list(one.names)} for one in self.blocks], columns=columns
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, without torch's snapshot itself."""
        return {
            "blocks": [asdict(one) for one in self.blocks],
            "device": self.device,
            "engine": self.engine,
            "options": self.options,
            "unsized": self.unsized,
            "total_bytes": self.total_bytes,
        }


def named_snapshot(
    taken: Taken,
    device: torch.device,
    configuration: Configuration,
    kept: Iterable[KeptBuffer] = (),
    unsized: int = 0,
) -> MemorySnapshot:
    """Name the blocks of two snapshots of one step, and write the names into the second.

    `kept` is what the graph that ran is known to keep for backward; `unsized` more are not in it, as their size is not
    known.
    """
    index = device.index or 0
    blocks = name_blocks(taken.after_forward, index, kept, taken.held_after_forward)
    return MemorySnapshot(
        blocks=blocks,
        device=f"{device.type}:{index}",
        engine=configuration.engine,
        options=configuration.options.to_dict(),
        unsized=unsized,
        snapshot=with_names(taken.after_step, index, blocks, taken.held_after_step),
    )


def with_names(
    snapshot: Mapping[str, Any], device: int, blocks: Iterable[NamedBlock], tensors: Mapping[int, str]
) -> dict[str, Any]:
    """Write names into a copy of what `torch.cuda.memory._snapshot()` returned, each as a frame before the stack's own.

    `blocks` is what is known of a GPU's blocks at some earlier point of the same history; `tensors` says by address
    what PyTorch held at the snapshot. Of other blocks that ONNX Runtime asked for the copy says so, and in which pass.
    """
    trace = snapshot["device_traces"][device]
    known = {one.event: one for one in blocks if one.event >= 0}
    before = {one.address: one for one in blocks if one.event < 0}
    latest = last_allocations(trace)

    def with_event(place: int, event: Mapping[str, Any]) -> Mapping[str, Any]:
        if event["action"] != "alloc":
            return event
        held = tensors.get(event["addr"], "") if latest[event["addr"]] == place else ""
        return _with_name(event, known.get(place), held)

    def with_block(block: Mapping[str, Any]) -> Mapping[str, Any]:
        if block["state"] == "inactive":
            return block
        address = block.get("address", -1)
        one = known.get(latest[address]) if address in latest else before.get(address)
        return _with_name(block, one, tensors.get(address, ""))

    traces = list(snapshot["device_traces"])
    traces[device] = [with_event(place, event) for place, event in enumerate(trace)]
    segments = [
        {**segment, "blocks": [with_block(block) for block in segment["blocks"]]}
        if segment.get("device", device) == device
        else segment
        for segment in snapshot["segments"]
    ]
    return {**snapshot, "segments": segments, "device_traces": traces}


def block_words(block: NamedBlock) -> str:
    """Say what is in a block: a name, the names that it may be, or that it is not known."""
    if len(block.names) > 1:
        shown = ", ".join(block.names[:_NAMES_WRITTEN])
        more = len(block.names) - _NAMES_WRITTEN
        return f"one of {len(block.names)}: {shown}" + (f", and {more} more" if more > 0 else "")
    return block.names[0] if block.names else "unknown"


def _words(block: NamedBlock | None, held: str, frames: Sequence[Mapping[str, Any]]) -> str:
    if block is not None and block.names:
        return f"{block_words(block)} [{block.known_by}]"
    if held:
        return f"{held} [address]"
    maker = maker_of(frames)
    if not maker.startswith("ONNX Runtime"):
        return ""
    return f"{maker}: unknown" if block is not None else f"{maker}: not kept from forward to backward"


def _with_name(entry: Mapping[str, Any], block: NamedBlock | None, held: str) -> dict[str, Any]:
    frames = entry.get("frames", ())
    words = _words(block, held, frames)
    if not words:
        return dict(entry)
    return {**entry, "frames": [{"filename": FRAME_FILE, "line": 0, "name": words}, *frames]}
