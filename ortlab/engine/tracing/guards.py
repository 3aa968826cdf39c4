"""Check in each step what a trace has decided by the values of its one batch: branches, and numbers made of tensors.

A trace of ``if x.sum() > 0`` holds the branch that its batch took, and one of ``x.max().item()`` that batch's number;
ORTModule 1.19.2 trains every other batch with them, wrongly and without a word. Here the values that were read become
one more output of the graph, and a step in which they are others ends in an error. Values made of sizes alone are left
out, since an export that reads these is bound to the sizes of its batch (see `input_sizes`), and so
are constants. A random number that is made of no input is refused: its first draw would decide every step. That
Python or numpy drew one, which no trace sees, is said in the lab's messages.
"""

from __future__ import annotations

import linecache
import math
import sys
import warnings
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

import ortlab
from ortlab.engine.patching import replace
from ortlab.engine.tracing.not_traced import not_traced
from ortlab.engine.tracing.origins import Origin, origin
from ortlab.engine.tracing.outputs import Part
from ortlab.engine.tracing.traced_values import random_states
from ortlab.errors import BuildError, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

_DRAWN_BY_PYTHON: Final = (
    "Python or numpy drew a random number in the forward while it was exported, and the graph holds what was drawn: "
    "it is the same in every step. Draw with torch, as a tensor that is not turned into a number."
)

_PASSED_THROUGH: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders of code that calls functions of tensors for somebody else."""


@dataclass
class _Reads:
    """What one export reads of values: whether its first run did, and what its trace has read."""

    any: bool = False
    traced: bool = False
    places: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    index: int = -1


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
        drawn = random_states()
        with _ReadValues() as mode:
            outputs = original(self, *args)
        if traced and random_states() != drawn:
            warnings.warn(_DRAWN_BY_PYTHON, stacklevel=2)
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
        """Call `function`, and note the values that Python reads of its tensors."""
        kwargs = kwargs or {}
        name = _name(function)
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
        """Put tensors in."""
        self._references.update({id(tensor): weakref.ref(tensor) for tensor in tensors})


def _name(function: Any) -> str:
    name = str(getattr(function, "__name__", ""))
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else name


@cache
def _not_the_model() -> tuple[str, ...]:
    import onnxruntime  # which is checked before anything imports it

    return tuple(str(Path(one.__file__ or "").parent) for one in (onnxruntime, ortlab))


def _place() -> str:
    """Return the line of the model that is being executed; empty if it is ORTModule's, whose hooks count tokens."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_THROUGH):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_not_the_model()):
        return ""
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{name}, line {line}: {linecache.getline(name, line).strip()}"


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
