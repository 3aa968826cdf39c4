"""A snapshot of a GPU's memory over one step, in torch's own format, with what ortlab knows written into it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import StepError
from ortlab.memory.named_blocks import NamedBlock, last_allocations, maker_of, name_blocks
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from ortlab.memory.named_blocks import KeptBuffer
    from ortlab.options.configuration import Configuration
    from ortlab.runs.allocator_history import Taken

FRAME_FILE: Final = "ortlab"
"""Name of the file in the frame that a name is written into; it stands before the frames of the stack."""

_NAMES_WRITTEN: Final = 8
"""Names of a block that is one of several which are written out."""


@dataclass(frozen=True, repr=False)
class MemorySnapshot(Shown):
    """What was in use on a GPU when the forward of a step had ended, and the history of the whole step.

    Attributes
    ----------
    blocks
        Blocks in use at the end of the forward, the largest first.
    device
        "cuda:0", ...
    engine
        Who executed the step: "ort", "eager", ...
    options
        The switches, as `Options.to_dict` gives them.
    unsized
        Kept activations whose size is not known, so that they cannot be found.
    snapshot
        torch's snapshot of the end of the step, with the history of the step and the names written into it.
    """

    blocks: tuple[NamedBlock, ...]
    device: str
    engine: str
    options: dict[str, Any]
    unsized: int = 0
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

    Parameters
    ----------
    taken
        The snapshots.
    device
        The GPU.
    configuration
        What the step was run with.
    kept
        What the graph that ran is known to keep for backward.
    unsized
        How many kept activations are not among them, because their size is not known.
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
    """Write names into a copy of a snapshot, each as a frame before those of the stack.

    Parameters
    ----------
    snapshot
        What `torch.cuda.memory._snapshot()` returned; it is left as it is.
    device
        Number of the GPU.
    blocks
        What is known of blocks at some earlier point of the same history.
    tensors
        By address: what the tensors are that PyTorch held at the snapshot.

    Returns
    -------
    dict
        The copy. Of other blocks that ONNX Runtime asked for it says so, and in which pass.
    """
    trace = snapshot["device_traces"][device]
    known = {one.event: one for one in blocks if one.event >= 0}
    before = {one.address: one for one in blocks if one.event < 0}
    latest = last_allocations(trace)
    named = []
    for place, event in enumerate(trace):
        if event["action"] == "alloc":
            held = tensors.get(event["addr"], "") if latest[event["addr"]] == place else ""
            named.append(_named(event, _words(known.get(place), held, event.get("frames", ()))))
        else:
            named.append(event)
    segments = []
    for segment in snapshot["segments"]:
        if segment.get("device", device) != device:
            segments.append(segment)
            continue
        written = []
        for block in segment["blocks"]:
            address = block.get("address", -1)
            one = known.get(latest[address]) if address in latest else before.get(address)
            held = tensors.get(address, "")
            free = block["state"] == "inactive"
            written.append(block if free else _named(block, _words(one, held, block.get("frames", ()))))
        segments.append({**segment, "blocks": written})
    traces = [named if place == device else one for place, one in enumerate(snapshot["device_traces"])]
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


def _named(entry: Mapping[str, Any], words: str) -> dict[str, Any]:
    if not words:
        return dict(entry)
    return {**entry, "frames": [{"filename": FRAME_FILE, "line": 0, "name": words}, *entry.get("frames", ())]}
