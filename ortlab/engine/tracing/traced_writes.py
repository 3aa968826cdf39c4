"""Give what is read in a trace, of memory that was written through another tensor, the value that it has in PyTorch.

Torch's exporter turns a write such as ``y.mul_(3)`` into a new value that takes the place of `y`
(``torch/csrc/jit/passes/onnx/remove_inplace_ops_for_onnx.cpp``). A write through a slice that was made on the same
line of source, as in ``y[0] += 1``, reaches the tensor that was sliced; one through any other view does not, and
neither reaches views that were made before. Most models never look at those again - a ReLU in place after a flatten is
common - so nothing is done at the write. Who is read later gets its value then: what was written is put back, view by
view, into the tensor that all are views of, and views are made anew of that. Where a kind of view is not known, or how
two tensors share their memory, the reading is refused. Views of what was not written to may be made as they are.

PyTorch refuses to write to an expanded tensor, whose entries share memory. Models have branches for traces in which
they do it nevertheless: transformers 4.56 beside torch 2.4 joins a mask with ``mask |= ...``
(``masking_utils.sdpa_mask_older_torch``), where without a trace it needs no mask. What the assignment means is clear,
since the name stands for the result from then on, and in a graph of values it can be had: it writes to a copy. Whoever
looks at the old tensor later is refused, because PyTorch has no answer that the graph could agree with.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from ortlab.engine.tracing.source_lines import caller_outside
from ortlab.engine.tracing.taps import is_tracing
from ortlab.engine.tracing.traced_values import function_name

_SLICES: Final = frozenset({"__getitem__", "select"})
"""Views through which the exporter writes to the tensor that they are views of, if all is on one line."""

_SAME_ELEMENTS: Final = frozenset(
    "view reshape flatten unflatten unsqueeze squeeze view_as reshape_as ravel".split()  # noqa: SIM905
)
_SAME_SIZES: Final = frozenset({"contiguous", "detach", "alias", "to", "type_as", "float"})
_ORDERS: Final = frozenset(
    "t T mT transpose swapaxes swapdims permute movedim moveaxis transpose_".split()  # noqa: SIM905
)
_PARTS: Final = frozenset({"chunk", "split", "unbind", "tensor_split"})
"""Views of all elements of a tensor in their order, in another one, and in several parts."""

_OURS: Final = f"{Path(__file__).parents[1]}{os.sep}"
"""The folder of the engine, whose frames are not the model's."""

Line: TypeAlias = tuple[str, int]
"""File and line number of the code that called torch."""


@contextmanager
def not_traced() -> Iterator[None]:
    """Keep what is done in the block, which is no part of the model, out of the trace, if there is one."""
    internals: Any = torch._C
    trace = internals._get_tracing_state()
    internals._set_tracing_state(None)
    try:
        yield
    finally:
        internals._set_tracing_state(trace)


@dataclass
class _View:
    """How a tensor was made as a view of another one: the call, and which of its results it is."""

    tensor: weakref.ref[torch.Tensor]
    source: torch.Tensor
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """Make the view of another source."""
        results = tensors_in(self.function(source, *self.args[1:], **self.kwargs))
        return list(results)[self.position]

    def put_back(self, source: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """Return `source` with `new` in the place of the view; None if that is not known of this kind of view."""
        name = function_name(self.function)
        if name in _SAME_ELEMENTS and new.dtype == source.dtype:
            return new.reshape_as(source)
        if name in _SAME_SIZES:
            return new
        if name in _ORDERS:
            with torch._C.DisableTorchFunction(), not_traced():
                order = self.of(torch.empty(tuple(range(source.dim())), device="meta")).shape
            return new.permute([order.index(axis) for axis in range(source.dim())])
        if name in _PARTS:
            parts = list(self.function(source, *self.args[1:], **self.kwargs))
            parts[self.position] = new
            axis = self._argument("dim", 2 if name != "unbind" else 1, 0)
            return torch.stack(parts, axis) if name == "unbind" else torch.cat(parts, axis)
        place = self._place(name, source.dim())
        if name == "diagonal" and (source.dim(), len(self.args), self.kwargs) == (2, 1, {}):
            row = torch.arange(new.shape[0], device=new.device)
            place = (row, row)
        if place is None:
            return None
        copy = source.clone()
        copy[place] = new
        return copy

    def _argument(self, name: str, position: int, default: Any) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def _place(self, name: str, dimensions: int) -> Any:
        """Return the index by which the view is one; None if it is none."""
        if name == "__getitem__":
            return self.args[1]
        if name not in {"select", "narrow"}:
            return None
        axis = self._argument("dim", 1, 0) % dimensions
        first = self._argument("index" if name == "select" else "start", 2, 0)
        there = first if name == "select" else slice(first, first + self._argument("length", 3, 0))
        return (*(slice(None),) * axis, there)


class TracedWrites:
    """Which tensors still show the memory they share with a tensor that was written to, and what the others show."""

    def __init__(self) -> None:
        # Each list holds the tensors that may be read of a memory that was written to; weakly, so that a trace
        # needs no more memory than before.
        self._readable: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._slices: list[tuple[weakref.ref[torch.Tensor], Line]] = []
        self._written: dict[int, list[range]] = {}
        self._views: dict[int, _View] = {}
        # By memory: the views through which was written since its first tensor had its value, and the values.
        self._pending: dict[int, list[tuple[torch.Tensor, Any]]] = {}
        # By parameter: its value before the first write.
        self._passing: dict[int, torch.Tensor] = {}

    def note_result(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Note what an operator, such as "view", has returned: it shows its memory as it is now."""
        sliced = (
            {memory(source) for source in sources if self._reaches_its_base(source)}
            if getattr(function, "__name__", "") in _SLICES
            else set()
        )
        for position, result in enumerate(results):
            place = memory(result)
            if place in sliced:
                self._slices.append((weakref.ref(result), _line()))
            if place in self._readable:
                self._readable[place].append(weakref.ref(result))
            source = args[0] if args else None
            if (
                isinstance(source, torch.Tensor)
                and source is not result
                and place
                and memory(source) == place
            ):
                number = id(result)
                gone = weakref.ref(result, lambda _, number=number: self._views.pop(number, None))  # type: ignore[misc]
                self._views[number] = _View(gone, source, function, args, kwargs, position)

    def note_write(self, written: torch.Tensor, *, by_function: bool = False) -> None:
        """Note that a tensor was written to; the others that share its memory are to be made anew from now on."""
        # What an autograd Function writes through a view, the exporter takes to no other tensor.
        place = memory(written)
        readable = [written]
        reaches = not written._is_view() if by_function else self._reaches_its_base(written)
        if written._base is not None and reaches:
            readable.append(written._base)
        self._readable[place] = [weakref.ref(tensor) for tensor in readable]
        self._written.setdefault(place, []).append(_extent(written))
        if not reaches and self._view(written) is not None and is_tracing():
            internals: Any = torch._C
            self._pending.setdefault(place, []).append((written, internals._get_value_trace(written)))
        else:
            self._pending.pop(place, None)

    def wrote_to(self, tensor: object) -> bool:
        """Tell whether the memory of a tensor was written to; an empty one has none."""
        place = (
            memory(tensor) if isinstance(tensor, torch.Tensor) else 0
        )  # its size, a trace would take for an input's
        return place != 0 and place in self._written

    def is_detached(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a view of another one through a `detach`."""
        view = self._view(tensor)
        return view is not None and (
            function_name(view.function) == "detach" or self.is_detached(view.source)
        )

    def has_views(self, tensor: torch.Tensor) -> bool:
        """Tell whether there are views of a tensor."""
        return any(view.source is tensor and view.tensor() is not None for view in self._views.values())

    def stale(self, tensors: Iterable[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
        """Tell whether one of the tensors that an operator takes would show an old value in the graph."""
        # `results` is what the operator returns: it may make views of what was not written to.
        return any(
            self._is_stale(tensor) and not self._shows_nothing_written(memory(tensor), results)
            for tensor in tensors
        )

    def refreshed(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Give tensors the values in the trace that they have in PyTorch; False if that is not known of one."""
        return all(self._refreshed(tensor) for tensor in tensors if self._is_stale(tensor))

    def _is_stale(self, tensor: torch.Tensor) -> bool:
        place = memory(tensor)
        return place in self._readable and not _holds(self._readable[place], tensor)

    def _refreshed(self, tensor: torch.Tensor) -> bool:
        if not self._is_stale(tensor):
            return True
        view = self._view(tensor)
        if view is None:
            return self._gathered(tensor)
        if not self._refreshed(view.source):
            return False
        self._take(tensor, view.of(view.source))
        return True

    def _gathered(self, first: torch.Tensor) -> bool:
        """Let the tensor that all others are views of have what was written through these."""
        pending = self._pending.get(memory(first), [])
        if not pending or any(self.first(written) is not first for written, _ in pending):
            return False
        internals: Any = torch._C
        value = first
        for written, traced in pending:
            with torch._C.DisableTorchFunction(), not_traced():
                new = written.detach().clone()
            internals._set_value_trace(new, traced)
            put = self._put(written, new, value)
            if put is None:
                return False
            value = put
        del self._pending[memory(first)]
        self._take(first, value)
        return True

    def _put(self, tensor: torch.Tensor, new: torch.Tensor, first: torch.Tensor) -> torch.Tensor | None:
        """Return what the first tensor is once a view of it is `new`."""
        view = self._view(tensor)
        if view is None:
            return new
        source = view.put_back(self._value(view.source, first), new)
        return None if source is None else self._put(view.source, source, first)

    def _value(self, tensor: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        view = self._view(tensor)
        return first if view is None else view.of(self._value(view.source, first))

    def keep_gradient(self, parameter: torch.Tensor) -> None:
        """Let gradients go to a parameter as if it had not been written to, as PyTorch does for a leaf."""
        if is_tracing() and id(parameter) not in self._passing:
            # A copy, since the exporter lets what is written take the place of the value itself.
            with torch._C.DisableTorchFunction(), torch.enable_grad():
                self._passing[id(parameter)] = parameter.clone()

    def written_parameter(self, parameter: torch.Tensor) -> None:
        """Note that a parameter itself was written to, without gradients."""
        if not is_tracing() or id(parameter) not in self._passing:
            return
        internals: Any = torch._C
        with torch._C.DisableTorchFunction(), not_traced():
            value = parameter.detach().clone()
        internals._set_value_trace(value, internals._get_value_trace(parameter))
        self._take(parameter, value)

    def _take(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        internals: Any = torch._C
        before = self._passing.get(id(tensor))
        if before is not None:
            with torch._C.DisableTorchFunction(), torch.enable_grad():
                value = (before - before.detach()) + value.detach()
        internals._set_value_trace(tensor, internals._get_value_trace(value))
        self._readable[memory(tensor)].append(weakref.ref(tensor))

    def _view(self, tensor: torch.Tensor) -> _View | None:
        view = self._views.get(id(tensor))
        return view if view is not None and view.tensor() is tensor else None

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor is a view of, itself if it is none."""
        view = self._view(tensor)
        return tensor if view is None else self.first(view.source)

    def _shows_nothing_written(self, place: int, results: Sequence[torch.Tensor]) -> bool:
        """Tell whether all results are views of a memory that begin and end outside of what was written to."""
        return bool(results) and all(
            memory(result) == place
            and not any(_meet(_extent(result), written) for written in self._written.get(place, ()))
            for result in results
        )

    def _reaches_its_base(self, tensor: torch.Tensor) -> bool:
        line = _line()
        by_itself = not tensor._is_view() and self._view(tensor) is None  # torch calls no `detach` a view
        return by_itself or any(
            reference() is tensor and made_on == line for reference, made_on in self._slices
        )


def _extent(tensor: torch.Tensor) -> range:
    """Return the positions in its memory from the first element of a tensor to the last."""
    with torch._C.DisableTorchFunction(), not_traced():  # not questions of the model's
        if not tensor.numel():
            return range(0)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return range(tensor.storage_offset(), tensor.storage_offset() + last + 1)


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 for one that has none."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    except NotImplementedError:  # inside torch.vmap a tensor has no memory of its own to ask for
        return 0


def _line() -> Line:
    frame = caller_outside(_OURS)
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _holds(references: list[weakref.ref[torch.Tensor]], tensor: torch.Tensor) -> bool:
    return any(reference() is tensor for reference in references)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


class ExpandedWrites:
    """The tensors that writes have left behind, because the writes went to copies."""

    def __init__(self) -> None:
        self._left: list[weakref.ref[torch.Tensor]] = []

    def target(self, written: torch.Tensor) -> torch.Tensor:
        """Return what a write to a tensor goes to: the tensor itself, or a copy if its entries share memory."""
        if not _is_expanded(written):
            return written
        self._left.append(weakref.ref(written))
        return written.clone(memory_format=torch.contiguous_format)

    def stale(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Tell whether one of the tensors was left behind by a write."""
        return any(reference() is tensor for tensor in tensors for reference in self._left)


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    # Not the forward's question: a trace would bind its export to the sizes of the batch (see `arguments`).
    with torch._C.DisableTorchFunction(), not_traced():
        return any(
            size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )


# ---- assignments to parts of a tensor ------------------------------------------------------------------------------
#
# Torch writes ``x[places] = values`` as views and a copy, and the exporter puts the views together again
# (``torch/csrc/jit/passes/onnx/pattern_conversion/pattern_conversion.cpp``). It takes each tensor among the places for
# a list of numbers there, so that ``x[rows[:, None], columns, :]`` ends in "Incompatible dimensions", and for complex
# numbers it knows neither shape nor dtype. Where all places are tensors, there is nothing to put together.


_WHOLE: Final = slice(None)


def translatable(x: torch.Tensor, index: Any, values: Any) -> tuple[Any, Any]:
    """Return index and values of an assignment that means the same."""
    places = _in_full(x, index if isinstance(index, tuple) else (index,))
    if x.is_complex() and all(isinstance(one, (int, slice)) and one is not True for one in places):
        places, values = _ranges_for_numbers(x, places, values)
        return _tensors_for_slices(x, places, []), values
    tensors = [place for place, one in enumerate(places) if _is_of_numbers(one)]
    if max((places[place].dim() for place in tensors), default=0) > 1 and all(
        isinstance(one, slice) or place in tensors for place, one in enumerate(places)
    ):
        return _tensors_for_slices(x, places, tensors), values
    return index, values


def assign(x: torch.Tensor, index: Any, values: Any) -> None:
    """Assign as ``x[index] = values``, whatever number of places a mask chooses."""
    # torch takes leading dimensions of one away, in a shape that the graph then has for good: where a mask chose one
    # place in the first batch, it would have to in all others.
    places = index if isinstance(index, tuple) else (index,)
    if isinstance(values, torch.Tensor) and all(isinstance(one, torch.Tensor) for one in places):
        numbered = [one.dim() if _is_of_numbers(one) else 1 for one in places]
        consumed = sum(1 if _is_of_numbers(one) else one.dim() for one in places)
        if 0 < values.dim() <= x.dim() - consumed + max(numbered):
            x.index_put_(places, values.to(x.dtype))
            return
    x[index] = values


def _in_full(x: torch.Tensor, places: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return places without an ellipsis, and without the whole dimensions at the end."""
    ellipses = [place for place, one in enumerate(places) if one is ...]
    if len(ellipses) == 1 and not any(one is None or isinstance(one, bool) for one in places):
        (place,) = ellipses
        places = (*places[:place], *[_WHOLE] * (x.dim() - len(places) + 1), *places[place + 1 :])
    while places and isinstance(places[-1], slice) and places[-1] == _WHOLE:
        places = places[:-1]
    return places


def _is_of_numbers(place: Any) -> bool:
    return isinstance(place, torch.Tensor) and place.dtype not in (torch.bool, torch.uint8)


def _ranges_for_numbers(x: torch.Tensor, places: tuple[Any, ...], values: Any) -> tuple[Any, Any]:
    """Replace each number by a range of one place, and give the values a dimension for it."""
    found = list(places)
    for place, number in reversed([*enumerate(places)]):
        if isinstance(number, int):
            found[place] = slice(number, number + 1 or None)
            behind = x.dim() - place - 1  # dimensions of the result, with those that were put in already
            if isinstance(values, torch.Tensor) and values.dim() > behind:
                values = values.unsqueeze(-behind - 1)
    return tuple(found), values


def _tensors_for_slices(
    x: torch.Tensor, places: tuple[Any, ...], tensors: list[int]
) -> tuple[torch.Tensor, ...]:
    """Replace each slice by the places that it means, in the dimensions that torch gives the result."""
    depth = max((places[place].dim() for place in tensors), default=0)
    slices = [place for place in range(len(places)) if place not in tensors]
    first = tensors[0] if tensors else len(places)
    together = not tensors or tensors[-1] - first + 1 == len(tensors)
    before = [place for place in slices if together and place < first]
    after = [place for place in slices if place not in before]
    found = list(places)
    for place in tensors:
        found[place] = places[place][(..., *[None] * len(after))]
    for place in slices:
        behind = (
            len(after) - after.index(place) - 1
            if place in after
            else depth + len(slices) - before.index(place) - 1
        )
        found[place] = torch.arange(x.size(place), device=x.device)[places[place]][(..., *[None] * behind)]
    return tuple(found)
