"""The page of a snapshot of a GPU's memory: what is in its blocks, and how that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.memory.device_snapshot import block_words
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row
from ortlab.render.run_pages import engine_words

if TYPE_CHECKING:
    from ortlab.memory.device_snapshot import MemorySnapshot, NamedBlock

BLOCKS_SHOWN: Final = 40

_SUMS: Final = (
    Column("asked for by"),
    Column(
        "what is in it is known by",
        meaning="address: a tensor's own; size: as an activation's, from its shape",
    ),
    Column("blocks", numeric=True),
    Column("bytes", numeric=True, meaning="as asked for; the allocator rounds up"),
    Column("share", numeric=True),
)
_BLOCKS: Final = (
    Column("what is in it", whole=True),
    Column("known by"),
    Column("bytes", numeric=True, meaning="as asked for; the allocator rounds up"),
    Column("asked for by"),
    Column("address"),
)


def snapshot_page(found: MemorySnapshot) -> Page:
    """Add the blocks up, and list the largest."""
    total = found.total_bytes
    sums = tuple(
        row(
            maker,
            known_by or Cell("unknown", Mark.WARN),
            units.count(count),
            units.size(size),
            units.percent(size / total if total else 0.0),
        )
        for (maker, known_by), (count, size) in found.bytes_by().items()
    )
    shown = found.blocks[:BLOCKS_SHOWN]
    hidden = len(found.blocks) - len(shown)
    blocks: list[Block] = [
        Table("Blocks in use when the forward had ended", _SUMS, sums),
        Table(
            "The largest blocks",
            _BLOCKS,
            tuple(_row(one) for one in shown),
            f"{units.count(hidden)} more: snapshot.table() has all." if hidden else "",
        ),
    ]
    if found.unsized:
        blocks.append(
            Note(
                f"{units.count(found.unsized)} kept activations have no known size, so that they are among the unknown "
                "blocks.",
                Mark.WARN,
            )
        )
    blocks.append(Note(_SOURCES, Mark.QUIET))
    return Page(
        f"Memory of {found.device} at the end of a forward on {engine_words(found.engine)}: {units.size(total)} in "
        f"{units.count(len(found.blocks))} blocks",
        tuple(blocks),
    )


def _row(block: NamedBlock) -> tuple[Cell, ...]:
    words = block_words(block)
    return row(
        words if block.names else Cell(words, Mark.WARN),
        block.known_by,
        units.size(block.requested),
        block.maker,
        f"{block.address:#x}",
    )


_SOURCES: Final = (
    "Blocks, sizes and stacks are torch's. An address tells parameters, gradients, the batch and what an optimizer "
    "keeps exactly; the copies with which everything is put back after the step are among the unknown. "
    "ONNX Runtime does not say what it asks for: there a name is the activation of that size, and of several of one "
    "size the one whose turn it was; what may have been allocated in either order is one of several.\n"
    "snapshot.save('step.pickle') writes the whole step for https://pytorch.org/memory_viz, with these names."
)
