"""What is kept for backward, one by one: activations, inputs, groups of them, and what a plan does to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ortlab.memory.shapes import Shape, bytes_formula


@dataclass(frozen=True)
class SavedActivation:
    """One buffer that the forward fills and that is still there when the backward begins.

    Attributes
    ----------
    value
        Name in the execution graph of the result that fills the buffer.
    node, operator, output
        Name and operator of the node that computes it, and which of its outputs it is, from 0. Operators outside ONNX
        carry their domain; a call of torch carries its name.
    module
        Path in the model of the module that computes it; empty for the model's own forward.
    source
        File and line where the forward of that module begins; empty where it is torch's own.
    layer
        Path of the layer that the module belongs to, as in "transformer.h.0"; empty outside the layers.
    shape
        Sizes; a symbolic one is an expression. None where it is not known.
    dtype
        ONNX element type, lower case: "float", "bool", ...
    element_bytes
        Bytes of one element.
    bytes
        What it takes at the present sizes, in bytes. None where it is not known.
    views
        Names of the results that read the same buffer under another shape (Reshape, Squeeze, Identity and the like)
        and that the backward reads: they take nothing on their own.
    kept_by
        Names of the backward nodes that read it, or one of its views.
    returned
        Whether the model returns it, or a view of it, so that it is there even if no backward node reads it.
    plans
        Configurations of the recompute plans that remove it, each applied alone; None where nobody has looked.
    measured
        Whether the bytes are those of a run, because the shape is not known before it.
    position
        Place of the node in the order of execution, from 0.
    part
        Path of the wrapped part of the model; empty where the whole model is wrapped.
    """

    value: str
    node: str
    operator: str
    output: int
    module: str
    source: str
    layer: str
    shape: Shape | None
    dtype: str
    element_bytes: int
    bytes: int | None
    views: tuple[str, ...] = ()
    kept_by: tuple[str, ...] = ()
    returned: bool = False
    plans: tuple[str, ...] | None = None
    measured: bool = False
    position: int = 0
    part: str = ""

    @property
    def bytes_symbolic(self) -> str:
        """What it takes in bytes, in terms of the input's dimensions; empty where that is not known."""
        return "" if self.shape is None else bytes_formula(self.shape, self.element_bytes)


@dataclass(frozen=True)
class KeptInput:
    """An input of the model that the backward reads; it is the caller's tensor, so keeping it takes nothing more.

    Attributes
    ----------
    name
        Name of the graph's input.
    shape, dtype, element_bytes, bytes
        As for `SavedActivation`.
    kept_by
        Names of the backward nodes that read it, or a view of it.
    part
        Path of the wrapped part of the model.
    """

    name: str
    shape: Shape | None
    dtype: str
    element_bytes: int
    bytes: int | None
    kept_by: tuple[str, ...]
    part: str = ""


@dataclass(frozen=True)
class ActivationGroup:
    """Activations of one layer, operator or module.

    Attributes
    ----------
    name
        Of the layer, operator or module.
    count
        Activations.
    bytes
        What they take together, in bytes; those of unknown size left out.
    unknown
        Activations of unknown size.
    """

    name: str
    count: int
    bytes: int
    unknown: int = 0


@dataclass(frozen=True)
class PlanEffect:
    """What one recompute plan, applied alone, does to what is kept; worked out from the graph with it, not measured.

    Attributes
    ----------
    config
        The plan: "Gelu+:1:-1".
    removed
        Activations that are no longer kept.
    added
        Activations that are kept instead: what the recomputed nodes read.
    parts
        Wrapped parts of the model that have it.
    """

    config: str
    removed: tuple[SavedActivation, ...]
    added: tuple[SavedActivation, ...]
    parts: tuple[str, ...] = ()

    @property
    def removed_bytes(self) -> int | None:
        """What it removes, in bytes; None where the size of one of them is not known."""
        return _sum(self.removed)

    @property
    def added_bytes(self) -> int | None:
        """What is kept instead, in bytes; None where the size of one of them is not known."""
        return _sum(self.added)

    @property
    def net_bytes(self) -> int | None:
        """By how much less is kept, in bytes; negative where it is more, None where that is not known."""
        removed, added = self.removed_bytes, self.added_bytes
        return None if removed is None or added is None else removed - added


def place_of(row: SavedActivation) -> str:
    """Return the module of an activation with a star for the layer's number: "transformer.h.*.mlp.act"."""
    if not row.layer:
        return row.module
    container = row.layer.rpartition(".")[0]
    star = f"{container}.*" if container else "*"
    return star + row.module.removeprefix(row.layer)


def largest_first(rows: Iterable[SavedActivation]) -> tuple[SavedActivation, ...]:
    """Order rows: those of unknown size first, since they may be large, then the largest."""
    return tuple(
        sorted(
            rows,
            key=lambda row: (row.bytes is not None, -(row.bytes or 0), row.part, row.position, row.output),
        )
    )


def _sum(rows: Iterable[SavedActivation]) -> int | None:
    sizes = [row.bytes for row in rows]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
