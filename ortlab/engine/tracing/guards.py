"""Check what a trace has decided by its one batch: branches, numbers made of tensors, and turns of loops.

A trace of ``if x.sum() > 0`` holds the branch that its batch took, and one of ``x.max().item()`` that batch's number;
ORTModule 1.19.2 trains every other batch with them, wrongly and without a word. What Python reads of tensors in a
trace is noted here. What is made of sizes alone is kept beside the export, which is good for those calls in which
Python would read the same (see `sizes`). What is made of data becomes one more output of the graph, and a step in which
it is something else ends in an error. Constants are left out. A random number that is made of no input is refused: its
first draw would decide every step; so is one that Python or numpy draws (see `python_draws`), and a time (`clocks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch._functorch import vmap
from torch.nn.utils import rnn
from torch.overrides import TorchFunctionMode

from ortlab.engine.patching import replace, set_to, with_attributes
from ortlab.engine.tracing.clocks import Clocks, refuse_times
from ortlab.engine.tracing.origins import Origin, Origins
from ortlab.engine.tracing.outputs import Part
from ortlab.engine.tracing.python_draws import PythonDraws
from ortlab.engine.tracing.reached import Reached
from ortlab.engine.tracing.sizes import (
    LAYOUTS,
    Computation,
    SizeRead,
    computation_of,
    read,
)
from ortlab.engine.tracing.source_lines import ORTLAB, TORCH, caller_outside, in_words, is_model_code
from ortlab.engine.tracing.taps import drop_dead_nodes
from ortlab.engine.tracing.traced_values import flat, function_name
from ortlab.engine.tracing.traced_writes import not_traced
from ortlab.errors import BuildError, ExecutionError

_READERS: Final = (
    "__bool__ __complex__ __float__ __hash__ __index__ __int__ item numpy tolist".split()  # noqa: SIM905
)
"""Methods of a tensor that give Python its values; a number as the key of a dict is looked up by its value."""

_OF_NUMBERS: Final[dict[str, Callable[..., Any]]] = {
    "__round__": lambda number, *digits: round(number.item(), *digits),
    "__trunc__": lambda number: math.trunc(number.item()),
    "__divmod__": lambda number, other: (number // other, number % other),
    "__rdivmod__": lambda number, other: (other // number, other % number),
}
"""What Python does with numbers and no tensor has: in a trace, sizes are tensors."""

_IN_PARTS: Final = frozenset({"chunk", "split", "tensor_split", "unbind"})
"""Functions that make a list of tensors, whose length follows from a size."""

_LOOSELY: Final = 1e-5
"""Relative difference that a floating-point number may have: two engines round differently."""

_COUNTED: Final = 2.0**24
"""Below this a whole number is a count, a class or a place; above it float32 has no other numbers."""


@dataclass
class Reads:
    """What the trace of one export reads of values and of sizes."""

    places: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    sizes: list[SizeRead] | None = None  # None if nothing has been traced: an export from the disk
    computation: Computation | None = None  # of what it reads of sizes
    index: int = -1  # of the values, among the outputs
    draws: PythonDraws = field(default_factory=PythonDraws)


_reads: Final[ContextVar[Reads | None]] = ContextVar("reads", default=None)
_noting: Final[ContextVar[_Noting | None]] = ContextVar("noting", default=None)


def install() -> None:
    """Guard each export of ORTModule. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._io import _FlattenedModule

    replace(_FlattenedModule, "forward", _give_out_reads)
    replace(GraphTransitionManager, "_get_exported_model", _note_reads)


@contextmanager
def reads_noted() -> Iterator[Reads]:
    """Note what the export in the block reads."""
    reads = Reads()
    with set_to(_reads, reads):
        yield reads


# --- in the export ------------------------------------------------------------------------------------------------


def _note_reads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphTransitionManager._get_exported_model``: it runs the forward once and then traces it."""

    def get_exported_model(*args: Any, **kwargs: Any) -> Any:
        model, schema = original(*args, **kwargs)
        reads = _reads.get()
        if reads is not None and reads.places:
            schema = GuardedPart(schema, reads.index, tuple(reads.places), tuple(reads.values))
        elif reads is not None:
            del model.graph.output[reads.index]
            drop_dead_nodes(model.graph)
        return model, schema

    return get_exported_model


def _give_out_reads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward that ORTModule exports: its results are the outputs of the graph."""

    def forward(self: Any, *args: Any) -> Any:
        reads = _reads.get()
        if reads is None:
            return original(self, *args)
        # A number in front, so that there is an output even where the trace reads no values.
        values = [torch.zeros(1, dtype=torch.int64, device=self._device)]
        reached = Reached(self._original_module)
        with reads.draws.watched(self._original_module, reached):
            if torch._C._get_tracing_state():
                clocks = Clocks(reached)
                with clocks.followed(), _Noting(clocks) as noting, noting.methods_replaced():
                    outputs = original(self, *args)
                if noting.failed:
                    raise BuildError(
                        f"The forward catches an error of torch: {noting.failed}",
                        why="In every step the graph would do what the forward did then, also where torch raises none.",
                        fix="Ask for what decides it, as in `if x.shape[0] == 3`, or let PyTorch run the model: "
                        "lab.set(engine='eager').",
                    )
                reads.places, reads.values, reads.sizes = noting.places, noting.values, noting.sizes
                reads.computation = computation_of(reads.sizes, len(args), noting.origins)
                values += noting.tensors
            else:
                outputs = original(self, *args)
        reads.index = len(outputs)
        return [*outputs, _together(values)]

    return forward


def _together(values: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate vectors of numbers, in float32 if one of them is of floating point."""
    if any(one.is_floating_point() for one in values):
        values = [one.to(torch.float32) for one in values]
    return torch.cat(values)


class _Noting(TorchFunctionMode):
    """Notes what Python reads of tensors while a forward is traced."""

    # A mode does not see the insides of functions of ``torch.nn.functional``, so that the methods which make numbers of
    # tensors are replaced.

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self._clocks = clocks
        self.tensors: list[torch.Tensor] = []
        self.places: list[str] = []
        self.values: list[float] = []
        self.sizes: list[SizeRead] = []
        self.origins = Origins()
        self.failed = ""  # the line of a call in which torch raised an error and dropped the trace
        self._indexes = False  # on while torch takes an index, whose sizes stay symbols

    @contextmanager
    def methods_replaced(self) -> Iterator[None]:
        """Let the methods in `_READERS` note, in the block and for this thread, what they are asked for."""
        own = {name: vars(torch.Tensor).get(name) for name in (*_READERS, *_OF_NUMBERS)}
        for name in _READERS:
            setattr(torch.Tensor, name, _noted_by_method(getattr(torch.Tensor, name), name))
        for name, method in _OF_NUMBERS.items():
            setattr(torch.Tensor, name, method)
        sized = _noted_by_vmap(vmap._validate_and_get_batch_size)
        checked = _checked_by_torch(torch._check_with)
        try:
            with (
                set_to(_noting, self),
                with_attributes(vmap, _validate_and_get_batch_size=sized),
                with_attributes(torch, _check_with=checked),
                with_attributes(
                    nn.RNNBase, check_forward_args=_checked_packed(nn.RNNBase.check_forward_args)
                ),
                with_attributes(nn.LSTM, check_forward_args=_checked_packed(nn.LSTM.check_forward_args)),
            ):
                yield
        finally:
            for name, before in own.items():
                if before is None:
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, before)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(function)
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if self._clocks.places and torch._C._get_tracing_state():
            refuse_times((args, kwargs))
        if tensor is None or not torch._C._get_tracing_state():
            return function(*args, **kwargs)
        if name in LAYOUTS:
            self.note(tensor, name)
        elif name in _IN_PARTS:
            args, kwargs = self._with_numbers(args), self._with_numbers(kwargs)
            args = (self._note_parts(name, *args, **kwargs), *args[1:])
        elif name in ("scatter", "scatter_"):
            args, kwargs = self._with_numbers(args), self._with_numbers(kwargs)
        elif name in ("is_nonzero", "tensor"):
            self.note(tensor, "__bool__" if name == "is_nonzero" else "tolist")
        elif name in ("equal", "allclose"):
            self._note_comparison(name, *args, **kwargs)
        elif name in ("squeeze", "squeeze_") and self._squeezes_nothing(*args, **kwargs):
            return tensor
        return self._called(function, args, kwargs, indexes=name in ("__getitem__", "__setitem__"))

    def _called(self, function: Any, args: Any, kwargs: Any, *, indexes: bool) -> Any:
        """Call a function, and note the sizes among its arguments that it reads as Python does."""
        numbers = [] if indexes else [one for one in flat((args[1:], kwargs)) if _is_number(one)]
        used = [*map(_uses, numbers)]
        internals: Any = torch._C
        trace = internals._get_tracing_state()
        with with_attributes(self, (), _indexes=indexes):
            try:
                result = function(*args, **kwargs)
            except Exception:
                if internals._get_tracing_state() is None:
                    frame = caller_outside(TORCH, ORTLAB)
                    self.failed = self.failed or ("" if frame is None else in_words(frame))
                    internals._set_tracing_state(trace)
                raise
        for number, before in zip(numbers, used, strict=True):
            # One that no operator takes, torch has read, as the padding of a convolution.
            if _uses(number) == before:
                self.note(number, "__int__")
        return result

    def _with_numbers(self, given: Any) -> Any:
        """Return arguments with numbers of Python's for sizes, which torch would take for what a tensor there means."""
        if isinstance(given, dict):
            return {key: self._number(one) for key, one in given.items()}
        return tuple(map(self._number, given))

    def _number(self, one: Any) -> Any:
        if not _is_number(one) or self.origins.of(one) is not Origin.SIZES:
            return one
        self.note(one, "__int__")
        with not_traced():
            return int(one)

    def _note_comparison(self, name: str, one: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> None:
        """Note what tells whether two tensors are equal: their sizes, and where these are equal all their values."""
        sizes: list[Any] = [a == b for a, b in zip(one.shape, other.shape, strict=False)]
        for size in sizes:
            self.note(size, "__bool__")
        if one.dim() == other.dim() and all(map(bool, sizes)):
            same = torch.isclose(one, other, **kwargs) if name == "allclose" else one == other
            self.note(same.all(), "__bool__")

    def _squeezes_nothing(self, tensor: torch.Tensor, dim: Any = None) -> bool:
        """Tell whether a `squeeze` meets another size than 1, and note it: PyTorch then does nothing, ORT fails."""
        if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
            return False
        with not_traced():
            if tensor.size(dim) == 1:
                return False
        size: Any = tensor.size(dim)
        self.note(size == 1, "__bool__")
        return True

    def _note_parts(self, name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Note what the number of parts follows from; return what is taken apart.

        But for chunks, that is a size of the tensor.
        """
        given = dict(zip(("dim",) if name == "unbind" else ("number", "dim"), args, strict=False)) | kwargs
        size: Any = tensor.size(given.get("dim", 0))
        number = given.get("number", given.get("chunks"))
        if name == "chunk" and isinstance(number, int):
            longest = ((size + number - 1) // number).clamp(min=1)
            size = (size + longest - 1) // longest
        self.note(size, "__int__")
        if name != "unbind" or self.origins.of(size) is not Origin.INPUTS:
            return tensor
        # As many as now: ORT would fail at another number of turns before the step is refused for it.
        dim = given.get("dim", 0)
        with not_traced():
            turns = int(size)
        if not turns:
            return tensor
        none = tensor.narrow(dim, 0, 1).expand(
            *(turns if d == dim % tensor.dim() else -1 for d in range(tensor.dim()))
        )
        return torch.cat([tensor, torch.zeros_like(none)], dim).narrow(dim, 0, turns)

    def note(self, tensor: torch.Tensor, how: str) -> None:
        """Note that Python reads a tensor by a function of this name."""
        frame = caller_outside(TORCH, ORTLAB)
        if frame is None or not is_model_code(frame.f_code.co_filename):
            return  # ORTModule's own, whose hooks count tokens
        place = in_words(frame)
        made_of = Origin.SIZES if how in LAYOUTS else self.origins.of(tensor)
        if made_of is Origin.RANDOM:
            _refuse_random(place)
        elif made_of is Origin.SIZES and not self._indexes:
            self._note_size(tensor, how, place)
        elif made_of is Origin.INPUTS:
            kind = torch.float32 if tensor.is_floating_point() else torch.int64
            values = tensor.detach().to(kind, copy=True).reshape(-1)
            with not_traced():
                found = values.tolist()
            self.tensors.append(values)
            self.values += found
            self.places += [place] * len(found)

    def _note_size(self, tensor: torch.Tensor, how: str, place: str) -> None:
        internals: Any = torch._C
        kept = tensor if how in LAYOUTS else tensor.detach().clone()  # it may be written to later
        with not_traced():
            found = read(tensor, how)
        self.sizes.append(SizeRead(place, how, found, internals._get_value_trace(kept).unique()))


def _is_number(value: Any) -> bool:
    """Tell whether a value is a whole number of a trace, as sizes are."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is torch.int64
        and not value.dim()
        and not torch._C._functorch.is_functorch_wrapped_tensor(
            value
        )  # one of torch.vmap has no value in a trace
    )


def _uses(tensor: torch.Tensor) -> int:
    """Return how many operators of the present trace take a value."""
    internals: Any = torch._C
    return len(internals._get_value_trace(tensor).uses())


@contextmanager
def _traced_again() -> Iterator[None]:
    """Trace what is done in the block even while torch makes a tensor of Python's data, which it keeps out."""
    internals: Any = torch._C
    excluded = internals._dispatch_tls_is_dispatch_key_excluded("Tracer")
    internals._dispatch_tls_set_dispatch_key_excluded("Tracer", False)  # noqa: FBT003 - torch's
    try:
        yield
    finally:
        internals._dispatch_tls_set_dispatch_key_excluded("Tracer", excluded)


_ASKED_IN_EACH_STEP: Final = frozenset({rnn.pad_packed_sequence.__code__})
"""Functions of torch that ask of sizes what the operator behind them asks again, so that it need not be noted."""


def _noted_by_method(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a method of tensors, which other threads may call meanwhile."""

    @wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        noting = _noting.get()
        if noting is None or not torch._C._get_tracing_state():
            return original(self, *args, **kwargs)
        with set_to(_noting, None):  # torch looks the method up again
            if name == "__hash__":
                return _hash(noting, self, original)
            caller = caller_outside(ORTLAB)
            if caller is not None and caller.f_code in _ASKED_IN_EACH_STEP:
                with not_traced():
                    return original(self, *args, **kwargs)
            with _traced_again():
                noting.note(self, name)
            return original(self, *args, **kwargs)

    return method


def _noted_by_vmap(original: Callable[..., int]) -> Callable[..., int]:
    """Wrap the function by which `vmap` asks how often it maps, which is a number in what it makes."""

    def batch_size(dims: Sequence[Any], args: Sequence[Any]) -> int:
        noting = _noting.get()
        for dim, one in zip(dims, args, strict=True):
            if noting is not None and isinstance(dim, int) and isinstance(one, torch.Tensor):
                size: Any = one.size(dim)
                if isinstance(size, torch.Tensor):
                    noting.note(size, "__int__")
        return original(dims, args)

    return batch_size


def _checked_by_torch(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap what ``torch._check`` calls, which takes a condition on a size for one on a tensor, and refuses it."""

    def check(error: type[Exception], condition: Any, *message: Any) -> None:
        noting = _noting.get()
        if noting and isinstance(condition, torch.Tensor) and noting.origins.of(condition) is Origin.SIZES:
            condition = bool(condition)
        original(error, condition, *message)

    return check


def _checked_packed(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap what a recurrent layer asks of its arguments: of packed sequences, things that only data tells.

    Each number of sequences would have a graph of its own. The kernel that runs them asks for the same in each step.
    """

    def check(self: nn.RNNBase, given: torch.Tensor, hidden: Any, batch_sizes: torch.Tensor | None) -> None:
        if _noting.get() is None or batch_sizes is None:
            original(self, given, hidden, batch_sizes)

    return check


def _hash(noting: _Noting, tensor: torch.Tensor, original: Callable[..., int]) -> int:
    """Return the hash of a size as the number that it is without a trace, so that sets and dicts find it."""
    if tensor.dim() or tensor.dtype is not torch.int64 or noting.origins.of(tensor) is not Origin.SIZES:
        return original(tensor)
    noting.note(tensor, "__int__")
    with not_traced():
        return hash(int(tensor))


def _refuse_random(place: str) -> NoReturn:
    raise BuildError(
        f"A random number that Python reads cannot be exported: {place}",
        why="The graph would hold the first draw: a layer drop, for one, would skip the same layers in every step.",
        fix="Set its probability to 0 (such as config.layerdrop), choose with tensors (torch.where), or wrap the "
        "modules that do not draw: ortlab.wrap(model, only=[...]).",
    )


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
