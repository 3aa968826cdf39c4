"""What the values of a trace are made of: data, sizes or random numbers, read from the graph of torch's tracer.

The graph's inputs are those of the call and the weights. A view and what it is a view of share their memory, so that
what is written to one is in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, Flag, auto
from functools import cache
from itertools import islice
from typing import Any, Final

import torch

from ortlab.engine.tracing.traced_values import is_certain_of_uniform

MODULE: Final = "prim::TracedModuleForward"
"""The operator whose block holds what a module does in a trace."""

_ASKS_SIZES: Final = frozenset(
    {"aten::size", "aten::sym_size", "aten::numel", "aten::len", "aten::_shape_as_tensor"}
)
_RESULT_SIZED_BY_DATA: Final = frozenset(
    f"aten::{name}"
    for name in """nonzero nonzero_numpy argwhere masked_select bincount repeat_interleave unique_dim
    unique_consecutive unique_dim_consecutive _unique _unique2""".split()  # noqa: SIM905
)
"""Operators whose results have sizes that depend on values."""

_MASKS: Final = ("Bool", "Byte", None)
"""Types of an index that is a mask, or may be one."""

_UNIFORM: Final = frozenset({"aten::rand", "aten::rand_like"})


class Origin(Enum):
    """What a value is made of."""

    INPUTS = "inputs"
    SIZES = "sizes of inputs"
    RANDOM = "random numbers"
    CONSTANT = "constants"


class _Of(Flag):
    """What has a part in a value, or in its shape."""

    NOTHING = 0
    DATA = auto()
    RANDOM = auto()
    SIZES = auto()


class Origins:
    """What each value of the present trace is made of; every operator is looked at once."""

    def __init__(self) -> None:
        # By a view, or the result of a write: the value that it shares memory with.
        self.memory: dict[int, int] = {}
        self._values: dict[int, _Of] = {}
        self._shapes: dict[int, _Of] = {}
        self._written: dict[int, _Of] = {}  # by the value whose memory it is
        self._done: list[int] = []  # operators of each block that is still open, the outermost first

    def of(self, tensor: torch.Tensor) -> Origin:
        """Tell what a tensor is made of."""
        # It is `INPUTS` if the value of an input has a part in it; else `RANDOM` if random numbers have one; else
        # `SIZES` if the size of an input has one; else `CONSTANT`, the same in each step. The comparison of a layer
        # drop of probability 0 counts as constant.
        internals: Any = torch._C
        value = internals._get_value_trace(tensor)
        self.look()
        found = self._value(value.unique())
        if _Of.DATA in found:
            return Origin.INPUTS
        if _Of.RANDOM in found:
            return Origin.RANDOM
        return Origin.SIZES if _Of.SIZES in found else Origin.CONSTANT

    def look(self) -> None:
        """Look at what the trace has got since the last time."""
        internals: Any = torch._C
        graph = internals._get_tracing_state().graph()
        if not self._done:
            given = [value.unique() for value in graph.inputs()]
            self._values, self._shapes = dict.fromkeys(given, _Of.DATA), dict.fromkeys(given, _Of.SIZES)
        self._look_at(graph, 0)

    def _look_at(self, block: Any, depth: int) -> None:
        if depth == len(self._done):
            self._done.append(0)
        done = self._done[depth]
        place = max(done - 1, 0)  # the last one may be a module whose block goes on
        for node in islice(block.nodes(), place, None):
            if node.kind() == MODULE:
                if place >= done:
                    del self._done[depth + 1 :]
                for inner in node.blocks():
                    self._look_at(inner, depth + 1)
            elif place >= done:
                self._add(node)
            place += 1
        self._done[depth] = place

    def _value(self, number: int) -> _Of:
        own = self._values.get(number, _Of.NOTHING)
        return own | self._written.get(self.memory.get(number, number), _Of.NOTHING)

    def _add(self, node: Any) -> None:
        kind, made = node.kind(), [value.unique() for value in node.outputs()]
        if kind == "prim::Constant":
            return
        given = [(value.unique(), _is_whole(value.type())) for value in node.inputs()]
        value = shape = _Of.NOTHING
        for number, is_whole in given:
            its = self._value(number)
            its_shape = self._shapes.get(number, _Of.NOTHING)
            shape |= its if is_whole else its_shape
            value |= its_shape if asks_sizes(kind) and number == given[0][0] else its | its_shape
        if is_sized_by_data(node):
            shape |= value
        if any(True for _ in node.blocks()):  # a block sees what is not its input
            value, shape = _Of.DATA, _Of.SIZES
        if self._is_certain(node):
            value = _Of.NOTHING
        elif _draws(kind):
            value |= _Of.RANDOM
        self._values.update(dict.fromkeys(made, value))
        self._shapes.update(dict.fromkeys(made, shape))
        schema = node.schema()
        if "Tensor(a" in schema or kind == "prim::ListUnpack":
            root = self.memory.setdefault(given[0][0], given[0][0])
            self.memory.update(dict.fromkeys(made, root))
            if "(a!" in schema:
                self._written[root] = self._written.get(root, _Of.NOTHING) | value

    def _is_certain(self, node: Any) -> bool:
        """Tell whether a node compares a draw from [0, 1), not written to since, with a limit that decides alone."""
        if node.inputsSize() != 2:  # noqa: PLR2004
            return False
        drawn, other = node.inputs()
        if drawn.node().kind() not in _UNIFORM or other.node().kind() != "prim::Constant":
            return False
        written = self.memory.get(drawn.unique(), drawn.unique()) in self._written
        return not written and is_certain_of_uniform(node.kind().removeprefix("aten::"), other.toIValue())


def nodes_of(block: Any) -> Iterator[Any]:
    """Yield the operators of a trace in their order; those of each module are in a block of its own."""
    for node in block.nodes():
        yield node
        if node.kind() == MODULE:
            for inner in node.blocks():
                yield from nodes_of(inner)


def asks_sizes(kind: str) -> bool:
    """Tell whether an operator looks at the sizes of its first input only."""
    return kind in _ASKS_SIZES or kind.endswith("_like") or kind.startswith("aten::new_")


def is_sized_by_data(node: Any) -> bool:
    """Tell whether the sizes of a node's results depend on values: those of an index do on a mask, not on numbers."""
    kind = node.kind()
    if kind == "aten::where":
        return bool(node.inputsSize() == 1)  # without what to choose from it says where a condition holds
    if kind != "aten::index":
        return kind in _RESULT_SIZED_BY_DATA
    _, places = node.inputs()
    types = [value.type() for value in places.node().inputs() if value.type().kind() != "NoneType"]
    return any(one.kind() != "TensorType" or one.scalarType() in _MASKS for one in types)


def _is_whole(kind: Any) -> bool:
    """Tell whether a type of the trace is that of whole numbers, such as the bounds of a slice."""
    return bool((kind.getElementType() if kind.kind() == "ListType" else kind).kind() == "IntType")


@cache
def _draws(kind: str) -> bool:
    """Tell whether an operator, such as ``aten::rand``, draws random numbers."""
    space, _, name = kind.partition("::")
    packet = getattr(getattr(torch.ops, space), name, None) if name else None
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, one).tags for one in overloads)
