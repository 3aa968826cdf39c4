"""What a value is made of, read from the graph that torch's tracer writes: of inputs, of random numbers, of neither.

Parameters and buffers are inputs of the graph, too.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ortlab.engine.tracing.traced_values import is_certain_of_uniform

if TYPE_CHECKING:
    from collections.abc import Iterator

_ASKS_SIZES: Final = frozenset(
    {"aten::size", "aten::sym_size", "aten::numel", "aten::len", "aten::_shape_as_tensor"}
)
"""Operators that ask their input for its sizes; so do those that end in ``_like`` and begin with ``new_``."""

_SIZED_BY_DATA: Final = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "nonzero",
            "nonzero_numpy",
            "argwhere",
            "masked_select",
            "where",
            "index",
            "bincount",
            "repeat_interleave",
        ),
        *("unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique", "_unique2"),
    )
)
"""Operators whose results have sizes that depend on values."""

_MASKS: Final = ("Bool", "Byte", None)
"""Types of an index that is a mask, or may be one."""

_UNIFORM: Final = frozenset({"aten::rand", "aten::rand_like"})


class Origin(Enum):
    """What a value is made of."""

    INPUTS = "inputs"
    RANDOM = "random numbers"
    CONSTANT = "constants"


def origin(tensor: torch.Tensor) -> Origin:
    """Tell what a tensor is made of, while it is traced.

    It is `INPUTS` if the value of an input has a part in it; else `RANDOM` if random numbers have one; else `INPUTS` if
    the size of an input has one; else `CONSTANT`, the same in each step. The comparison of a layer drop of probability
    0 counts as constant.
    """
    internals: Any = torch._C
    last = internals._get_value_trace(tensor).node()
    history = _history(last)
    if history.of_values:
        return Origin.INPUTS
    if any(map(_draws, history.operators)) and not _is_certain(last, history.operators):
        return Origin.RANDOM
    return Origin.INPUTS if history.of_sizes else Origin.CONSTANT


class _History(NamedTuple):
    """How a value was made: by which operators, and whether values and sizes of inputs are among its sources."""

    operators: set[str]
    of_values: bool
    of_sizes: bool


def _history(last: Any) -> _History:
    nodes, seen = [(last, False)], {(_identity(last), False)}
    operators: set[str] = set()
    sources: set[bool] = set()
    while nodes:
        node, for_size = nodes.pop()
        kind = node.kind()
        if kind == "prim::Param" or any(True for _ in node.blocks()):  # a block sees what is not its input
            sources.add(for_size)
        if not for_size and not kind.startswith("prim::"):
            operators.add(kind)
        for_size |= kind in _ASKS_SIZES or kind.endswith("_like") or kind.startswith("aten::new_")
        for_size &= not _is_sized_by_data(node)
        for one in (*(value.node() for value in node.inputs()), *_writers(node)):
            if (_identity(one), for_size) not in seen:
                seen.add((_identity(one), for_size))
                nodes.append((one, for_size))
    return _History(operators, False in sources, True in sources)


def _is_sized_by_data(node: Any) -> bool:
    """Tell whether the sizes of a node's results depend on values: those of an index do on a mask, not on numbers."""
    if node.kind() != "aten::index":
        return node.kind() in _SIZED_BY_DATA
    _, places = node.inputs()
    types = [value.type() for value in places.node().inputs() if value.type().kind() != "NoneType"]
    return any(one.kind() != "TensorType" or one.scalarType() in _MASKS for one in types)


def _identity(node: Any) -> int:
    """Return a number that only this node of the graph has: the bindings make a new object for it each time."""
    return next((int(value.unique()) for value in node.outputs()), -1)


def _writers(node: Any) -> Iterator[Any]:
    """Yield the nodes that write to the memory of a node's results, or make views of it."""
    for value in node.outputs():
        for use in value.uses():
            schema = use.user.schema()
            if use.offset == 0 and (
                "(a!" in schema or "Tensor(a" in schema or use.user.kind() == "prim::ListUnpack"
            ):
                yield use.user


def _is_certain(last: Any, operators: set[str]) -> bool:
    """Tell whether a node compares a draw from [0, 1), not written to since, with a limit that decides alone."""
    comparison = last.kind()
    if not operators <= {*_UNIFORM, comparison} or last.inputsSize() != 2:  # noqa: PLR2004
        return False
    drawn, other = last.inputs()
    limit = other.toIValue() if other.node().kind() == "prim::Constant" else None
    return drawn.node().kind() in _UNIFORM and is_certain_of_uniform(comparison.removeprefix("aten::"), limit)


@cache
def _draws(kind: str) -> bool:
    """Tell whether an operator, such as ``aten::rand``, draws random numbers."""
    space, _, name = kind.partition("::")
    packet = getattr(getattr(torch.ops, space), name, None) if name else None
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, one).tags for one in overloads)
