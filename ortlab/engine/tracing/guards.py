"""Check in each step what a trace has decided by the values of its one batch: branches, and numbers made of tensors.

A trace of ``if x.sum() > 0`` holds the branch that its batch took, and one of ``x.max().item()`` that batch's number;
ORTModule 1.19.2 trains every other batch with them, wrongly and without a word. Here the values that were read become
one more output of the graph, and a step in which they are others ends in an error. Values made of sizes alone are left
out, since an export that reads these is bound to the sizes of its batch (see `arguments`), and so
are constants. A random number that is made of no input is refused: its first draw would decide every step; so is one
that Python or numpy draws (see `python_draws`).
"""

from __future__ import annotations

import math
import os
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ortlab.engine.patching import replace
from ortlab.engine.tracing.outputs import Part
from ortlab.engine.tracing.python_draws import PythonDraws
from ortlab.engine.tracing.source_lines import TORCH, caller_outside, in_words, is_model_code
from ortlab.engine.tracing.traced_values import function_name, is_certain_of_uniform
from ortlab.engine.tracing.traced_writes import not_traced
from ortlab.errors import BuildError, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import onnx

_READING: Final = frozenset(
    {"__bool__", "__float__", "__index__", "__int__", "is_nonzero", "item", "numpy", "tolist"}
)
"""Functions of a tensor that give Python its values."""

_SIZES: Final = frozenset({"__len__", "numel", "nelement", "shape", "size", "unbind", "__iter__"})
"""Functions of a tensor that give Python, or make numbers of, its sizes."""

_SIZED_BY_DATA: Final = frozenset(
    {"argwhere", "masked_select", "nonzero", "unique", "unique_consecutive", "_unique2", "unique_dim"}
)
_LOOSELY: Final = 1e-5
"""Relative difference that a floating-point number may have: two engines round differently."""

_COUNTED: Final = 2.0**24
"""Below this a whole number is a count, a class or a place; above it float32 has no other numbers."""

_PASSED_THROUGH: Final = (TORCH, f"{Path(__file__).parent}{os.sep}")
"""Folders of code that calls functions of tensors for somebody else."""


@dataclass
class _Reads:
    """What one export reads of values: whether its first run did, and what its trace has read."""

    any: bool = False
    traced: bool = False
    places: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    index: int = -1
    draws: PythonDraws = field(default_factory=PythonDraws)


_reads: Final[ContextVar[_Reads | None]] = ContextVar("reads", default=None)


def install() -> None:
    """Guard each export of ORTModule. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._io import _FlattenedModule

    replace(_FlattenedModule, "forward", _give_out_reads)
    replace(GraphTransitionManager, "_get_exported_model", _note_reads)


# --- in the export ------------------------------------------------------------------------------------------------


def _note_reads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphTransitionManager._get_exported_model``: it runs the forward once and then traces it."""

    def get_exported_model(*args: Any, **kwargs: Any) -> Any:
        reads = _Reads()
        token = _reads.set(reads)
        try:
            model, schema = original(*args, **kwargs)
        finally:
            _reads.reset(token)
        if reads.any and reads.places:
            schema = GuardedPart(schema, reads.index, tuple(reads.places), tuple(reads.values))
        elif reads.any:  # the forward reads values only where it is not traced, as masks of transformers do
            _drop_output(model, reads.index)
        return model, schema

    return get_exported_model


def _drop_output(model: onnx.ModelProto, index: int) -> None:
    name = model.graph.output[index].name
    del model.graph.output[index]
    made = next(place for place, node in enumerate(model.graph.node) if name in node.output)
    del model.graph.node[made]


def _give_out_reads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward that ORTModule exports: its results are the outputs of the graph."""

    def forward(self: Any, *args: Any) -> Any:
        reads = _reads.get()
        if reads is None:
            return original(self, *args)
        traced = bool(torch._C._get_tracing_state())
        with reads.draws.watched(self._original_module), _ReadValues() as mode:
            outputs = original(self, *args)
        if not traced:
            reads.any = reads.any or mode.any
        elif reads.any:
            reads.places, reads.values = mode.places, mode.values
        if reads.any:
            reads.index = len(outputs)
            # A number in front, so that there is an output where the first run read values and the trace reads none.
            zero = torch.zeros(1, dtype=torch.int64, device=self._device)
            outputs = [*outputs, _together([zero, *mode.tensors]) if traced else zero]
        return outputs

    return forward


def _together(values: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate vectors of numbers, in float32 if one of them is of floating point."""
    if any(one.is_floating_point() for one in values):
        values = [one.to(torch.float32) for one in values]
    return torch.cat(values)


class _ReadValues(TorchFunctionMode):
    """Notes the values that Python reads of tensors while a forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False
        self.tensors: list[torch.Tensor] = []
        self.places: list[str] = []
        self.values: list[float] = []
        self._of_sizes = _Marked()
        self._sized_by_data = _Marked()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(function)
        if name in _READING and isinstance(args[0], torch.Tensor):
            self._note(args[0])
        result = function(*args, **kwargs)
        given = [one for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in _pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        by_data = name in _SIZED_BY_DATA or any(one in self._sized_by_data for one in given)
        by_data |= name == "where" and len(args) + len(kwargs) == 1
        by_data |= name == "__getitem__" and any(one.dtype is torch.bool for one in given[1:])
        if name in _SIZES:
            if by_data:
                self.any = True
                if name in {"__len__", "__iter__", "unbind"}:
                    self._note(args[0].new_zeros(()) + args[0].shape[0])
            elif name not in {"unbind", "__iter__"}:
                self._of_sizes.add(made)
        elif given and all(one in self._of_sizes for one in given):
            self._of_sizes.add(made)
        elif by_data:
            self._sized_by_data.add(made)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        place = _place()
        if not place:
            return
        of_sizes = tensor in self._of_sizes
        if torch._C._get_tracing_state():
            made_of = origin(tensor)
            if made_of is Origin.RANDOM:
                _refuse_random(place)
            of_sizes |= made_of is Origin.CONSTANT
        if of_sizes:
            return
        self.any = True
        if not torch._C._get_tracing_state():
            return
        kind = torch.float32 if tensor.is_floating_point() else torch.int64
        values = tensor.detach().to(kind, copy=True).reshape(-1)
        with not_traced():
            self.values += values.tolist()
        self.tensors.append(values)
        self.places += [place] * values.numel()


def _refuse_random(place: str) -> NoReturn:
    raise BuildError(
        f"A random number that Python reads cannot be exported: {place}",
        why="The graph would hold the first draw: a layer drop, for one, would skip the same layers in every step.",
        fix="Set its probability to 0 (such as config.layerdrop), choose with tensors (torch.where), or wrap the "
        "modules that do not draw: ortlab.wrap(model, only=[...]).",
    )


class _Marked:
    """A set of tensors, by identity, that keeps none alive."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[torch.Tensor]] = {}

    def __contains__(self, tensor: object) -> bool:
        reference = self._references.get(id(tensor))
        return reference is not None and reference() is tensor

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        self._references.update({id(tensor): weakref.ref(tensor) for tensor in tensors})


def _place() -> str:
    """Return the line of the model that is being executed; empty if it is ORTModule's, whose hooks count tokens."""
    frame = caller_outside(*_PASSED_THROUGH)
    return in_words(frame) if frame is not None and is_model_code(frame.f_code.co_filename) else ""


# --- what a value is made of, read from the graph that torch's tracer writes, whose inputs are parameters, too ----

_ASKS_SIZES: Final = frozenset(
    {"aten::size", "aten::sym_size", "aten::numel", "aten::len", "aten::_shape_as_tensor"}
)
"""Operators that ask their input for its sizes; so do those that end in ``_like`` and begin with ``new_``."""

_RESULT_SIZED_BY_DATA: Final = frozenset(
    f"aten::{name}"
    for name in """nonzero nonzero_numpy argwhere masked_select where index bincount repeat_interleave unique_dim
    unique_consecutive unique_dim_consecutive _unique _unique2""".split()  # noqa: SIM905
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
        return node.kind() in _RESULT_SIZED_BY_DATA
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


# --- in each step -------------------------------------------------------------------------------------------------


def _same(before: float, now: float) -> bool:
    """Tell whether two values decide alike: counts and numbers of classes exactly, results of sums up to rounding."""
    if math.isnan(before) or math.isnan(now):
        return math.isnan(before) and math.isnan(now)
    if max(abs(before), abs(now)) < _COUNTED and before == int(before) and now == int(now):
        return before == now
    return math.isclose(before, now, rel_tol=_LOOSELY)


@dataclass(frozen=True)
class GuardedPart(Part):
    """What a forward returns, if the values that its trace has read are the same."""

    returned: Any  # schema of what the forward returns: a `Part`, or one of ORTModule's own
    index: int  # of the values, among the tensors of the graph
    places: tuple[str, ...]  # file and line of the code that read each value
    values: tuple[float, ...]  # what the trace has read

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the forward returns; raise ExecutionError if a value is not what the trace has read."""
        from onnxruntime.training.ortmodule import _graph_transition_manager as transitions

        found = tensors[self.index].tolist()[1:]
        for place, before, now in zip(self.places, self.values, found, strict=True):
            if not _same(before, now):
                raise ExecutionError(
                    f"The forward depends on a value of the batch, at {place}",
                    why=f"It was {before:g} when the forward was exported and is {now:g} in this step, and the graph "
                    "holds what the forward did then: its numbers would be wrong.",
                    fix="Compute with tensors (torch.where, masks) instead of Python, or leave the part that does this "
                    "out of the wrapped module.",
                )
        return transitions.unflatten_data_using_schema(tensors, self.returned)
