"""Find reads, in a trace, of memory that was written through another tensor: an ONNX graph would have the old value.

Torch's exporter turns a write such as ``y.mul_(3)`` into a new value that takes the place of `y`
(``torch/csrc/jit/passes/onnx/remove_inplace_ops_for_onnx.cpp``). A write through a slice that was made on the same
line of source, as in ``y[0] += 1``, reaches the tensor that was sliced; one through any other view does not, and
neither reaches views that were made before. Most models never look at those again - a ReLU in place after a flatten is
common - so it is the reading that is refused, not the write. Views of what was not written to may be made.

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
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from ortlab.engine.tracing.source_lines import caller_outside

_SLICES: Final = frozenset({"__getitem__", "select"})
"""Views through which the exporter writes to the tensor that they are views of, if all is on one line."""

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


class TracedWrites:
    """Which tensors still show the memory they share with a tensor that was written to."""

    def __init__(self) -> None:
        # Each list holds the tensors that may be read of a memory that was written to; weakly, so that a trace
        # needs no more memory than before.
        self._readable: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._slices: list[tuple[weakref.ref[torch.Tensor], Line]] = []
        self._written: dict[int, list[range]] = {}

    def note_result(
        self, name: str, sources: Iterable[torch.Tensor], results: Iterable[torch.Tensor]
    ) -> None:
        """Note what an operator, such as "view", has returned: it shows its memory as it is now."""
        sliced = (
            {memory(source) for source in sources if self._reaches_its_base(source)}
            if name in _SLICES
            else set()
        )
        for result in results:
            place = memory(result)
            if place in sliced:
                self._slices.append((weakref.ref(result), _line()))
            if place in self._readable:
                self._readable[place].append(weakref.ref(result))

    def note_write(self, written: torch.Tensor) -> None:
        """Note that a tensor was written to; the others that share its memory may not be read from now on."""
        readable = [written]
        if written._base is not None and self._reaches_its_base(written):
            readable.append(written._base)
        self._readable[memory(written)] = [weakref.ref(tensor) for tensor in readable]
        self._written.setdefault(memory(written), []).append(_extent(written))

    def stale(self, tensors: Iterable[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
        """Tell whether one of the tensors that an operator takes would show an old value in the graph.

        `results` is what the operator returns: it may make views of what was not written to.
        """
        return any(
            place in self._readable
            and not _holds(self._readable[place], tensor)
            and not self._shows_nothing_written(place, results)
            for tensor in tensors
            if (place := memory(tensor))
        )

    def _shows_nothing_written(self, place: int, results: Sequence[torch.Tensor]) -> bool:
        """Tell whether all results are views of a memory that begin and end outside of what was written to."""
        return bool(results) and all(
            memory(result) == place
            and not any(_meet(_extent(result), written) for written in self._written.get(place, ()))
            for result in results
        )

    def _reaches_its_base(self, tensor: torch.Tensor) -> bool:
        line = _line()
        return not tensor._is_view() or any(
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
